# SPDX-License-Identifier: Apache-2.0
"""Substituted attention gives what torch's own gives."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_triton.runner.cpu import attention, decode_attention
from hf_triton.runner.cpu.attention import FastAttention, FastTorch
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.support.engine import Client, start_engine

ROWS, HEADS, NEW, COLUMNS, SIZE = 3, 5, 4, 9, 8


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernel for small heads too."""
    monkeypatch.setattr(decode_attention, "MIN_WIDTH", 0)


class Calls(TorchFunctionMode):
    """Notes what attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[int, int]] = []
        """Of queries and of keys."""
        self.keys: list[tuple[torch.dtype, int]] = []
        """Dtype and columns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.heads.append((args[0].shape[1], args[1].shape[1]))
            self.keys.append((args[1].dtype, args[1].shape[2]))
        return func(*args, **(kwargs or {}))


def tensors(new: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(new)
    query = torch.randn(ROWS, HEADS, new, SIZE, generator=source)
    return query, *torch.randn(2, ROWS, 1, COLUMNS, SIZE, generator=source)


def masks(new: int) -> dict[str, torch.Tensor | None]:
    columns = torch.arange(COLUMNS)
    padding = (columns >= torch.tensor([0, 2, 5])[:, None])[:, None, None].expand(-1, -1, new, -1)
    source = torch.Generator().manual_seed(0)
    return {
        "none": None,
        "bool": padding,
        "float": torch.zeros(ROWS, 1, new, COLUMNS).masked_fill(~padding, -1e9),
        "of each head": torch.randn(ROWS, HEADS, new, COLUMNS, generator=source),
        "of each head, whatever the row": torch.randn(HEADS, new, COLUMNS, generator=source),
        "of three dimensions": padding[0],
        "of two dimensions": columns[None] <= columns[-new:, None],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("new", [1, NEW])
@pytest.mark.parametrize("mask", masks(1))
def test_attention_is_what_torch_broadcasts(mask: str, new: int, dtype: torch.dtype) -> None:
    query, key, value = (tensor.to(dtype) for tensor in tensors(new))
    attn_mask = masks(new)[mask]
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.clamp(min=-1e4).to(dtype)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=0.3)
    mode, calls = FastTorch(), Calls()
    with calls, mode:
        by_name = scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=attn_mask, scale=0.3)
        in_order = scaled_dot_product_attention(query, key, value, attn_mask, 0.0, False, scale=0.3)
    torch.testing.assert_close(by_name, expected)
    torch.testing.assert_close(in_order, expected)
    assert mode.is_usable
    assert all(queries == keys for queries, keys in calls.heads)
    assert calls.keys == [(torch.float32, COLUMNS)] * 2


@pytest.mark.parametrize("new", [1, COLUMNS])
def test_causal_attention_is_what_torch_broadcasts(new: int) -> None:
    query, key, value = tensors(new)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)
    with FastTorch():
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, is_causal=True), expected)


@pytest.mark.parametrize("num_keys", [1, HEADS])
def test_unequal_heads_of_keys_and_values_are_left_to_torch(num_keys: int) -> None:
    query, key, value = (tensor.half() for tensor in tensors(1))
    key, value = (
        tensor.expand(-1, heads, -1, -1) for tensor, heads in ((key, num_keys), (value, HEADS + 1 - num_keys))
    )
    expected = scaled_dot_product_attention(query, key, value)
    with FastTorch():
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value), expected)
        output = scaled_dot_product_attention(query, key.expand(-1, HEADS, -1, -1), value[:1].expand(-1, HEADS, -1, -1))
    torch.testing.assert_close(output, scaled_dot_product_attention(query, key, value[:1]))


def test_other_attention_is_left_alone() -> None:
    query, key, value = tensors(1)
    mode = FastTorch()
    with mode:
        scaled_dot_product_attention(query, key, value, enable_gqa=True)
        scaled_dot_product_attention(query, query, query)
        scaled_dot_product_attention(key, key, value)
    assert not mode.is_usable


