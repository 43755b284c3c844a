# SPDX-License-Identifier: Apache-2.0
"""Attention of many heads to one head of keys and values: what torch would broadcast is what comes out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _len_torch_function_stack
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from hf_triton.runner.decode import DecodingMode
from hf_triton.runner.forward import Forward
from hf_triton.runner.multi_query import MultiQueryAttention
from hf_triton.testing import build_tiny_checkpoint
from tests.running_texts import Texts, prompts

ROWS, HEADS, NEW, COLUMNS, SIZE = 3, 5, 4, 9, 8


class Heads(TorchFunctionMode):
    """Notes how many heads of queries and of keys attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.calls.append((args[0].shape[1], args[1].shape[1]))
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
        "of two dimensions": columns[None] <= columns[-new:, None],
    }


@pytest.mark.parametrize("new", [1, NEW])
@pytest.mark.parametrize("mask", masks(1))
def test_attention_is_what_torch_broadcasts(mask: str, new: int) -> None:
    query, key, value = tensors(new)
    attn_mask = masks(new)[mask]
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=0.3)
    mode, heads = MultiQueryAttention(), Heads()
    with heads, mode:
        by_name = scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=attn_mask, scale=0.3)
        in_order = scaled_dot_product_attention(query, key, value, attn_mask, 0.0, False, scale=0.3)
    torch.testing.assert_close(by_name, wanted)
    torch.testing.assert_close(in_order, wanted)
    assert mode.is_of_use
    assert all(queries == keys for queries, keys in heads.calls)
    assert len(heads.calls) == 2


def test_causal_attention_is_what_torch_broadcasts() -> None:
    query, key, value = tensors(COLUMNS)
    wanted = scaled_dot_product_attention(query, key, value, is_causal=True)
    with MultiQueryAttention():
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, is_causal=True), wanted)


def test_other_attention_is_left_alone() -> None:
    query, key, value = tensors(1)
    mode = MultiQueryAttention()
    with mode:
        scaled_dot_product_attention(query, key, value, enable_gqa=True)
        scaled_dot_product_attention(query, query, query)
        scaled_dot_product_attention(key, key, value)
    assert not mode.is_of_use


@pytest.mark.parametrize("decoding", ["eager", "static"])
@torch.inference_mode()
def test_falcon_broadcasts_nothing(decoding: DecodingMode, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "falcon", eos_token_id=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain_heads, heads = Heads(), Heads()
    with plain_heads:
        model(input_ids=torch.ones(2, 3, dtype=torch.int64))
    assert all(queries > keys == 1 for queries, keys in plain_heads.calls)  # so it does by itself
    texts = Texts(model, decoding)
    with heads:
        for number, context in enumerate(prompts(3)):
            texts.join(number, context)
        texts.step()
    assert heads.calls
    assert all(queries == keys for queries, keys in heads.calls)


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
