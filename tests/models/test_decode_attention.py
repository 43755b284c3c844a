# SPDX-License-Identifier: Apache-2.0
"""Decode attention by a kernel: it equals torch's in float64, or torch computes it."""

import copy
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from hf_triton.runner import cpu
from hf_triton.runner.cpu import attention_kernel, decode_attention, llvm
from hf_triton.runner.cpu.attention_kernel import READERS
from hf_triton.runner.cpu.decode_attention import attend

ROWS, COLUMNS, SIZE = 3, 9, 8
LENGTHS = [COLUMNS, 4, 1]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernel for small heads too, with all threads."""
    monkeypatch.setattr(decode_attention, "MIN_WIDTH", 0)
    monkeypatch.setattr(decode_attention, "MIN_PARALLEL_PRODUCTS", 0)


def tensors(dtype: torch.dtype, heads: int = 6, key_heads: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(heads)
    query = torch.randn(ROWS, 1, heads, SIZE, generator=source).to(dtype).transpose(1, 2)  # the layout of models
    key, value = torch.randn(2, ROWS, key_heads, 2 * COLUMNS, SIZE, generator=source).to(dtype)[..., 5:-4, :]
    return query, key, torch.cat([value, value + 1], dim=-1)  # values may be wider


def last_columns(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(COLUMNS) >= COLUMNS - torch.tensor(lengths)[:, None])[:, None, None]


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    exact = (tensor.double() for tensor in (query, key, value))
    return scaled_dot_product_attention(*exact, *others, enable_gqa=True, **options).to(query.dtype)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lengths", [LENGTHS, None])
@pytest.mark.parametrize("key_heads", [6, 2, 1])
@pytest.mark.parametrize("dtype", READERS)
@torch.inference_mode()
def test_sequences_attend_to_their_own_columns(
    dtype: torch.dtype, key_heads: int, lengths: list[int] | None, scale: float | None
) -> None:
    query, key, value = tensors(dtype, key_heads=key_heads)
    attn_mask = None if lengths is None else last_columns(lengths)
    found = attend(query, key, value, attn_mask, scale)
    torch.testing.assert_close(found, exact(query, key, value, attn_mask, scale=scale))


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_padding_is_not_read() -> None:
    query, key, value = tensors(torch.float32)
    wanted = exact(query, key, value, last_columns(LENGTHS))
    for row, length in enumerate(LENGTHS):
        key[row, :, : COLUMNS - length] = torch.nan
        value[row, :, : COLUMNS - length] = torch.nan
    torch.testing.assert_close(attend(query, key, value, last_columns(LENGTHS)), wanted)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("length", range(1, 10))
@torch.inference_mode()
def test_any_number_of_columns(length: int) -> None:
    query, key, value = (each[..., -length:, :] for each in tensors(torch.float32, key_heads=2))
    torch.testing.assert_close(attend(query, key, value), exact(query, key, value))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0, 1e4])
@torch.inference_mode()
def test_scores_of_any_size(scale: float) -> None:
    query, key, value = tensors(torch.float32)
    torch.testing.assert_close(attend(query, key, value, None, scale), exact(query, key, value, scale=scale))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, COLUMNS - 1])
@torch.inference_mode()
def test_nan_and_inf_stay_in_their_head(column: int, number: float) -> None:
    query, key, value = tensors(torch.float32)
    query[1], key[1, 3, column] = 1, number
    found = attend(query, key, value)
    assert found is not None
    assert found[1, 3].isnan().all()
    others = torch.ones(found.shape[:2], dtype=torch.bool)
    others[1, 3] = False
    assert found[others].isfinite().all()


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_scores_of_minus_infinity_give_zero_as_in_torch() -> None:
    query, key, value = tensors(torch.float32)
    query[1], key[1, 3] = 1, -torch.inf
    key[0, 2, 4] = -torch.inf
    query[0] = 1
    torch.testing.assert_close(attend(query, key, value), scaled_dot_product_attention(query, key, value))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("heads_per_task", [1, 2, 8])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@torch.inference_mode()
def test_a_row_is_independent_of_rows_padding_and_threads(
    num_threads: int, heads_per_task: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = tensors(torch.float32, key_heads=2)
    alone = [
        attend(query[row : row + 1], key[row : row + 1, :, -length:], value[row : row + 1, :, -length:])
        for row, length in enumerate(LENGTHS)
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(decode_attention, "MAX_HEADS_PER_TASK", heads_per_task)
    found = attend(query, key, value, last_columns(LENGTHS))
    assert found is not None
    assert [torch.equal(found[row], each[0]) for row, each in enumerate(alone) if each is not None] == [True] * ROWS


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_kernel_runs_in_one_thread_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "openmp_parallel", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    call = tensors(torch.float32)
    torch.testing.assert_close(attend(*call), exact(*call))


@pytest.mark.usefixtures("always", "anew")
@pytest.mark.parametrize(
    ("name", "module", "says"),
    [
        ("llvm", None, "pip install 'hf-triton[cpu]'"),
        ("attention_kernel", SimpleNamespace(READERS=READERS), "AttributeError"),
    ],
)
@torch.inference_mode()
def test_without_a_kernel_torch_computes(
    name: str, module: Any, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """numba is missing, or fails."""
    monkeypatch.setitem(sys.modules, f"hf_triton.runner.cpu.{name}", module)
    if module is None:
        monkeypatch.delattr(cpu, name)
    else:
        monkeypatch.setattr(cpu, name, module)
    assert attend(*tensors(torch.float32)) is None
    assert attend(*tensors(torch.float32)) is None
    assert attend(*tensors(torch.float32, key_heads=2)) is None
    (record,) = caplog.records
    assert says in record.getMessage()


@pytest.mark.usefixtures("always", "anew")
@torch.inference_mode()
def test_a_numba_that_does_not_load_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "hf_triton.runner.cpu.llvm":
                raise OSError("no libllvmlite.so")

    monkeypatch.delitem(sys.modules, "hf_triton.runner.cpu.llvm")
    monkeypatch.delattr(cpu, "llvm")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    for dtype in (torch.float32, torch.bfloat16):
        assert attend(*tensors(dtype)) is None
    (record,) = caplog.records
    assert "OSError: no libllvmlite.so" in record.getMessage()


def test_no_float16_kernel_if_numba_is_configured_for_less() -> None:
    """LLVM ends the process otherwise."""
    program = "import torch; from hf_triton.runner.cpu.attention_kernel import READERS; print(torch.float16 in READERS)"
    for name, has_float16 in (("generic", "False"), ("", "True")):
        environment = os.environ | {"NUMBA_CPU_NAME": name} if name else dict(os.environ)
        output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert output.stdout.strip() == has_float16, output.stderr


@pytest.mark.usefixtures("always", "anew")
@torch.inference_mode()
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain = attention_kernel.run_attention

    def wrong(
        dtype: torch.dtype, size: int, value_size: int, task: attention_kernel.AttentionTask, num_threads: int
    ) -> None:
        plain(dtype, size, value_size, task._replace(keys=task.values), num_threads)

    monkeypatch.setattr(attention_kernel, "run_attention", wrong)
    assert attend(*tensors(torch.float32)) is None
    (record,) = caplog.records
    assert "wrong result" in record.getMessage()


HOLES = last_columns(LENGTHS).logical_xor(torch.arange(COLUMNS) == COLUMNS - 2)
NOTHING = last_columns([COLUMNS, 4, 0])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "attn_mask",
    [HOLES, NOTHING, last_columns(LENGTHS).float(), last_columns([4]), last_columns(LENGTHS).expand(-1, 6, -1, -1)],
    ids=["holes", "a row that sees nothing", "float", "of all rows", "of each head"],
)
@torch.inference_mode()
def test_other_masks_are_left_to_torch(attn_mask: torch.Tensor) -> None:
    assert attend(*tensors(torch.float32), attn_mask) is None


@pytest.mark.usefixtures("always")
def test_other_inputs_are_left_to_torch() -> None:
    query, key, value = tensors(torch.float32)
    assert attend(query, key, value) is None  # its gradient may be asked for
    with torch.inference_mode():
        assert attend(query, key, value) is not None
        assert attend(query.expand(-1, -1, 2, -1), key, value) is None
        assert attend(query.double(), key.double(), value.double()) is None
        assert attend(query, key.half(), value.half()) is None
        assert attend(query[0], key[0], value[0]) is None
        assert attend(query, key[0], value[0]) is None
        assert attend(query, key, value[..., :0]) is None
        assert attend(query, torch._neg_view(key), value) is None
        assert attend(query, key, torch._neg_view(value)) is None
        with FakeTensorMode() as fake:
            assert attend(query, fake.from_tensor(key), fake.from_tensor(value)) is None
        assert attend(query[:0], key[:0], value[:0]) is None
        assert attend(query, key[:, :0], value[:, :0]) is None
        assert attend(query, key[:, :, :0], value[:, :, :0]) is None
        assert attend(query[:, :4], key, value) is None
        assert attend(query, key[:1], value[:1]) is None
        assert attend(query, key, value[:, :1]) is None
        assert attend(query, key[..., :4], value) is None
        assert attend(query, key.mT.contiguous().mT, value) is None
        assert attend(query, key, value.mT.contiguous().mT) is None
        assert attend(query.to("meta"), key.to("meta"), value.to("meta")) is None
        assert attend(query, key.to("meta"), value) is None
        assert attend(query, key, value.to("meta")) is None


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_a_mask_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[torch.Tensor] = []
    plain = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *call, **options: looks.append(call) or plain(*call, **options))
    call, attn_mask = tensors(torch.float32), last_columns(LENGTHS)
    looks.clear()
    for _ in range(3):
        torch.testing.assert_close(attend(*call, attn_mask), exact(*call, attn_mask))
    assert len(looks) == 1


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_a_changed_mask_is_read_again() -> None:
    attn_mask = torch.ones(1, 1, 1, COLUMNS, dtype=torch.bool)
    query, key, value = tensors(torch.float32)
    assert attend(query[:1], key[:1], value[:1], attn_mask) is not None
    assert attend(query, key, value, attn_mask) is None
    assert attend(query[:1], key[:1, :, 1:], value[:1, :, 1:], attn_mask) is None
    other = copy.copy(attn_mask)
    attn_mask.set_(last_columns([4]))  # type: ignore[arg-type]
    for mask in (attn_mask, other):
        call = query[:1], key[:1], value[:1], mask
        torch.testing.assert_close(attend(*call), exact(*call))


@torch.inference_mode()
def test_small_heads_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    call = tensors(torch.float32)
    monkeypatch.setattr(decode_attention, "MIN_WIDTH", 6 * SIZE)
    assert attend(*call) is not None
    monkeypatch.setattr(decode_attention, "MIN_WIDTH", 6 * SIZE + 1)
    assert attend(*call) is None


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_small_inputs_are_computed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    plain = attention_kernel.run_attention
    monkeypatch.setattr(attention_kernel, "run_attention", lambda *call: counts.append(call[-1]) or plain(*call))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for worth in (6 * SIZE * sum(LENGTHS), 6 * SIZE * sum(LENGTHS) + 1):
        monkeypatch.setattr(decode_attention, "MIN_PARALLEL_PRODUCTS", worth)
        assert attend(*tensors(torch.float32), last_columns(LENGTHS)) is not None
    assert counts == [2, 1]
