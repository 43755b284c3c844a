# SPDX-License-Identifier: Apache-2.0
"""Layers that keep states of one size per text, whatever its length: state space, linear attention, convolution.

Hybrid models (Qwen3.5, Granite 4, Falcon-H1, Nemotron-H, LFM2 ...) have such layers beside attention, or both in one. A
state is that of the last token that was read: it has no columns, cannot go back, and a step run twice spoils it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hf_triton.runner.kv_layer import KVCacheLayer

if TYPE_CHECKING:
    from hf_triton.runner.kv_cache import KVCache

EMPTY: Final[type] = getattr(cache_utils, "DummyLayer", type(None))
"""A layer that keeps nothing; 5.18 of transformers has none yet."""


class _InUse(dict[int, torch.Tensor | None]):
    """Buffers by their number; who asks for one is given the rows that the forward sees."""

    def __init__(self, rows: KVCache, read: Mapping[int, torch.Tensor | None]) -> None:
        super().__init__((at, states if states is None else states[:0].clone()) for at, states in read.items())
        self._rows = rows

    def __getitem__(self, number: int) -> torch.Tensor | None:
        buffer = super().__getitem__(number)
        return buffer if buffer is None else buffer[: self._rows.num_seen]

    def resize(self, num_rows: int) -> None:
        for number, buffer in self.items():
            if buffer is not None and len(buffer) != num_rows:
                self[number] = larger = buffer.new_zeros(num_rows, *buffer.shape[1:])
                larger[: self._rows.num_rows] = buffer[: self._rows.num_rows]


class StatesLayer(LinearAttentionLayer):
    """The states of all rows in one layer, buffers `[rows, ...]`, of which a forward changes those in use.

    Args:
        rows: What tells the rows in use.
        read: What the model's layer has written, of which the states' shapes, dtypes and devices are taken.
    """

    conv_states: _InUse
    recurrent_states: _InUse

    def __init__(self, rows: KVCache, read: LinearAttentionLayer) -> None:
        super().__init__(number_of_states=read.number_of_states)
        self.conv_states = _InUse(rows, read.conv_states)
        self.recurrent_states = _InUse(rows, read.recurrent_states)
        for each in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(self, each, getattr(read, each))
        self.conv_kernel_size = read.conv_kernel_size

    def put(self, row: int, _: slice, read: LinearAttentionLayer, place: int) -> None:
        """Lay the states of one place of a batch that has been read into those of a row."""
        for buffer, states in zip(states_of(self), states_of(read), strict=True):
            buffer[row] = states[place]

    def replace(self, row: int, by: int) -> None:
        """Lay one row into another."""
        for buffer in states_of(self):
            buffer[row] = buffer[by]

    def move(self, shape: tuple[int, int], _used: slice, _by: int) -> None:
        """Give the buffers a number of rows."""
        self.conv_states.resize(shape[0])
        self.recurrent_states.resize(shape[0])


class KVCacheAndStatesLayer(StatesLayer, KVCacheLayer):  # type: ignore[misc, override, no-untyped-call]
    """A layer that has both. The arguments are those of either."""

    is_compileable = KVCacheLayer.is_compileable

    def __init__(self, rows: KVCache, read: LinearAttentionAndFullAttentionLayer) -> None:
        StatesLayer.__init__(self, rows, read)
        KVCacheLayer.__init__(self, rows, read)

    def put(self, row: int, columns: slice, read: Any, place: int) -> None:
        """Lay one place of a batch that has been read into a row."""
        KVCacheLayer.put(self, row, columns, read, place)
        StatesLayer.put(self, row, columns, read, place)

    def replace(self, row: int, by: int) -> None:
        """Lay one row into another."""
        KVCacheLayer.replace(self, row, by)
        StatesLayer.replace(self, row, by)

    def move(self, shape: tuple[int, int], used: slice, by: int) -> None:
        """Give the buffers a shape, rows and columns, and move the columns in use `by` to the right."""
        KVCacheLayer.move(self, shape, used, by)
        StatesLayer.move(self, shape, used, by)


AnyLayer = KVCacheLayer | StatesLayer
TextStates = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]
"""What a layer keeps of one text: states of convolutions and others by their numbers, each `[1, ...]`."""


def layer_of_rows(rows: KVCache, read: Any) -> Any:
    """The rows' layer for one of a cache that has been read into.

    Raises:
        TypeError: It keeps something else: the model is not one for rows.
    """
    makers: dict[type, Callable[[KVCache, Any], Any]] = {
        DynamicLayer: KVCacheLayer,
        LinearAttentionLayer: StatesLayer,
        LinearAttentionAndFullAttentionLayer: KVCacheAndStatesLayer,
        EMPTY: lambda *_: EMPTY(),
    }
    if type(read) not in makers:
        raise TypeError(f"there are no rows for {type(read).__name__}")
    return makers[type(read)](rows, read)


def kept_layers(cache: Cache) -> list[Any]:
    """The layers that keep something."""
    return [layer for layer in cache.layers if not isinstance(layer, EMPTY)]


def cache_maker(config: Any) -> Callable[[], Cache]:
    """What makes empty caches to read prompts into: with all keys and values, those beyond a sliding window too.

    Args:
        config: The model's.
    """
    try:
        layers = DynamicCache(config=config).layers
        kinds = [_kind(layer) for layer in layers]
    except Exception:  # a kind of layer that transformers knows no cache for
        return DynamicCache
    if not any(isinstance(layer, LinearAttentionLayer) for layer in layers):
        return DynamicCache
    return lambda: Cache(layers=[kind() for kind in kinds])


def _kind(layer: Any) -> Callable[[], Any]:
    if isinstance(layer, LinearAttentionLayer):
        has_keys = isinstance(layer, DynamicLayer)
        kind = LinearAttentionAndFullAttentionLayer if has_keys else LinearAttentionLayer
        return partial(kind, number_of_states=layer.number_of_states)
    return DynamicLayer if isinstance(layer, DynamicSlidingWindowLayer) else type(layer)


def states_of(layer: Any) -> list[torch.Tensor]:
    """The states of all texts that a layer keeps, those of rows that are not in use included."""
    if not isinstance(layer, LinearAttentionLayer):
        return []
    found = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [states for states in found if states is not None]


def keeps_keys(cache: Cache) -> bool:
    """Whether a cache that is made for a model with states has keys and values too."""
    return any(isinstance(layer, DynamicLayer) for layer in cache.layers)


def decodes_as_it_prefills(model: Any) -> bool:
    """Whether no layer limits its time steps: transformers does so in prefill (Mamba2's scan), and in no step."""
    limits = (getattr(module, "time_step_limit", None) for module in model.modules())
    return all(limit is None or tuple(limit) == (0.0, math.inf) for limit in limits)


def text_states(cache: Cache, place: int) -> list[TextStates]:
    """The states of one of the texts in a cache, layer by layer; views."""

    def one(states: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
        return {number: each[place : place + 1] for number, each in states.items() if each is not None}

    layers = (layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer))
    return [(one(layer.conv_states), one(layer.recurrent_states)) for layer in layers]


def cloned(states: TextStates) -> TextStates:
    """The same in memory of their own."""
    conv_states, recurrent_states = ({at: state.clone() for at, state in each.items()} for each in states)
    return conv_states, recurrent_states


def go_on_from(cache: Cache, contents: list[tuple[torch.Tensor, torch.Tensor]], states: Sequence[TextStates]) -> None:
    """Have an empty cache be as it was behind a text.

    Args:
        cache: To read prompts into.
        contents: Keys and values `[texts, heads, columns, head_dim]` of each layer that has some.
        states: Of each layer that keeps some.
    """
    if not contents and not states:
        return
    with_keys = [at for at, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)]
    for at, (keys, values) in zip(with_keys or range(len(contents)), contents, strict=True):
        cache.update(keys, values, at)
    with_states = (layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer))
    for layer, (conv_states, recurrent_states) in zip(with_states, states, strict=True):
        for number, state in conv_states.items():
            layer.update_conv_state(state, number)
        for number, state in recurrent_states.items():
            layer.update_recurrent_state(state, number)


def memory_per_token(cache: Cache, device: torch.device) -> tuple[Mapping[torch.device, int], int]:
    """Bytes of one token's keys and values on each device, and how many tokens weigh as much as the states.

    Where there are no keys, those of its place in the mask.

    Args:
        cache: With one token of one text.
        device: Of the mask.
    """
    per_token, states = Counter[torch.device](), Counter[torch.device]()
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            for tensor in (layer.keys, layer.values):
                assert tensor is not None
                per_token[tensor.device] += tensor.nbytes
        for tensor in states_of(layer):
            states[tensor.device] += tensor.nbytes
    for place in {device, *states} - set(per_token):
        per_token[place] = torch.int64.itemsize
    return per_token, max((math.ceil(states[place] / per_token[place]) for place in states), default=0)
