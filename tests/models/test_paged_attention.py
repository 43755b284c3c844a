# SPDX-License-Identifier: Apache-2.0
"""Decode attention over blocks by a kernel: it equals torch's in float64, or there is none."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from hf_triton.runner import cpu
from hf_triton.runner.cpu import llvm, paged_attention, paged_kernel
from hf_triton.runner.cpu.paged_attention import kernel_for, write_tokens
from hf_triton.runner.cpu.paged_kernel import WIDENED
from tests.support.marks import full

LENGTHS = [1, 15, 16, 17, 70]
LAYERS = [  # dtype, heads, key heads, size, value size
    (torch.float32, 4, 4, 16, 16),
    (torch.float32, 6, 2, 80, 24),
    *full(((torch.float32, 71, 1, 64, 64),), ((torch.float32, 2, 1, 128, 128),)),
    *((dtype, 6, 2, 16, 16) for dtype in WIDENED if dtype != torch.float32),
]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernel for small heads too, with all threads."""
    monkeypatch.setattr(paged_attention, "MIN_WIDTH", 0)
    monkeypatch.setattr(paged_attention, "MIN_PARALLEL_PRODUCTS", 0)


class Rows:
    """Rows of random numbers, their tokens in blocks in random order; what nobody wrote is nan."""

    def __init__(
        self,
        lengths: list[int],
        dtype: torch.dtype = torch.float32,
        heads: int = 4,
        key_heads: int = 2,
        size: int = 16,
        value_size: int = 16,
        block_size: int = 16,
    ) -> None:
        source = torch.Generator().manual_seed(sum(lengths) + heads)
        width = math.ceil(max(lengths) / block_size)
        num_blocks = len(lengths) * width + 1
        order = torch.randperm(num_blocks - 1, generator=source) + 1
        self.block_size = block_size
        self.lengths = torch.tensor(lengths)
        self.tables = order.view(len(lengths), width).to(torch.int32)
        self.query = torch.randn(len(lengths), heads, size, generator=source).to(dtype)
        self.keys = [torch.randn(length, key_heads, size, generator=source).to(dtype) for length in lengths]
        self.values = [torch.randn(length, key_heads, value_size, generator=source).to(dtype) for length in lengths]
        self.key_blocks = torch.full((num_blocks, key_heads, block_size, size), torch.nan, dtype=dtype)
        self.value_blocks = torch.full((num_blocks, key_heads, block_size, value_size), torch.nan, dtype=dtype)
        for row, length in enumerate(lengths):
            self.tables[row, math.ceil(length / block_size) :] = 0  # nobody's block
        self.write()

    def write(self) -> None:
        for row, length in enumerate(self.lengths.tolist()):
            positions = torch.arange(length)
            slots = self.tables[row].long()[positions // self.block_size] * self.block_size
            slots += positions % self.block_size
            write_tokens(self.key_blocks, self.value_blocks, self.keys[row], self.values[row], slots)

    def attend(self, scale: float = 0.25, window: int = 0, **options: Any) -> torch.Tensor:
        kernel = kernel_for(self.query.shape[1], self.key_blocks, self.value_blocks)
        assert kernel is not None
        result = kernel(self.query, None, None, self.tables, self.lengths, scale, window, **options)
        assert result is not None
        return result

    def exact(
        self, scale: float = 0.25, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = []
        for query, keys, values in zip(self.query.double(), self.keys, self.values, strict=True):
            key_heads = keys.shape[1]
            shown = keys[-window:].double().permute(1, 2, 0), values[-window:].double().transpose(0, 1)
            scores = query.view(key_heads, -1, query.shape[1]) @ shown[0] * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            nothing = torch.full_like(scores[..., :1], -torch.inf)
            others = nothing if sinks is None else sinks.double().view(key_heads, -1, 1)
            weights = torch.cat([scores, others], -1).softmax(-1)[..., :-1]
            rows.append((weights @ shown[1]).flatten(0, 1))
        return torch.stack(rows).to(self.query.dtype)


@pytest.mark.full
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@torch.inference_mode()
def test_rows_attend_to_their_own_tokens(layer: tuple[torch.dtype, int, int, int, int], block_size: int) -> None:
    rows = Rows([1, block_size - 1, block_size, block_size + 1, 2 * block_size + 7], *layer, block_size=block_size)
    kernel = kernel_for(rows.query.shape[1], rows.key_blocks, rows.value_blocks)
    assert kernel is not None
    found = kernel(rows.query, None, None, rows.tables, rows.lengths, 0.25)
    torch.testing.assert_close(found, rows.exact())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("length", range(1, 10))
@torch.inference_mode()
def test_any_number_of_tokens(length: int) -> None:
    rows = Rows([length])
    torch.testing.assert_close(rows.attend(), rows.exact())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 1000])