def sixteen_bits(heads: int, key_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(heads)
    query = torch.randn(ROWS, heads, 1, SIZE, generator=source).half()
    key, value = torch.randn(2, ROWS, key_heads, COLUMNS, SIZE, generator=source).half()
    return query, key, value


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("key_heads", "options"), [(6, {}), (2, {"enable_gqa": True}), (6, {"scale": 0.3})])
@torch.inference_mode()
def test_a_step_in_16_bits_does_not_call_torch(key_heads: int, options: dict[str, Any]) -> None:
    query, key, value = sixteen_bits(6, key_heads)
    expected = scaled_dot_product_attention(query.double(), key.double(), value.double(), **options).half()
    mode, calls = FastTorch(), Calls()
    with calls, mode:
        output = scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(output, expected)
    assert mode.is_usable
    assert not calls.heads


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", [{"dropout_p": 1.0}, {"is_causal": True}])
@torch.inference_mode()
def test_a_step_with_dropout_or_causal_is_left_to_torch(options: dict[str, Any]) -> None:
    query, key, value = sixteen_bits(6, 6)
    expected = scaled_dot_product_attention(query, key, value, **options)
    with FastTorch():
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, **options), expected)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_and_dimensions_are_left_to_torch(device: str) -> None:
    query, key, value = (tensor.to(device) for tensor in sixteen_bits(6, 6))
    mode = FastTorch()
    with mode:
        assert scaled_dot_product_attention(query[0], key[0], value[0]).shape == query[0].shape
        if device != "cpu":
            assert scaled_dot_product_attention(query, key, value).shape == query.shape
    assert not mode.is_usable


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_errors_are_torchs_own() -> None:
    query, key, value = sixteen_bits(6, 2)
    with FastTorch(), pytest.raises(RuntimeError, match=r"must match the size"):
        scaled_dot_product_attention(query, key, value)  # heads that share keys, and nothing says so


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_a_step_with_one_key_head_does_not_call_torch() -> None:
    call, calls = tensors(1), Calls()
    expected = scaled_dot_product_attention(*call)
    with calls, FastTorch():
        torch.testing.assert_close(scaled_dot_product_attention(*call), expected)
    assert not calls.heads


def test_prefill_in_16_bits_is_left_to_torch() -> None:
    query, key, value = (torch.randn(ROWS, HEADS, COLUMNS, SIZE).bfloat16() for _ in range(3))
    calls = Calls()
    with calls, FastTorch():
        scaled_dot_product_attention(query, key, value, is_causal=True)
        scaled_dot_product_attention(query, key, value)
    assert calls.keys == [(torch.bfloat16, COLUMNS)] * 2


# --- in models -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_other_threads_have_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    monkeypatch.setattr(attention, "attend", lambda query, *_: seen.append(query.shape))
    module = torch.nn.Module()

    def ask() -> None:
        ALL_ATTENTION_FUNCTIONS["sdpa"](module, *sixteen_bits(6, 6), None)

    context = FastAttention()
    ask()
    with context:
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        assert not seen
        ask()
    assert len(seen) == 1
    ask()
    assert len(seen) == 1


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_result_has_transformers_shape() -> None:
    call = torch.nn.Module(), *sixteen_bits(6, 6), None
    with FastAttention():
        output, weights = attention.attend_fast(*call, scaling=0.3)
    expected, _ = attention.sdpa_attention_forward(*call, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-3)
    assert weights is None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "special",
    [{"softcap": 0.5}, {"position_bias": torch.zeros(1, 6, 1, COLUMNS)}, {"cache": object()}, {"dropout": 0.5}],
    ids=lambda special: next(iter(special)),
)
@torch.inference_mode()
def test_special_attention_is_left_to_transformers(special: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def plain(*_: object, **options: Any) -> None:
        calls.append(options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", plain)
    query, key, value = sixteen_bits(6, 6)
    with FastAttention():
        attention.attend_fast(
            torch.nn.Module(), query, key, value, None, sliding_window=9, softcap=None, position_bias=None, cache=None
        )
        assert not calls
        attention.attend_fast(torch.nn.Module(), query, key, value, None, **special)
    assert len(calls) == 1
    for name in special.keys() - {"dropout"}:
        assert calls[0][name] is special[name]


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
@torch.inference_mode()
def test_compiled_models_have_plain_attention(architecture: str, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    input_ids = torch.tensor([[3]])
    expected = model(input_ids=input_ids).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with FastAttention():
        torch.testing.assert_close(compiled(input_ids=input_ids).logits, expected)


@torch.inference_mode()
def test_batch_engine_has_fast_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "bart")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    monkeypatch.setattr(attention, "attend", lambda query, *_: seen.append(query.dtype))
    engine = start_engine(model, max_num_seqs=2, context_length=64)
    try:
        client = Client(engine)
        client.submit([3, 4, 5], SamplingParams(4))
        client.outcomes()
    finally:
        engine.close()
    assert set(seen) == {torch.bfloat16}


@pytest.mark.usefixtures("always")
def test_kernels_are_compiled_at_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "bart")
    calls: list[torch.dtype] = []
    monkeypatch.setattr(decode_attention, "kernel_for", lambda dtype, *_: calls.append(dtype))
    start_engine(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), max_num_seqs=2, context_length=64).close()
    assert set(calls) == {torch.float32}


def test_attention_replaced_by_other_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object) -> None: ...

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", other)
    FastAttention()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is other
