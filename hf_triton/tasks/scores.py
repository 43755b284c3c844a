# SPDX-License-Identifier: Apache-2.0
"""Scores of a classification head's logits, in float32 as transformers' pipelines compute them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]


def softmax(logits: Floats) -> Floats:
    """Probabilities along the last axis, which add up to 1."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(logits: Floats) -> Floats:
    """Each logit's own probability."""
    with np.errstate(over="ignore"):  # of large negative ones, whose probability is 0
        probabilities: Floats = 1 / (1 + np.exp(-logits))
    return probabilities


def best_first(scores: Floats) -> list[int]:
    """The indices of scores, the highest first; of equal ones, the first."""
    return [int(index) for index in np.argsort(-scores, kind="stable")]
