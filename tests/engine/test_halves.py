# SPDX-License-Identifier: Apache-2.0
"""What fails together is computed again in halves, and what the memory has no room for is not tried again at once."""

import pytest

from hf_triton.engine.halves import BatchSize, run_in_halves
from hf_triton.errors import HfTritonError


@pytest.mark.parametrize(
    ("most", "limit", "calls", "now"),
    [
        (64, 3, [6, 3, 3], 5),  # half of what failed, not of what might have been
        (64, 1, [6, 3, 2, 1, 1, 1, 3, 2, 1, 1, 1], 4),
        (64, 6, [6], 64),
    ],
)
def test_memory_halves_what_failed(most: int, limit: int, calls: list[int], now: int) -> None:
    seen: list[int] = []

    def compute(items: list[int]) -> None:
        seen.append(len(items))
        if len(items) > limit:
            raise MemoryError

    size = BatchSize(most)
    run_in_halves(list(range(6)), compute, wanted=list, on_alone=_never, size=size)
    assert (seen, size.now) == (calls, now)


def test_the_unit_is_the_callers() -> None:
    def compute(items: list[int]) -> None:
        if len(items) > 1:
            raise MemoryError

    size = BatchSize(4096, least=64, step=0)
    run_in_halves([100, 200], compute, wanted=list, on_alone=_never, size=size, cost=sum)
    assert size.now == 150


def _never(item: int, error: HfTritonError) -> None:
    raise AssertionError((item, error))
