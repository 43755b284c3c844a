# SPDX-License-Identifier: Apache-2.0
"""Attention in other forms: what comes out is what torch has by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _len_torch_function_stack
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from hf_triton.runner import attention
from hf_triton.runner.attention import FastAttention
from hf_triton.runner.decode import DecodingMode
from hf_triton.runner.forward import Forward
from hf_triton.testing import build_tiny_checkpoint
from tests.running_texts import Texts, prompts

ROWS, HEADS, NEW, COLUMNS, SIZE = 3, 5, 4, 9, 8


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
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=0.3)
    mode, calls = FastAttention(), Calls()
    with calls, mode:
        by_name = scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=attn_mask, scale=0.3)
        in_order = scaled_dot_product_attention(query, key, value, attn_mask, 0.0, False, scale=0.3)
    torch.testing.assert_close(by_name, wanted)
    torch.testing.assert_close(in_order, wanted)
    assert mode.is_of_use
    assert all(queries == keys for queries, keys in calls.heads)
    assert calls.keys == [(torch.float32, COLUMNS)] * 2


@pytest.mark.parametrize("new", [1, COLUMNS])
def test_causal_attention_is_what_torch_broadcasts(new: int) -> None:
    query, key, value = tensors(new)
    wanted = scaled_dot_product_attention(query, key, value, is_causal=True)
    with FastAttention():
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, is_causal=True), wanted)


@pytest.mark.parametrize("num_keys", [1, HEADS])
def test_values_and_keys_of_unequal_heads_are_left_to_torch(num_keys: int) -> None:
    query, key, value = (tensor.half() for tensor in tensors(1))
    key, value = (
        tensor.expand(-1, heads, -1, -1) for tensor, heads in ((key, num_keys), (value, HEADS + 1 - num_keys))
    )
    wanted = scaled_dot_product_attention(query, key, value)
    with FastAttention():
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value), wanted)
        found = scaled_dot_product_attention(query, key.expand(-1, HEADS, -1, -1), value[:1].expand(-1, HEADS, -1, -1))
    torch.testing.assert_close(found, scaled_dot_product_attention(query, key, value[:1]))


def test_other_attention_is_left_alone() -> None:
    query, key, value = tensors(1)
    mode = FastAttention()
    with mode:
        scaled_dot_product_attention(query, key, value, enable_gqa=True)
        scaled_dot_product_attention(query, query, query)
        scaled_dot_product_attention(key, key, value)
        scaled_dot_product_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), enable_gqa=True)
    assert not mode.is_of_use


LENGTHS = [COLUMNS, 4, 1]


def sixteen_bits(heads: int, per_head: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(heads)
    query = torch.randn(ROWS, heads, per_head, SIZE, generator=source).to(dtype)
    key, value = torch.randn(2, ROWS, heads, COLUMNS, SIZE, generator=source).to(dtype)
    return query, key, torch.cat([value, value], dim=-1)  # as wide as it likes


def last_columns(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(COLUMNS) >= COLUMNS - torch.tensor(lengths)[:, None])[:, None, None]


@pytest.mark.parametrize(
    ("dtype", "per_head", "lengths"),
    [
        (torch.bfloat16, 1, LENGTHS),
        (torch.bfloat16, 1, None),
        (torch.float16, 1, LENGTHS),
        (torch.float16, 1, None),
        (torch.float16, 3, LENGTHS),
    ],
)
def test_rows_of_16_bits_see_their_own_columns_in_32(
    dtype: torch.dtype, per_head: int, lengths: list[int] | None
) -> None:
    query, key, value = sixteen_bits(HEADS, per_head, dtype)
    attn_mask = None if lengths is None else last_columns(lengths)
    wanted = scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask, scale=0.3)
    mode, calls = FastAttention(), Calls()
    with calls, mode:
        found = scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=0.3)
    torch.testing.assert_close(found, wanted.to(dtype))
    assert calls.keys == [(torch.float32, length) for length in lengths or [COLUMNS] * ROWS]
    assert mode.is_of_use


def test_heads_that_share_keys_are_known_by_their_name() -> None:
    query, key, value = sixteen_bits(2, 1, torch.float16)
    query = torch.cat([query] * 3, dim=1)
    wanted = scaled_dot_product_attention(query.double(), key.double(), value.double(), enable_gqa=True)
    with FastAttention():
        found = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(found, wanted.half())


def test_few_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CACHED", SIZE * COLUMNS)
    query, key, value = sixteen_bits(HEADS, 1, torch.float16)
    shared = torch.cat([query, -query], dim=1)
    of_pairs = shared.view(ROWS, 2, HEADS, 1, SIZE).transpose(1, 2).reshape(shared.shape)
    for queries, options in ((query, {}), (of_pairs, {"enable_gqa": True})):
        exact = (tensor.double() for tensor in (queries, key, value))
        calls = Calls()
        with calls, FastAttention():
            found = scaled_dot_product_attention(queries, key, value, **options)
        torch.testing.assert_close(found, scaled_dot_product_attention(*exact, **options).half())
        assert len(calls.heads) > ROWS or torch.get_num_threads() >= HEADS


def test_a_mask_is_known_again_only_where_it_fits() -> None:
    attn_mask = torch.ones(1, 1, 1, COLUMNS, dtype=torch.bool)
    query, key, value = sixteen_bits(HEADS, 1, torch.float16)
    wanted = scaled_dot_product_attention(query, key, value, attn_mask)
    with FastAttention():
        scaled_dot_product_attention(query[:1], key[:1], value[:1], attn_mask)
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, attn_mask), wanted)


HOLES = last_columns(LENGTHS).logical_xor(torch.arange(COLUMNS) == COLUMNS - 2)
NOTHING = last_columns([COLUMNS, 4, 0])


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": HOLES},
        {"attn_mask": NOTHING},
        {"attn_mask": last_columns(LENGTHS).float()},
        {"attn_mask": last_columns([4])},
        {"dropout_p": 1.0},
        {"is_causal": True},
    ],
)
def test_what_is_more_than_the_last_columns_is_left_to_torch(options: dict[str, Any]) -> None:
    query, key, value = sixteen_bits(HEADS, 1, torch.bfloat16)
    wanted = scaled_dot_product_attention(query, key, value, **options)
    calls = Calls()
    with calls, FastAttention():
        found = scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert calls.keys == [(torch.bfloat16, COLUMNS)]


def test_prompts_of_16_bits_are_left_to_torch() -> None:
    query, key, value = (torch.randn(ROWS, HEADS, COLUMNS, SIZE).bfloat16() for _ in range(3))
    calls = Calls()
    with calls, FastAttention():
        scaled_dot_product_attention(query, key, value, is_causal=True)
        scaled_dot_product_attention(query, key, value)
    assert calls.keys == [(torch.bfloat16, COLUMNS)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_steps_of_16_bits_attend_in_32(dtype: torch.dtype, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "persimmon", eos_token_id=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    texts, calls = Texts(model, "eager"), Calls()
    for number, context in enumerate(prompts(3)):
        texts.join(number, context)
    with calls:
        texts.step()
    lengths = [len(context) + 1 for context in prompts(3)]
    assert calls.keys == [(torch.float32, length) for length in lengths] * model.config.num_hidden_layers


@pytest.mark.parametrize("decoding", ["eager", "static"])
@torch.inference_mode()
def test_falcon_broadcasts_nothing(decoding: DecodingMode, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "falcon", eos_token_id=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain_calls, calls = Calls(), Calls()
    with plain_calls:
        model(input_ids=torch.ones(2, 3, dtype=torch.int64))
    assert plain_calls.heads
    assert all(queries > keys == 1 for queries, keys in plain_calls.heads)  # so it does by itself
    texts = Texts(model, decoding)
    with calls:
        for number, context in enumerate(prompts(3)):
            texts.join(number, context)
        texts.step()
    assert calls.heads
    assert all(queries == keys for queries, keys in calls.heads)


@pytest.mark.parametrize(("architecture", "depth"), [("falcon", 1), ("llama", 0)])
def test_a_model_without_such_attention_runs_as_it_is(architecture: str, depth: int, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    forward, depths, plain = Forward(model), [], model.forward

    def watched(**arguments: Any) -> Any:
        depths.append(_len_torch_function_stack())
        return plain(**arguments)

    model.forward = watched
    forward.prefill([1])
    forward.prefill([1, 2])
    assert depths == [1, depth]
