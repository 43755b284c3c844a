# SPDX-License-Identifier: Apache-2.0
"""Embeddings, scores, classes, entities, audio: the APIs of models that do not generate text."""
