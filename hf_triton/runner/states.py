# SPDX-License-Identifier: Apache-2.0
"""Layers that keep states of one size per sequence, whatever its length: state space, linear attention, convolution.

Hybrid models (Qwen3.5, Granite 4, Falcon-H1, Nemotron-H, LFM2 ...) have such layers beside attention, or both in one. A
state is that of the last token: it has no columns, cannot go back, and running a step twice corrupts it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

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

from hf_triton.runner.kv_layer import KVCacheLayer, KVWindow

EMPTY: Final[type] = getattr(cache_utils, "DummyLayer", type(None))
"""A layer that keeps nothing; 5.18 of transformers has none yet."""


class _StateBuffers(dict[int, torch.Tensor | None]):
    """Buffers by number; indexing gives the slots that the forward sees."""

    def __init__(self, window: KVWindow, prefilled: Mapping[int, torch.Tensor | None]) -> None:
        super().__init__((at, states if states is None else states[:0].clone()) for at, states in prefilled.items())
        self._window = window

    def __getitem__(self, number: int) -> torch.Tensor | None:
        buffer = super().__getitem__(number)
        return buffer if buffer is None else buffer[: self._window.num_seen]

    def resize(self, num_slots: int) -> None:
        for number, buffer in self.items():
            if buffer is not None and len(buffer) != num_slots:
                self[number] = larger = buffer.new_zeros(num_slots, *buffer.shape[1:])
                larger[: self._window.num_rows] = buffer[: self._window.num_rows]


class StatesLayer(LinearAttentionLayer):
    """The states of all slots in one layer, buffers `[slots, ...]`; a forward changes those in use.

    Args:
        window: The slots in use.
        prefilled: The layer of a prefill's cache, for the states' shapes, dtypes and devices.
    """

    conv_states: _StateBuffers
    recurrent_states: _StateBuffers

    def __init__(self, window: KVWindow, prefilled: LinearAttentionLayer) -> None:
        super().__init__(number_of_states=prefilled.number_of_states)
        self.conv_states = _StateBuffers(window, prefilled.conv_states)
        self.recurrent_states = _StateBuffers(window, prefilled.recurrent_states)
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(self, name, getattr(prefilled, name))
        self.conv_kernel_size = prefilled.conv_kernel_size

    def put(self, slot: int, _: slice, prefilled: LinearAttentionLayer, row: int) -> None:
        """Copy the states of a row of a prefill batch to a slot."""
        for buffer, states in zip(states_of(self), states_of(prefilled), strict=True):
            buffer[slot] = states[row]

    def replace(self, slot: int, by: int) -> None:
        """Copy one slot to another."""
        for buffer in states_of(self):
            buffer[slot] = buffer[by]

    def move(self, shape: tuple[int, int], _used: slice, _by: int) -> None:
        """Resize the buffers to a number of slots."""
        self.conv_states.resize(shape[0])
        self.recurrent_states.resize(shape[0])


class KVCacheAndStatesLayer(StatesLayer, KVCacheLayer):  # type: ignore[misc, override, no-untyped-call]
    """A layer that has both; the arguments are those of either."""

    is_compileable = KVCacheLayer.is_compileable

    def __init__(self, window: KVWindow, prefilled: LinearAttentionAndFullAttentionLayer) -> None:
        StatesLayer.__init__(self, window, prefilled)
        KVCacheLayer.__init__(self, window, prefilled)

    def put(self, slot: int, columns: slice, prefilled: Any, row: int) -> None:
        """Copy a row of a prefill batch to a slot."""
        KVCacheLayer.put(self, slot, columns, prefilled, row)
        StatesLayer.put(self, slot, columns, prefilled, row)

    def replace(self, slot: int, by: int) -> None:
        """Copy one slot to another."""
        KVCacheLayer.replace(self, slot, by)
        StatesLayer.replace(self, slot, by)

    def move(self, shape: tuple[int, int], used: slice, by: int) -> None:
        """Resize the buffers to slots and columns, and move the columns in use `by` to the right."""
        KVCacheLayer.move(self, shape, used, by)
        StatesLayer.move(self, shape, used, by)


AnyLayer = KVCacheLayer | StatesLayer
SequenceStates = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]
"""What a layer keeps of one sequence: states of convolutions and others by their numbers, each `[1, ...]`."""


def layer_of_slots(window: KVWindow, prefilled: Any) -> Any:
    """The KV cache's layer for one of a prefill's cache.

    Raises:
        TypeError: An unknown kind of layer: the model does not fit continuous batching.
    """
    kinds: dict[type, type] = {
        DynamicLayer: KVCacheLayer,
        LinearAttentionLayer: StatesLayer,
        LinearAttentionAndFullAttentionLayer: KVCacheAndStatesLayer,
    }
    if type(prefilled) is EMPTY:
        return EMPTY()
    if type(prefilled) not in kinds:
        raise TypeError(f"unknown kind of cache layer {type(prefilled).__name__}")
    return kinds[type(prefilled)](window, prefilled)


def kept_layers(cache: Cache) -> list[Any]:
    """The layers that keep something."""
    return [layer for layer in cache.layers if not isinstance(layer, EMPTY)]


def cache_maker(config: Any) -> Callable[[], Cache]:
    """A factory of empty caches to prefill into, which keep keys and values beyond a sliding window too."""
    try:
        layers = DynamicCache(config=config).layers
        kinds = [_kind(layer) for layer in layers]
    except Exception:  # a kind of layer that transformers has no cache for
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
    """The states that a layer keeps, those of unused slots included."""
    if not isinstance(layer, LinearAttentionLayer):
        return []
    return [states for states in (*layer.conv_states.values(), *layer.recurrent_states.values()) if states is not None]


def decodes_as_it_prefills(model: Any) -> bool:
    """Whether no layer limits its time steps: transformers does so in prefill (Mamba2's scan), and in no step."""
    limits = (getattr(module, "time_step_limit", None) for module in model.modules())
    return all(limit is None or tuple(limit) == (0.0, math.inf) for limit in limits)


def sequence_states(cache: Cache, row: int) -> list[SequenceStates]:
    """Views of one sequence's states, layer by layer."""

    def of_row(states: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
        return {number: state[row : row + 1] for number, state in states.items() if state is not None}

    layers = (layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer))
    return [(of_row(layer.conv_states), of_row(layer.recurrent_states)) for layer in layers]


def restore(cache: Cache, contents: list[tuple[torch.Tensor, torch.Tensor]], states: Sequence[SequenceStates]) -> None:
    """Fill an empty cache so that prefill continues from there.

    Args:
        cache: To prefill into.
        contents: Keys and values `[rows, heads, columns, head_dim]` of each layer that has some.
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
    """Bytes of one token's keys and values on each device, and how many tokens take as much as the states.

    A model without keys has those of the token's column in the mask.

    Args:
        cache: With one token of one sequence.
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
    for owner in {device, *states} - set(per_token):
        per_token[owner] = torch.int64.itemsize
    return per_token, max((math.ceil(states[owner] / per_token[owner]) for owner in states), default=0)