@torch.inference_mode()
def test_a_window_shows_the_last_tokens(window: int) -> None:
    rows = Rows(LENGTHS)
    torch.testing.assert_close(rows.attend(window=window), rows.exact(window=window))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", [{"softcap": 0.5}, {"sinks": torch.tensor([-9.0, 0.0, 1.0, 9.0])}], ids=str)
@torch.inference_mode()
def test_softcap_and_sinks(options: dict[str, Any]) -> None:
    rows = Rows(LENGTHS)
    torch.testing.assert_close(rows.attend(**options), rows.exact(**options))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0, 1e4])
@torch.inference_mode()
def test_scores_of_any_size(scale: float) -> None:
    """In 32 bits a score of 100 has an error of 1e-5 by itself."""
    rows = Rows(LENGTHS)
    torch.testing.assert_close(rows.attend(scale), rows.exact(scale), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("position", [0, 20, 69])
@torch.inference_mode()
def test_nan_and_inf_stay_in_their_heads(position: int, number: float) -> None:
    rows = Rows(LENGTHS)
    rows.query[4], rows.keys[4][position, 1] = 1, number
    rows.write()
    found = rows.attend()
    assert found[4, 2:].isnan().all()
    assert found[:4].isfinite().all()
    assert found[4, :2].isfinite().all()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("hidden", [slice(0, 16), slice(16, 32), slice(64, 70), slice(0, 69), slice(3, 5)], ids=str)
@torch.inference_mode()
def test_scores_of_minus_infinity_hide_tokens(hidden: slice) -> None:
    rows = Rows(LENGTHS)
    rows.query[4] = 1
    rows.keys[4][hidden, 1] = -torch.inf
    rows.write()
    torch.testing.assert_close(rows.attend(), rows.exact())


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_a_row_that_sees_nothing_gets_zero_as_in_torch() -> None:
    rows = Rows(LENGTHS)
    wanted = rows.exact()
    rows.query[4], rows.keys[4][:, 1] = 1, -torch.inf
    rows.write()
    found = rows.attend()
    assert not found[4, 2:].any()
    torch.testing.assert_close(found[:4], wanted[:4])


@pytest.mark.full
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[-1]], ids=str)
@torch.inference_mode()
def test_a_kernel_writes_the_newest_token(layer: tuple[torch.dtype, int, int, int, int]) -> None:
    rows = Rows(LENGTHS, *layer)
    wanted, key_blocks, value_blocks = rows.attend(), rows.key_blocks.clone(), rows.value_blocks.clone()
    for row, length in enumerate(LENGTHS):
        block, column = rows.tables[row, (length - 1) // 16], (length - 1) % 16
        rows.key_blocks[block, :, column] = rows.value_blocks[block, :, column] = torch.nan
    keys, values = (
        torch.stack([tokens[-1] for tokens in kind], dim=2).permute(2, 0, 1) for kind in (rows.keys, rows.values)
    )
    kernel = kernel_for(layer[1], rows.key_blocks, rows.value_blocks)
    assert kernel is not None
    assert wanted.equal(kernel(rows.query, keys, values, rows.tables, rows.lengths, 0.25))
    torch.testing.assert_close(rows.key_blocks, key_blocks, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(rows.value_blocks, value_blocks, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_queries_have_any_strides() -> None:
    rows = Rows(LENGTHS)
    wanted = rows.attend()
    rows.query = rows.query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert wanted.equal(rows.attend())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("layer", [LAYERS[0], (torch.float32, 15, 3, 16, 16)], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 7, 40])
@torch.inference_mode()
def test_a_row_is_independent_of_rows_and_threads(
    num_threads: int, layer: tuple[torch.dtype, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(LENGTHS, *layer)
    kernel = kernel_for(layer[1], rows.key_blocks, rows.value_blocks)
    assert kernel is not None
    parts = rows.query.split(1), rows.tables.split(1), rows.lengths.split(1)
    alone = [kernel(query, None, None, table, length, 0.25) for query, table, length in zip(*parts, strict=True)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    found = rows.attend()
    assert [found[row].equal(each[0]) for row, each in enumerate(alone) if each is not None] == [True] * len(LENGTHS)


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_kernel_runs_in_one_thread_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "openmp_parallel", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rows = Rows(LENGTHS)
    torch.testing.assert_close(rows.attend(), rows.exact())


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_small_inputs_are_computed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    plain = llvm.openmp_parallel()
    monkeypatch.setattr(llvm, "openmp_parallel", lambda: lambda *call: counts.append(call[2]) or plain(*call))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rows = Rows(LENGTHS)
    products = len(LENGTHS) * 80 * 4 * 16
    for worth in (products, products + 1):
        monkeypatch.setattr(paged_attention, "MIN_PARALLEL_PRODUCTS", worth)
        torch.testing.assert_close(rows.attend(), rows.exact())
    assert counts == [2]


@pytest.mark.usefixtures("always", "anew")
@pytest.mark.parametrize(
    ("name", "module", "says"),
    [("llvm", None, "pip install 'hf-triton[cpu]'"), ("paged_kernel", SimpleNamespace(WIDENED=WIDENED), "ImportError")],
)
@torch.inference_mode()
def test_without_a_kernel_there_is_none(
    name: str, module: Any, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """numba is missing, or fails."""
    rows = Rows(LENGTHS)
    monkeypatch.setitem(sys.modules, f"hf_triton.runner.cpu.{name}", module)
    if module is None:
        monkeypatch.delattr(cpu, name)
    else:
        monkeypatch.setattr(cpu, name, module)
    for _ in range(2):
        assert kernel_for(rows.query.shape[1], rows.key_blocks, rows.value_blocks) is None
    (record,) = caplog.records
    assert says in record.getMessage()


@pytest.mark.full
@pytest.mark.usefixtures("always", "anew")
@torch.inference_mode()
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain = paged_kernel.compile_attention
    monkeypatch.setattr(
        paged_kernel, "compile_attention", lambda dtype, size, *others: plain(dtype, size // 2, *others)
    )
    rows = Rows(LENGTHS)
    assert kernel_for(4, rows.key_blocks, rows.value_blocks) is None
    (record,) = caplog.records
    assert "wrong result" in record.getMessage()


@pytest.mark.usefixtures("always")
def test_there_is_no_kernel_for_other_blocks() -> None:
    rows = Rows(LENGTHS)
    keys, values = rows.key_blocks, rows.value_blocks
    assert kernel_for(4, keys, values) is not None
    assert kernel_for(3, keys, values) is None
    assert kernel_for(4, keys.double(), values.double()) is None
    assert kernel_for(4, keys.half(), values) is None
    assert kernel_for(4, keys[0], values[0]) is None
    assert kernel_for(4, keys[:0], values[:0]) is None
    assert kernel_for(4, keys, values[..., :0]) is None
    assert kernel_for(4, keys, values[:5]) is None
    assert kernel_for(4, keys, values[..., :8]) is None
    assert kernel_for(4, keys.transpose(1, 2), values) is None
    assert kernel_for(4, *(blocks[:, :, :6].contiguous() for blocks in (keys, values))) is None
    assert kernel_for(4, torch._neg_view(keys), values) is None
    assert kernel_for(4, keys, values.to("meta")) is None
    with FakeTensorMode() as fake:
        assert kernel_for(4, fake.from_tensor(keys), fake.from_tensor(values)) is None


@pytest.mark.usefixtures("always")
def test_other_calls_are_left_to_torch() -> None:
    rows = Rows(LENGTHS)
    kernel = kernel_for(4, rows.key_blocks, rows.value_blocks)
    assert kernel is not None
    rest = rows.tables, rows.lengths, 0.25
    assert kernel(rows.query, None, None, *rest) is None  # its gradient may be asked for
    with torch.inference_mode():
        assert kernel(rows.query, None, None, *rest) is not None
        assert kernel(rows.query.half(), None, None, *rest) is None
        assert kernel(rows.query, rows.query.half(), rows.query, *rest) is None
        assert kernel(rows.query.to("meta"), None, None, *rest) is None
        assert kernel(rows.query[:0], None, None, rows.tables[:0], rows.lengths[:0], 0.25) is None


@torch.inference_mode()
def test_small_heads_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(LENGTHS)
    monkeypatch.setattr(paged_attention, "MIN_WIDTH", 4 * 16)
    assert kernel_for(4, rows.key_blocks, rows.value_blocks) is not None
    monkeypatch.setattr(paged_attention, "MIN_WIDTH", 4 * 16 + 1)
    assert kernel_for(4, rows.key_blocks, rows.value_blocks) is None
