# SPDX-License-Identifier: Apache-2.0
"""Fused kernels: by Triton's interpreter beside torch, and compiled ahead for two GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_triton.runner.cuda.fused_operations import add_rms_norm, gelu_mul, rms_norm, rotary, silu_mul
from hf_triton.runner.device_step import NO_SEQUENCE

pytestmark = pytest.mark.full

Call = Callable[..., Any]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def states(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of one operation in 32 bits; strides may differ."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), expected.float(), rtol=2 * eps, atol=2e-6)


def run_rotary(dtype: torch.dtype, size: int, num_rows: int, num_cos: int) -> None:
    from hf_triton.runner.cuda import fused_kernels

    fused = states(num_rows, 3, 6, size + 2, dtype=dtype)  # query and key are parts of it, as of one projection
    query, key = fused[:, :, :5, :size].transpose(1, 2), fused[:, :, 5:, :size].transpose(1, 2)
    cos, sin = (states(num_cos, 3, size, dtype=dtype, seed=seed) for seed in (1, 2))
    for pair in zip(fused_kernels.rotary(query, key, cos, sin), rotary(query, key, cos, sin), strict=True):
        assert_same(*pair)


def run_writing_rotary(dtype: torch.dtype, size: int, value_size: int) -> None:
    """Three tokens of one sequence, whose blocks lie apart, one of another, and one of padding."""
    from hf_triton.runner.cuda import fused_kernels

    fused = states(1, 5, 6, size + value_size, dtype=dtype)
    query, key = fused[:, :, :4, :size].transpose(1, 2), fused[:, :, 4:, :size].transpose(1, 2)
    value, (cos, sin) = fused[:, :, 4:, size:].transpose(1, 2), states(2, 1, 5, size, dtype=dtype, seed=1)
    numbers = [0, 0, 0, 1, NO_SEQUENCE], [0, 3, 4], [10, 2], [0, 3], [5, 0, 2, 4]
    places = [torch.tensor(each) for each in numbers]
    written = [
        (value, torch.full((6, 2, 4, size), 7, dtype=dtype), torch.full((6, 2, 4, value_size), 7, dtype=dtype))
        for _ in range(2)
    ]
    found = *fused_kernels.rotary(query, key, cos, sin, *written[0], *places), *written[0][1:]
    expected = *rotary(query, key, cos, sin, *written[1], *places), *written[1][1:]
    for pair in zip(found, expected, strict=True):
        assert_same(*pair)
    key_blocks, value_blocks = written[0][1:]
    changed = (key_blocks != 7).any(-1).any(1).nonzero().tolist()
    assert changed == [[0, 3], [2, 0], [2, 1], [4, 1]]
    assert torch.equal(key_blocks[2, :, 1], found[1][0, :, 2])
    assert torch.equal(value_blocks[4, :, 1], value[0, :, 3])


def run_gates(dtype: torch.dtype, size: int) -> None:
    from hf_triton.runner.cuda import fused_kernels

    gate, up = states(2, 3, 2 * size, dtype=dtype).mul(4).chunk(2, -1)
    gate[0, 0, :4] = torch.tensor([0.0, -100.0, 100.0, -3e4])
    for operation, is_gelu in ((silu_mul, False), (gelu_mul, True)):
        for each in (up, up.contiguous()):
            assert_same(fused_kernels.gated(gate, each, is_gelu=is_gelu), operation(gate, each))


def run_norm(dtype: torch.dtype, size: int, scale: float) -> None:
    from hf_triton.runner.cuda import fused_kernels

    rows, weight = states(2, 3, size, dtype=dtype) * scale, 1 + states(size, dtype=torch.float32, seed=1)
    assert_same(fused_kernels.rms_norm(rows, weight, 1e-6), rms_norm(rows, weight, 1e-6))
    residual = states(2, 3, 2 * size, dtype=dtype, seed=2)[..., :size] * scale
    for each in (weight, weight.to(dtype)):
        total, normed = fused_kernels.add_rms_norm(residual, rows, each, 1e-6)
        assert_same(total, add_rms_norm(residual, rows, each, 1e-6)[0])
        assert_same(normed, rms_norm(total, each.float(), 1e-6))


@DTYPES
@pytest.mark.parametrize("size", [8, 80, 128])
def test_rotary(interpreted: Call, dtype: torch.dtype, size: int) -> None:
    interpreted(run_rotary, dtype, size, 2, 2)
    interpreted(run_rotary, dtype, size, 2, 1)
    interpreted(run_writing_rotary, dtype, size, size)
    interpreted(run_writing_rotary, dtype, size, 24)


@DTYPES
@pytest.mark.parametrize("size", [24, 1500])
def test_gates(interpreted: Call, dtype: torch.dtype, size: int) -> None:
    interpreted(run_gates, dtype, size)


@DTYPES
@pytest.mark.parametrize("size", [24, 2560])
def test_norm(interpreted: Call, dtype: torch.dtype, size: int) -> None:
    interpreted(run_norm, dtype, size, 1.0)
    interpreted(run_norm, dtype, size, 1e-3)


def launch_all(dtype: torch.dtype) -> None:
    """Launch each kernel once, for a model of 32 heads and 8 of keys, of 128 numbers each."""
    from hf_triton.runner.cuda import fused_kernels

    query, key, rows = (states(1, number, 4, 128, dtype=dtype) for number in (32, 8, 1))
    fused_kernels.rotary(query, key, rows[0], rows[0])
    blocks, places = states(2, 8, 16, 128, dtype=dtype), [torch.zeros(4, dtype=torch.int64)] * 5
    fused_kernels.rotary(query, key, rows[0], rows[0], key, blocks, blocks, *places)
    fused_kernels.gated(rows, rows, is_gelu=False)
    fused_kernels.gated(rows, rows, is_gelu=True)
    fused_kernels.rms_norm(rows, rows[0, 0, 0].float(), 1e-6)
    fused_kernels.add_rms_norm(rows, rows, rows[0, 0, 0], 1e-6)


@DTYPES
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(compiled: Call, capability: int, dtype: torch.dtype) -> None:
    names = [kernel.name for kernel in compiled(capability, launch_all, dtype)]
    assert names == ["rotary_kernel", "rotary_kernel", "gate_kernel", "gate_kernel", "norm_kernel", "norm_kernel"]
