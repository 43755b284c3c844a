# SPDX-License-Identifier: Apache-2.0
"""Whole sequences in one row: a step of which nothing is stored, as a transformers cache."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_triton.runner.step_tensors import StepTensors


class PackedRow(Cache):
    """A row `[1, tokens]` of whole sequences. It is a cache: given none, transformers makes masks of position ids."""

    def __init__(self, step: StepTensors) -> None:
        super().__init__(layers=[])
        self.step = step
        self.num_attention_calls = 0
        """How often attention was computed for the row."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they came."""
        return key_states, value_states

    @cached_property
    def groups(self) -> list[tuple[int, int, int]]:
        """Neighbours of one length together: their first token in the row, how many they are, and their length."""
        groups, start = [], 0
        for length, equal in itertools.groupby(self.step.ends):
            groups.append((start, len(list(equal)), length))
            start += groups[-1][1] * length
        return groups
