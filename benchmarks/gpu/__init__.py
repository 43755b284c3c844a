# SPDX-License-Identifier: Apache-2.0
"""What measures a GPU: scripts that `run.sh` runs, and `tables.py`, which documents are made with."""
