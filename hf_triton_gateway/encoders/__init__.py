# SPDX-License-Identifier: Apache-2.0
"""Embeddings, scores, classes and entities; speech to text."""
