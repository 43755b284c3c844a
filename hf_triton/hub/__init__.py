# SPDX-License-Identifier: Apache-2.0
"""Turns a model's name into a checkpoint on disk, and that into a tokenizer and a model."""
