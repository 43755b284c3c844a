# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: a transformers cache whose layers keep keys and values in blocks, and states in slots.

A layer's `update` writes the new tokens to their blocks, unless a kernel has or will, and returns them as they came;
attention finds the layer by these keys (`step_attention.py`) and reads the blocks. Knows no sequences: a step says
which token goes where.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from hf_triton.runner.cpu import paged_kernels
from hf_triton.runner.cuda import attention_for
from hf_triton.runner.kv_blocks import KVBlocks
from hf_triton.runner.state_slots import EMPTY, SlotStatesLayer, Turn
from hf_triton.runner.step_tensors import StepTensors


class PagedCache(Cache):
    """The KV cache of all sequences.

    Args:
        gathers: Whether `update` returns the keys and values of all tokens of the step's sequences, one sequence
            behind the other, for a model that expands what it caches (multi-head latent attention).
    """

    def __init__(self, config: Any, num_blocks: int, block_size: int, *, gathers: bool = False) -> None:
        super().__init__(layers=[])
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.gathers = gathers
        self.kernels = paged_kernels()
        self.step: StepTensors
        """The forward that runs computes it."""
        self.layer_of: dict[int, PagedLayer] = {}
        """Layers by the identity of the keys that `update` has returned in this forward."""
        self.coming_value: tuple[int, torch.Tensor] | None = None
        """The value that a layer's `update` will get, and the layer's number; see `cuda/early_writes.py`."""
        self.continued: torch.Tensor | None = None
        """The state with which the layer that computes begins; see `state_scans.py`."""
        self.turn = Turn()
        self.layers = [self._layer(layer) for layer in _layers(config)]
        if not self.layers:
            self.layer_class_to_replicate = lambda: PagedLayer(self)  # type: ignore[assignment]

    @property
    def has_states(self) -> bool:
        """Whether some layers keep states of one size per sequence."""
        return any(isinstance(layer, SlotStatesLayer) for layer in self.layers)

    @property
    def has_keys(self) -> bool:
        """Whether some layers keep keys and values of every token."""
        return not self.layers or any(isinstance(layer, PagedLayer) for layer in self.layers)

    def begin(self, step: StepTensors) -> None:
        self.step = step
        self._forget()
        for layer in self.layers:
            if isinstance(layer, SlotStatesLayer):
                layer.begin(step)

    def end(self) -> None:
        """Keep the states that the forward has computed."""
        self._forget()
        for layer in self.layers:
            if isinstance(layer, SlotStatesLayer):
                layer.end()

    def _forget(self) -> None:
        """Let go of the tensors of the last forward, which may have failed."""
        self.layer_of.clear()
        self.coming_value = self.continued = None
        for layer in self.paged_layers():
            layer.new_keys = layer.new_values = layer.returned_keys = layer.early = None

    def free(self) -> None:
        """Free the memory of all blocks and states; a layer allocates again at its next token."""
        self._forget()
        for layer in self.paged_layers():
            layer.blocks = None
            layer.kernel_of.clear()
        self.trim_slots(0)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A layer's state, as transformers asks for it when the layer begins; None: it begins without."""
        self.continued = super().get_recurrent_state(layer_idx, state_idx)
        return self.continued

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each from one to another; all are read before any is written."""
        for blocks in self.blocks():
            blocks.copy(pairs)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states, each from one slot to another; all are read before any is written."""
        for layer in self.layers:
            if isinstance(layer, SlotStatesLayer):
                layer.copy(pairs)

    def trim_slots(self, num_slots: int) -> None:
        """Give back the memory of the states from this slot on."""
        for layer in self.layers:
            if isinstance(layer, SlotStatesLayer):
                layer.trim(num_slots)

    def blocks(self) -> Iterable[KVBlocks]:
        """The blocks of every layer that has written some."""
        return [layer.blocks for layer in self.paged_layers() if layer.blocks is not None]

    def paged_layers(self) -> list[PagedLayer]:
        """The layers that keep keys and values of every token."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def memory_per_token(self, device: torch.device) -> tuple[Mapping[torch.device, int], int]:
        """Bytes of one token's keys and values on each device, and how many tokens take as much as the states.

        A model without keys has those of the token's id. Call it after a forward of one sequence.
        """
        per_token, states = Counter[torch.device](), Counter[torch.device]()
        for blocks in self.blocks():
            per_token[blocks.device] += blocks.bytes_per_token
        for layer in self.layers:
            if isinstance(layer, SlotStatesLayer):
                for tensor in layer.states():
                    states[tensor.device] += tensor.nbytes // len(tensor)
        for owner in {device, *states} - set(per_token):
            per_token[owner] = torch.int64.itemsize
        return per_token, max((math.ceil(states[owner] / per_token[owner]) for owner in states), default=0)

    def _layer(self, layer: Any) -> Any:
        if isinstance(layer, EMPTY):
            return layer
        if isinstance(layer, LinearAttentionLayer):
            has_keys = isinstance(layer, DynamicLayer)
            return PagedStatesLayer(self, layer) if has_keys else SlotStatesLayer(layer.number_of_states, self.turn)
        if not isinstance(layer, DynamicLayer):
            raise TypeError(f"unknown kind of cache layer {type(layer).__name__}")
        return PagedLayer(self)


def _layers(config: Any) -> list[Any]:
    try:
        return list(DynamicCache(config=config).layers)
    except Exception:  # a kind of layer that transformers has no cache for
        return []


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that both live are the same numbers in memory."""
    views = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (one, other)]
    return views[0] == views[1]


