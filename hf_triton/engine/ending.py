# SPDX-License-Identifier: Apache-2.0
"""Ends a call of `model.generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria


class Ending(StoppingCriteria):
    """`generate`'s stopping rule: after every step `ended` says which rows end, given the tokens `[rows, columns]`."""

    def __init__(self, ended: Callable[[torch.Tensor], list[bool]]) -> None:
        self._ended = ended

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        """The rows that end, `[rows]` bool."""
        ended = self._ended(input_ids)
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]
