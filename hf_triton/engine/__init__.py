# SPDX-License-Identifier: Apache-2.0
"""Engines: token ids in, token ids out. They know neither text nor Triton."""
