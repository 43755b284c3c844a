# SPDX-License-Identifier: Apache-2.0
"""From a model's name to a checkpoint on disk, and from there to a tokenizer and a model."""
