# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from hf_triton.protocol.model_info import ModelInfo


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(492_800, "0.5 MB"), (10_241_280, "10.2 MB"), (988_000_000, "988.0 MB"), (1_300_000_000, "1.30 GB")],
)
def test_the_size_of_a_model_has_at_least_a_digit_that_tells(num_bytes: int, words: str) -> None:
    info = ModelInfo("text-generation", "m", 8, "batch", "float32", "cpu", num_bytes, 1, 1)
    assert f", {words}, " in f"{info.describe()}, "
