# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's tokens to their sequences' blocks, behind transformers' `AttentionInterface`.

`attend` is what a model calls in place of its attention. It finds the layer by the keys that the layer's `update` has
returned, and what a token sees by the mask's rule: `mask_of_rule` stands in place of a mask, and carries the rule
unread through the model. Decoding tokens go to the device's kernel; each chunk to torch's attention on its own keys, or
on copies of its sequence's blocks. Falcon calls torch's attention itself: `TorchAttention` replaces that.

A model that changes a mask or its keys on the way fails here, and the probe chooses another way for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_triton.runner.paged_cache import PagedCache, PagedLayer
from hf_triton.runner.step_tensors import StepTensors

NAME: Final = "hf_triton_paged"
WHOLE: Final = (slice(None), slice(None), slice(0, None), slice(None))
"""Of a mask: Gemma 4 cuts the last 0 queries, which is all, if every token's logits are wanted."""
FAR: Final = 1 << 20
"""A position beyond every window: what is visible from there tells a rule's kind."""
MAX_RULES: Final = 256
"""Rules whose windows are remembered."""

MaskFunction = Callable[..., Any]
"""transformers' rule of a mask: whether a token sees another, given batch, head and both positions."""


class NotPagedError(RuntimeError):
    """The model changes a mask, or what the cache has returned, on the way to attention."""


class _Thread(threading.local):
    cache: PagedCache | None = None


_thread = _Thread()


@contextmanager
def attention_of(cache: PagedCache) -> Iterator[None]:
    """While it is entered, attention of this thread is that of the cache's step."""
    _thread.cache = cache
    try:
        yield
    finally:
        _thread.cache = None


