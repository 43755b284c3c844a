# SPDX-License-Identifier: Apache-2.0
"""RowParams: what draws depend on beside scores, as arrays with a number for each row. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_triton.sampling.params import SamplingParams

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class RowParams(NamedTuple):
    """Sampling parameters of rows and the keys of their draws; all `[rows]`, ranges as in `SamplingParams`."""

    temperature: Floats
    top_k: Ids
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    keys: Ids
    """The 64 bits of `SequenceSampler.draw_key`."""

    @classmethod
    def build(cls, params: Sequence[SamplingParams], keys: Sequence[int]) -> RowParams:
        rows = [(one.temperature, one.top_k, one.top_p, one.min_p, one.typical_p) for one in params]
        temperature, top_k, top_p, min_p, typical_p = np.array(rows, np.float64).T
        bits = np.array(keys, np.uint64).view(np.int64)
        return cls(temperature, top_k.astype(np.int64), top_p, min_p, typical_p, bits)

    def select(self, rows: Ids) -> RowParams:
        return RowParams._make(numbers[rows] for numbers in self)

    def pack(self) -> Ids:
        """Temperature, top_k, top_p, min_p and keys as bits, `[5, rows]`."""
        numbers = self.temperature, self.top_k, self.top_p, self.min_p, self.keys
        return np.stack([np.ascontiguousarray(each).view(np.int64) for each in numbers])
