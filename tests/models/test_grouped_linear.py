# SPDX-License-Identifier: Apache-2.0
"""The kernel of weights with 4 and 8 bits computes what torch computes with the widened weights, each row by itself."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_triton.runner.cpu import grouped_layers, grouped_linear
from hf_triton.runner.cpu.grouped_linear import GroupedEmbedding, GroupedLinear

SHAPES = [(64, 256), (40, 96), (7, 32), (300, 1056)]
COUNTS = (1, 2, 3, 4, 5, 9, 70)


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """It is compiled here, for seconds, and not while tests are collected."""
    if not grouped_layers():
        pytest.skip("there is no kernel for this processor")


def build(outputs: int, inputs: int, bits: int, *, group: int = 32, has_minimums: bool, has_bias: bool = False) -> Any:
    torch.manual_seed(outputs)
    scales, minimums = torch.rand(outputs, inputs // group), torch.randn(outputs, inputs // group)
    codes = torch.randint(1 << bits, (outputs, inputs), dtype=torch.uint8)
    zero = 0 if has_minimums else 1 << bits - 1
    bias = torch.randn(outputs) if has_bias else None
    layer = GroupedLinear(codes, scales, minimums if has_minimums else None, bias, bits=bits, zero=zero)
    wide = (codes.float() - zero) * scales.half().float().repeat_interleave(group, 1)
    if has_minimums:
        wide += minimums.half().float().repeat_interleave(group, 1)
    assert torch.equal(layer.widened(), wide)
    return layer


@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (8, 16)])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@torch.inference_mode()
def test_kernel_computes_the_product(outputs: int, inputs: int, bits: int, group: int, has_minimums: bool) -> None:
    layer = build(outputs, inputs, bits, group=group, has_minimums=has_minimums, has_bias=has_minimums)
    weight, bias = layer.widened().double(), layer.bias
    for count in COUNTS:
        x = torch.randn(count, inputs) * torch.logspace(-3, 3, count)[:, None]
        product = x.double() @ weight.T + (0 if bias is None else bias)
        most = x.abs().amax(1, keepdim=True) * weight.abs().sum(1) * 2**-16  # of inputs that are rounded to 16 bits
        assert bool(((layer(x) - product).abs() <= 1.1 * most + 1e-6).all())
    assert layer.num_bytes < 4 * weight.numel() or outputs < 16


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company_and_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = build(300, 1056, 4, has_minimums=True), torch.randn(70, 1056)
    alone = torch.cat([layer(each[None]) for each in x])
    for num_threads in (1, 2, 3, 40):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        for count in COUNTS:
            assert torch.equal(layer(x[:count]), alone[:count])


@torch.inference_mode()
def test_nan_and_inf_stay_in_their_row() -> None:
    layer, x = build(64, 256, 8, has_minimums=False), torch.randn(6, 256)
    expected = layer(x)
    x[2, 5], x[3, 7] = float("nan"), float("inf")
    found = layer(x)
    assert not bool(found[2:4].isfinite().any())
    assert torch.equal(found[[0, 1, 4, 5]], expected[[0, 1, 4, 5]])
    assert torch.equal(layer(torch.zeros(1, 256)), torch.zeros(1, 64))
    assert bool((layer(torch.full((1, 256), 1e-40)) == 0).all())


@torch.inference_mode()
def test_rows_of_any_layout_and_dtype() -> None:
    layer = build(64, 256, 4, has_minimums=True)
    weight = layer.widened()
    for x in (torch.randn(2, 3, 256), torch.randn(3, 256, 2).mT, torch.randn(4, 1024)[:, ::4], torch.empty(0, 256)):
        torch.testing.assert_close(layer(x), x @ weight.T, rtol=0, atol=2e-2)
    half = torch.randn(3, 256).bfloat16()
    assert torch.equal(layer(half), layer(half.float()).bfloat16())
    torch.set_default_dtype(torch.bfloat16)  # as transformers does for all threads while it loads another model
    try:
        assert torch.equal(layer(half), layer(half.float()).bfloat16())
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def test_casts_of_a_model_leave_the_weights() -> None:
    layer = build(64, 256, 4, has_minimums=True)
    x, before = torch.randn(3, 256), layer.num_bytes
    expected = layer(x)
    for cast in (copy.deepcopy(layer), nn.Sequential(layer).to(torch.bfloat16).float()[0]):
        assert torch.equal(cast(x), expected)
        assert cast.num_bytes == before


@torch.inference_mode()
def test_rows_are_those_of_an_embedding() -> None:
    rows = build(40, 96, 8, has_minimums=True)
    embedding = GroupedEmbedding(rows, torch.bfloat16)
    ids = torch.tensor([[39, 0, 17], [17, 1, 2]])
    assert torch.equal(embedding(ids), rows.widened()[ids].bfloat16())
    assert embedding.weight.shape == (40, 96)
    assert embedding.weight.dtype is torch.bfloat16


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(GroupedLinear, "forward", lambda self, x: x @ self.widened().T * 1.001)
    grouped_linear.has_grouped_kernel.cache_clear()
    try:
        assert grouped_layers() is None
    finally:
        grouped_linear.has_grouped_kernel.cache_clear()
    assert "grouped linear kernel unavailable (wrong result); using the slower wider weights" in caplog.text
