# SPDX-License-Identifier: Apache-2.0
"""Places in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