class MaskRule(torch.Tensor):
    """A tensor of one element in place of a mask, on the host.

    Moving it and taking all of it do nothing; any other change loses the rule.
    """

    rule: MaskFunction
    window: int | None
    """See `window_of`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of every function of such a tensor."""
        if func is torch.Tensor.to and isinstance(args[0], MaskRule):
            return args[0]
        if func is torch.Tensor.__getitem__ and args[1] == WHOLE:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def mask_of_rule(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> torch.Tensor:
    """As transformers calls it to make a mask."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).as_subclass(MaskRule)
    mask.rule, mask.window = mask_function, window_of(mask_function)
    return mask


# --- what a rule lets a token see ------------------------------------------------------------------------------------

_windows: dict[Any, int | None] = {}


def window_of(rule: MaskFunction) -> int | None:
    """0: all tokens before it. w: the last w tokens, itself included. None: something else (Llama 4's chunks)."""
    key = tuple(_parts(rule))
    if key in _windows:
        return _windows[key]
    if any(isinstance(part, torch.Tensor) for part in key):
        return None  # looking at it would make the host wait for the device
    if len(_windows) >= MAX_RULES:  # some rule is another one at each forward
        _windows.clear()
    _windows[key] = _find_window(rule)
    return _windows[key]


def _parts(value: Any) -> Iterator[Any]:
    """A function's code and what it closes over: transformers makes the same functions at each forward."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _parts(each)
    elif hasattr(value, "__code__"):
        yield value.__code__
        yield from _parts([cell.cell_contents for cell in value.__closure__ or ()])
    else:
        yield value


def _find_window(rule: MaskFunction) -> int | None:
    """By what a far token sees: the tokens after it, the first one, and those in between."""
    nearest = torch.arange(FAR - FAR // 8, FAR + 3)
    columns = torch.cat([torch.zeros(1, dtype=torch.int64), nearest])
    seen = _evaluate(rule, torch.tensor([FAR]), columns)[0]
    if seen[-2:].any() or not seen[-3]:
        return None
    if seen[:-2].all():
        return 0
    first = int(columns[seen][0])
    is_run = int(seen.sum()) == FAR - first + 1
    moves = _evaluate(rule, torch.tensor([FAR + 1]), torch.tensor([first, first + 1]))[0].tolist()
    return FAR - first + 1 if is_run and moves == [False, True] else None


def _evaluate(rule: MaskFunction, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`[positions, columns]` bool."""
    zero = torch.zeros((1, 1), dtype=torch.int64, device=positions.device)
    seen: torch.Tensor = rule(zero, zero, positions[:, None], columns[None])
    return seen.expand(len(positions), len(columns))


def _mask(
    step: StepTensors,
    number: int,
    rule: MaskFunction | None,
    window: int | None,
    first: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Which of a sequence's tokens `[first:end]` the new ones of range `number` see, `[new, tokens]` bool; None: all.

    Whether it is all is told from positions: looking at the mask would make the host wait for the device.
    """
    part = step.ranges[number]
    if part.num_tokens == 1 and window is not None and (not window or part.end - first <= window):
        return None
    key = number, first, device, rule if window is None else window
    if key not in step.masks:
        # Llama 4's rule has a tensor, on the device of the embedding.
        owner = next((each.device for each in _parts(rule) if isinstance(each, torch.Tensor)), device)
        positions = torch.arange(part.start, part.end, device=owner)
        columns = torch.arange(first, part.end, device=owner)
        if window is None:
            assert rule is not None
            mask = _evaluate(rule, positions, columns)
        else:
            mask = columns[None] <= positions[:, None]
            mask &= columns[None] > positions[:, None] - (window or part.end)
        step.masks[key] = mask.to(device)
    found: torch.Tensor = step.masks[key]
    return found


# --- attention -------------------------------------------------------------------------------------------------------


class _Scoring(NamedTuple):
    """What a layer's scores are made of, beside queries and keys."""

    scale: float
    """Factor of the products."""
    softcap: float | None
    """Scores are limited to it by tanh (Gemma 2)."""
    sinks: torch.Tensor | None
    """`[heads]`: a score of each head that takes part in the softmax alone (gpt-oss)."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Queries `[1, heads, tokens, size]` or `[rows, heads, 1, size]` to outputs with heads and tokens swapped."""
    cache = _thread.cache
    if cache is None:
        raise NotPagedError("no step runs in this thread")
    if position_bias is not None:
        raise NotPagedError("attention has a bias by position")
    rule, window = None, 0
    if attention_mask is not None:
        rule, window = getattr(attention_mask, "rule", None), getattr(attention_mask, "window", 0)
        if rule is None:
            raise NotPagedError("the mask is changed on its way to attention")
    rows, heads, new, size = query.shape
    queries = query.transpose(1, 2).flatten(0, 1)  # [tokens, heads, size]
    scale = size**-0.5 if scaling is None else scaling
    if cache.gathers:
        output = _attend_gathered(cache.step, queries, key, value, rule, window, _Scoring(scale, softcap, s_aux))
        return output.view(rows, new, heads, -1), None
    layer, step = cache.layer_of.get(id(key)), cache.step
    if layer is None:
        raise NotPagedError("the keys are changed behind the cache")
    written = (None, None) if layer.is_written else (layer.new_keys, layer.new_values)
    if layer.operation is not None and window is not None:
        assert layer.blocks
        layer.is_written = True
        blocks = layer.blocks.keys, layer.blocks.values
        at = step.device_step(queries.device).places()
        output = layer.operation(queries, *written, *blocks, *at, s_aux, scale, window, softcap or 0.0)
        return output.view(rows, new, heads, -1), None
    num, outputs = step.num_decodes, []
    # The kernel's softmax is in 32 bits; of scores with sinks, the model's is in their own type.
    has_kernel = num and window is not None and (s_aux is None or s_aux.dtype == torch.float32)
    if has_kernel and (kernel := layer.kernel_of[heads]):
        places = step.tables[:num], step.lengths[:num]
        decoded = kernel(queries[:num], *written, *places, scale, window, softcap or 0.0, s_aux)
        if decoded is not None:
            layer.is_written = True
            outputs.append(decoded)
    if not outputs or num < len(step.ranges):
        first = num if outputs else 0
        outputs += _attend_ranges(step, first, layer, queries, rule, window, _Scoring(scale, softcap, s_aux))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0].contiguous()
    return output.view(rows, new, heads, -1), None


def _attend_ranges(
    step: StepTensors,
    first: int,
    layer: PagedLayer,
    queries: torch.Tensor,
    rule: MaskFunction | None,
    window: int | None,
    scoring: _Scoring,
) -> Iterator[torch.Tensor]:
    """The outputs of each range from `first` on, by torch, `[new, heads, size]`."""
    if not step.ranges:
        raise NotPagedError("its attention reads more of a step than the device has")
    layer.write()
    blocks, new_keys, new_values = layer.blocks, layer.new_keys, layer.new_values
    assert blocks is not None
    assert new_keys is not None
    assert new_values is not None
    is_plain = scoring.softcap is None and scoring.sinks is None
    tables = step.on(queries.device, "tables")
    for number in range(first, len(step.ranges)):
        part, start, end = step.ranges[number], step.bounds[number], step.bounds[number + 1]
        own = queries[start:end].transpose(0, 1)  # [heads, new, size]
        if not part.start and is_plain and (window == 0 or (window is not None and part.end <= window)):
            keys, values = new_keys[start:end].transpose(0, 1), new_values[start:end].transpose(0, 1)
            output = _causal(own, keys, values, scoring.scale)
        else:
            low = max(0, part.start + 1 - window) // step.block_size * step.block_size if window else 0
            keys, values = blocks.read(tables[number], part.end, low)
            output = _masked(own, keys, values, _mask(step, number, rule, window, low, queries.device), scoring)
        yield output.transpose(0, 1)


def _attend_gathered(
    step: StepTensors,
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: MaskFunction | None,
    window: int | None,
    scoring: _Scoring,
) -> torch.Tensor:
    """The same with the keys and values of all tokens of the step's sequences, `[1, key heads, tokens, size]`."""
    if key.shape[2] != sum(step.ends):
        raise NotPagedError("the keys are not those of the step's sequences")
    outputs, offset = [], 0
    for number, end in enumerate(step.ends):
        own = queries[step.bounds[number] : step.bounds[number + 1]].transpose(0, 1)
        keys, values = key[0, :, offset : offset + end], value[0, :, offset : offset + end]
        mask = _mask(step, number, rule, window, 0, queries.device)
        outputs.append(_masked(own, keys, values, mask, scoring).transpose(0, 1))
        offset += end
    return torch.cat(outputs)


def _causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of a sequence's first tokens to each other, `[heads, tokens, size]`."""
    shares_keys = len(queries) != len(keys)
    batch = queries[None], keys[None], values[None]
    is_causal = queries.shape[1] > 1
    return scaled_dot_product_attention(*batch, is_causal=is_causal, scale=scale, enable_gqa=shares_keys)[0]


def _masked(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: _Scoring
) -> torch.Tensor:
    """Attention of `[heads, new, size]` to all visible `[key heads, tokens, size]`, in the model's own type.

    Args:
        queries: Heads that share keys are adjacent.
        keys: Of all visible tokens.
        values: The same.
        mask: `[new, tokens]` bool; None: all are visible.
        scoring: Of the layer.
    """
    scale, softcap, sinks = scoring
    groups = len(queries) // len(keys)
    if softcap is None and sinks is None:
        batch = queries[None], keys[None], values[None]
        return scaled_dot_product_attention(*batch, mask, scale=scale, enable_gqa=groups > 1)[0]
    grouped = queries.view(len(keys), groups, *queries.shape[1:])
    scores = grouped @ keys.unsqueeze(1).mT * scale  # [key heads, groups, new, tokens]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32).to(queries.dtype)
    else:
        column = sinks.to(scores.dtype).view(len(keys), groups, 1, 1).expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], -1)
        weights = (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
    return (weights @ values.unsqueeze(1)).flatten(0, 1)


class TorchAttention(TorchFunctionMode):
    """While it is entered, a model's own calls of torch's attention are `attend` (Falcon)."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of every one of its functions."""
        cache = _thread.cache
        if func is not scaled_dot_product_attention or cache is None:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        if id(named["key"]) not in cache.layer_of and not cache.gathers:
            return func(*args, **(kwargs or {}))
        output, _ = attend(
            torch.nn.Module(),
            named["query"],
            named["key"],
            named["value"],
            named.get("attn_mask"),
            scaling=named.get("scale"),
        )
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
