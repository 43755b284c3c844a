# SPDX-License-Identifier: Apache-2.0
"""Engines: token ids or samples of sound in, token ids out. They know neither text nor Triton."""
