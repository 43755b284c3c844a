# SPDX-License-Identifier: Apache-2.0
"""The kernel that draws tokens, in Triton's interpreter beside torch, and compiled for devices that are not here."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from hf_triton.sampling.draw import draw, draw_by_torch
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.row_params import RowParams
from tests.support.triton_language import Call

pytestmark = pytest.mark.full
ROWS = 12
SETTINGS: dict[str, tuple[float, ...]] = {
    "temperature": (0.1, 0.7, 1.0, 1.9),
    "top_k": (0, 0, 1, 2, 40, 2999, 10_000),
    "top_p": (0.0, 0.3, 0.9, 0.9999, 1.0, 1.0),
    "min_p": (0.0, 0.0, 0.05, 1.0),
}


def random_rows(seed: int) -> RowParams:
    source = random.Random(seed)
    settings = ({name: source.choice(values) for name, values in SETTINGS.items()} for _ in range(ROWS))
    params: list[Any] = [SamplingParams(8, do_sample=True, **row) for row in settings]  # type: ignore[arg-type]
    return RowParams.build(params, [source.randrange(2**64) for _ in params])


def random_scores(size: int, seed: int, kind: str) -> torch.Tensor:
    scores = 4 * torch.randn(ROWS, size, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        return scores.round()
    if kind == "banned":
        scores[:, 1 + seed % 2 :: 2] = -torch.inf
        scores[:3] = torch.where(scores[:3] > -torch.inf, -1e30, -torch.inf)
    if kind == "strided":
        return scores.T.contiguous().T
    return scores.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)


def launched(scores: torch.Tensor, params: RowParams) -> list[int]:
    """The kernel's tokens."""
    from hf_triton.runner.cuda import draw_kernel

    columns = [torch.from_numpy(np.ascontiguousarray(column)) for column in params]
    tokens: list[int] = draw_kernel.draw(scores, *columns[:4], columns[5]).tolist()
    return tokens


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        *((size, "plain") for size in (1, 7, 512, 3000, 8192, 20_000)),
        *((3000, kind) for kind in ("ties", "banned", "bfloat16", "strided")),
        *((9000, kind) for kind in ("ties", "banned", "bfloat16")),
    ],
)
def test_kernel_draws_what_torch_draws(size: int, kind: str, interpreted: Call) -> None:
    params, scores = random_rows(size), random_scores(size, size, kind)
    tokens = interpreted(launched, scores, params)
    assert tokens == draw_by_torch(scores, params).tolist()
    assert tokens == draw(scores, params).tolist(), "the operation"


def test_kernel_draws_some_token_of_a_row_without_scores(interpreted: Call) -> None:
    params, scores = random_rows(1), torch.full((ROWS, 600), torch.nan)
    scores[6:] = -torch.inf
    scores[:6, :500] = -torch.inf
    tokens = interpreted(launched, scores, params)
    assert all(500 <= token < 600 for token in tokens[:6]), "NaN comes before what is banned"
    assert all(0 <= token < 600 for token in tokens[6:])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernel_compiles_for_a_device(dtype: torch.dtype, capability: int, compiled: Call) -> None:
    scores = torch.zeros(ROWS, 128_256, dtype=dtype)
    [kernel] = compiled(capability, launched, scores, random_rows(0))
    assert kernel.name == "draw_kernel"
    assert "ld.global.v4" in kernel.ptx, "a thread reads 16 bytes at a time"
    assert "lg2.approx" not in kernel.ptx, "noise of the likeliest draws needs exact logarithms"


def test_any_number_of_rows_draws_by_the_same_kernel(compiled: Call) -> None:
    kernels = compiled(90, launch_rows)
    assert len(kernels) > len(set(kernels)) == 1, "another one is compiled while sequences wait"


def launch_rows() -> None:
    from hf_triton.runner.cuda import draw_kernel

    for num_rows in (1, 3, 4):
        temperature, top_k, top_p, min_p, keys = torch.ones(5, num_rows, dtype=torch.int64)
        shares = (column.view(torch.float64) for column in (top_p, min_p))
        draw_kernel.draw(torch.zeros(num_rows, 32_000), temperature.view(torch.float64), top_k, *shares, keys)
