# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's tokens within their sequences, behind transformers' `AttentionInterface`.

`attend` is what a model calls in place of its attention, and what a token sees is the mask's rule (`mask_rules.py`). A
step of sequences in blocks finds the layer by the keys that the layer's `update` has returned: on a GPU one operation
attends to all tokens; on a CPU decoding tokens go to a kernel, and each chunk to torch's attention on its own keys, or
on copies of its sequence's blocks. A row of whole sequences, of which nothing is stored, is one operation on a GPU, and
torch's attention once for each length elsewhere. Falcon calls torch's attention itself: `TorchAttention` replaces that.

A model that changes a mask or its keys on the way fails here, and the probe chooses another way for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_triton.runner.cuda import packed_attention_for
from hf_triton.runner.device_step import Places
from hf_triton.runner.mask_rules import BIDIRECTIONAL, CAUSAL, Rule, mask_of_rule
from hf_triton.runner.packed_row import PackedRow
from hf_triton.runner.paged_cache import PagedCache, PagedLayer
from hf_triton.runner.torch_attention import Scoring, attend_gathered, attend_ranges, attend_row

NAME: Final = "hf_triton"
UNKNOWN_STEP: Final = "its attention reads more of a step than the device has"


class NotPackableError(RuntimeError):
    """The model changes a mask or keys on the way to attention, or needs what a packed row does not have."""


class _Thread(threading.local):
    cache: PagedCache | PackedRow | None = None


_thread = _Thread()


@contextmanager
def attention_of(cache: PagedCache | PackedRow, configs: Sequence[Any] = ()) -> Iterator[None]:
    """While it is entered, attention of this thread is that of the cache's step.

    Args:
        cache: Has the step.
        configs: Of the model, see `attention_configs`; none: its attention is replaced otherwise.
    """
    before = [config._attn_implementation_internal for config in configs]
    _thread.cache = cache
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        _thread.cache = None
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def cache_of_thread() -> PagedCache | PackedRow | None:
    """The cache whose step this thread computes; None: it computes none."""
    return _thread.cache


def attention_configs(model: Any) -> list[Any]:
    """The configs in which a model's modules look up their attention, each once."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    configs.append(model.config.get_text_config(decoder=True))
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}.values())


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Queries `[1, heads, tokens, size]` or `[rows, heads, 1, size]` to outputs with heads and tokens swapped."""
    if has_torch_function_unary(query):
        given = module, query, key, value, attention_mask, scaling, is_causal, softcap, s_aux, position_bias
        return handle_torch_function(attend, (query,), *given, **others)
    cache = _thread.cache
    if cache is None:
        raise NotPackableError("no step runs in this thread")
    if position_bias is not None:
        raise NotPackableError("attention has a bias by position")
    rule = getattr(attention_mask, "rule", None)
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        rule = CAUSAL if is_causal else BIDIRECTIONAL
    if rule is None:
        raise NotPackableError("the mask is changed on its way to attention")
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if isinstance(cache, PackedRow):
        return _attend_row(cache, query, key, value, rule, scoring).unsqueeze(0), None
    rows, heads, new, _ = query.shape
    queries = query.transpose(1, 2).flatten(0, 1)  # [tokens, heads, size]
    if cache.gathers:
        if key.shape[2] != sum(cache.step.ends):
            raise NotPackableError("the keys are not those of the step's sequences")
        output = attend_gathered(cache.step, queries, key, value, rule, scoring)
    elif (layer := cache.layer_of.get(id(key))) is not None:
        output = _attend_blocks(cache, layer, queries, rule, scoring)
    else:
        raise NotPackableError("the keys are changed behind the cache")
    return output.view(rows, new, heads, -1), None


def _attend_row(
    row: PackedRow, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, scoring: Scoring
) -> torch.Tensor:
    """`[tokens, heads, value_size]` of whole sequences, whose keys are in the row."""
    if query.shape[2] != key.shape[2]:
        raise NotPackableError("attention has keys of its own")
    row.num_attention_calls += 1
    operation = packed_attention_for(query)
    if operation is None or rule.window is None:
        if not row.step.ranges:
            raise NotPackableError(UNKNOWN_STEP)
        return attend_row(row, query, key, value, rule, scoring)
    states = (each[0].transpose(0, 1) for each in (query, key, value))
    at = row.step.device_step(query.device)
    output: torch.Tensor = operation(*states, Places(at.sequences, at.bounds), scoring, rule.window)
    return output


def _attend_blocks(
    cache: PagedCache, layer: PagedLayer, queries: torch.Tensor, rule: Rule, scoring: Scoring
) -> torch.Tensor:
    """`[tokens, heads, value_size]` of a step whose keys are in blocks, which the new ones may have to reach yet."""
    step, (scale, softcap, sinks) = cache.step, scoring
    window = rule.window.size if rule.window is not None and rule.window.is_causal else None
    unwritten = (None, None) if layer.is_written else (layer.new_keys, layer.new_values)
    if layer.operation is not None and window is not None:
        assert layer.blocks
        layer.is_written = True
        blocks = layer.blocks.keys, layer.blocks.values
        return layer.operation(queries, *unwritten, *blocks, step.device_step(queries.device).places(), scoring, window)
    num, outputs = step.num_decodes, []
    num_tokens = step.bounds[num]
    # The kernel's softmax is in 32 bits; of scores with sinks, the model's is in their own type.
    has_kernel = num and window is not None and (sinks is None or sinks.dtype == torch.float32)
    if has_kernel and (kernel := layer.kernel_of[queries.shape[1]]):
        decoded = kernel(queries[:num_tokens], *unwritten, *step.decodes, scale, window, softcap or 0.0, sinks)
        if decoded is not None:
            layer.is_written = True
            outputs.append(decoded)
    if not outputs or num < len(step.ranges):
        if not step.ranges:
            raise NotPackableError(UNKNOWN_STEP)
        if not layer.is_written:
            layer.write()
        assert layer.blocks is not None
        assert layer.new_keys is not None
        assert layer.new_values is not None
        new = layer.new_keys, layer.new_values
        outputs += attend_ranges(step, num if outputs else 0, layer.blocks, new, queries, rule, scoring)
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0].contiguous()


class TorchAttention(TorchFunctionMode):
    """While it is entered, a model's own calls of torch's attention are `attend` (Falcon)."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of every one of its functions."""
        cache = _thread.cache
        if func is not scaled_dot_product_attention or not isinstance(cache, PagedCache):
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        if id(named["key"]) not in cache.layer_of and not cache.gathers:
            return func(*args, **(kwargs or {}))
        states = named["query"], named["key"], named["value"]
        output, _ = attend(torch.nn.Module(), *states, named.get("attn_mask"), scaling=named.get("scale"))
        return output.transpose(1, 2)


def mask_for_torch(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The `sdpa` mask, or its rule in a thread that runs a step."""
    if _thread.cache is not None:
        return mask_of_rule(*args, **kwargs)
    mask: torch.Tensor | None = _sdpa_mask(*args, **kwargs)
    return mask


_sdpa_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def register() -> None:
    """Make `attend` known to transformers under `NAME`, and the mask's rule to models that call torch themselves."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of_rule)
    AttentionMaskInterface.register("sdpa", mask_for_torch)
