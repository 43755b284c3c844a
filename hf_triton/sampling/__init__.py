# SPDX-License-Identifier: Apache-2.0
"""Samples the next token of every sequence in a batch. Knows no model, no KV cache and no queue."""