class _KernelOf(dict[int, Any]):
    """Keeps a layer's attention of one token of every sequence on a CPU, by number of heads; None: there is none."""

    def __init__(self, cache: PagedCache, layer: PagedLayer) -> None:
        super().__init__()
        self._kernels, self._layer = cache.kernels, layer

    def __missing__(self, num_heads: int) -> Any:
        """Found once, as a layer asks at every step."""
        blocks = self._layer.blocks
        assert blocks is not None
        self[num_heads] = self._kernels.kernel_for(num_heads, blocks.keys, blocks.values)
        return self[num_heads]


def _update(layer: PagedLayer, *states: Any, **options: Any) -> Any:
    """As a recorded call."""
    return layer.update(*states, **options)


class PagedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, in blocks."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.kernel_of = _KernelOf(cache, self)
        self.operation: Callable[..., torch.Tensor] | None = None
        """A GPU's attention, which writes the new tokens too; None: there is none."""
        self.blocks: KVBlocks | None = None
        self.new_keys: torch.Tensor | None = None
        """`[tokens, key heads, size]`: of this forward."""
        self.new_values: torch.Tensor | None = None
        self.returned_keys: torch.Tensor | None = None
        """What `update` has returned: while it is kept, no other tensor has its identity."""
        self.is_written = True
        """Whether they are in their blocks; else the kernel writes them."""
        self.early: tuple[torch.Tensor, torch.Tensor] | None = None
        """The key and value that are in their blocks though `update` has not got them yet."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens to their blocks, or leave it to the kernel that attends to them.

        States, `[1, key heads, tokens, size]` or `[rows, key heads, 1, size]`, return as they came, or gathered.
        """
        if has_torch_function_unary(key_states):
            given = self, key_states, value_states, *args
            return handle_torch_function(_update, (key_states,), *given, **kwargs)  # type: ignore[no-any-return]
        cache = self._cache
        if self.blocks is None:
            self.blocks = KVBlocks(cache.num_blocks, cache.block_size, key_states, value_states)
            self.is_initialized = True
            self.operation = attention_for(self.blocks.keys)
        self.new_keys = key_states.transpose(1, 2).flatten(0, 1)
        self.new_values = value_states.transpose(1, 2).flatten(0, 1)
        early, self.early = self.early, None
        self.is_written = early is not None and early[0] is key_states and is_same(early[1], value_states)
        if cache.gathers:
            self.write()
            return self.blocks.gather(cache.step)
        step = cache.step
        has_more = step.has_proposals or step.num_decodes < len(step.ranges)  # than a token of each sequence
        if self.operation is None and (has_more or not any(self.kernel_of.values())):
            self.write()
        cache.layer_of[id(key_states)], self.returned_keys = self, key_states
        return key_states, value_states

    def takes_early(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether a GPU may write these, `[rows, key heads, tokens, size]`, before `update` gets them."""
        blocks = self.blocks
        if self.operation is None or blocks is None or self.new_keys is not None:  # one update in a forward
            return False
        return keys.shape[:3] == values.shape[:3] and all(
            (new.shape[1::2], new.dtype, new.device) == (own.shape[1::2], own.dtype, own.device)
            for new, own in ((keys, blocks.keys), (values, blocks.values))
        )

    def write(self) -> None:
        """Write the new tokens to their blocks, once."""
        if not self.is_written:
            keys, values, blocks = self.new_keys, self.new_values, self.blocks
            assert keys is not None
            assert values is not None
            assert blocks is not None
            slots = self._cache.step.on(keys.device, "slots")
            self._cache.kernels.write_tokens(blocks.keys, blocks.values, keys, values, slots)
            self.is_written = True

    def get_seq_length(self) -> int:
        """0: positions are given, and masks need no length."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The new tokens alone: a mask's rule is evaluated at positions."""
        return query_length, 0


class PagedStatesLayer(SlotStatesLayer, PagedLayer):  # type: ignore[misc, override, no-untyped-call]
    """A layer that has both: keys and values in blocks, and states in slots."""

    is_compileable = False

    def __init__(self, cache: PagedCache, layer: LinearAttentionLayer) -> None:
        PagedLayer.__init__(self, cache)
        SlotStatesLayer.__init__(self, layer.number_of_states, cache.turn)
