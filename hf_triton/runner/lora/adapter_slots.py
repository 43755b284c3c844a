# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters at fixed addresses, so that a CUDA graph that was captured once computes with whichever are there now.

A layer's adapters lie one beside the other in two matrices, each in its slot. A token's slot is a number on the device:

    down = states @ A.T         [tokens, slots * rank]
    down = 0 where a column is not of the token's slot
    output + (down @ B.T) * scale of the token's slot

A step brings its adapters into slots, in the order of the stream, in place of those that were used longest ago. Knows
no adapter's files; what is not plain LoRA of the layers and up to the rank that were there at load has no slot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hf_triton.runner.lora.adapter_names import AdapterNames
from hf_triton.runner.numerics import agree
from hf_triton.runner.transfer import copy_to_device

MAX_SLOTS: Final = 8
"""Adapters of a step."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotLayer:
    """The weights of all slots for one layer, in the dtype in which peft has them."""

    row: int
    """The layer's scales are in it."""
    a: torch.Tensor
    """`[slots * rank, inputs]`."""
    b: torch.Tensor
    """`[outputs, slots * rank]`."""


class AdapterSlots:
    """The slots of a model's adapters. Belongs to the thread of the model's forwards, but for `admit` and `drop`.

    Args:
        names: Gives these layers the adapters of a forward; the plain name is that of no adapter.
        adapters: Layers of peft by their names in the model, for each adapter that is loaded, by its key.
        head: The model's own layer that computes logits, which sees a selection of the tokens.
        device: Of all layers.
        max_tokens: The most of a step.

    Raises:
        ValueError: No adapter is plain LoRA; the message is the end of a sentence.
    """

    def __init__(
        self,
        names: AdapterNames,
        adapters: Mapping[str, Mapping[str, Any]],
        head: Any,
        device: torch.device,
        max_tokens: int,
    ) -> None:
        self._names = names
        self._head = head
        plain = {key: layers for key, layers in adapters.items() if self._why_not_plain(key, layers) is None}
        if not plain:
            raise ValueError("no adapter at load is LoRA of linear layers alone")
        self.rank = max(layer.r[key] for key, layers in plain.items() for layer in layers.values())
        samples = {name: (key, layer) for key, layers in plain.items() for name, layer in layers.items()}
        self._tokens = torch.arange(max_tokens, device=device) % 2  # a trial's; the first slot keeps what it tries
        """Each token's slot, from 1; 0: it has no adapter."""
        self._columns = torch.arange(MAX_SLOTS * self.rank, device=device) // self.rank + 1
        self._scales = torch.zeros(len(samples), MAX_SLOTS + 1, device=device)
        self._layers = {
            name: SlotLayer(
                row,
                layer.lora_A[key].weight.new_zeros(MAX_SLOTS * self.rank, layer.lora_A[key].in_features),
                layer.lora_B[key].weight.new_zeros(layer.lora_B[key].out_features, MAX_SLOTS * self.rank),
            )
            for row, (name, (key, layer)) in enumerate(samples.items())
        }
        self._admitted: dict[str, Mapping[str, Any]] = {}
        self._slot_of: dict[str, int] = {}
        """Adapters' slots by key, the least recently used first."""
        self._free = list(range(MAX_SLOTS, 0, -1))
        self.wrong = {name for name, (key, layer) in samples.items() if not self._is_right(name, key, layer)}
        """Layers for which peft computes something else; adapters that change them have no slot."""
        for name in self.wrong:
            del self._layers[name]

    def _why_not_plain(self, key: str, layers: Mapping[str, Any]) -> str | None:
        for name, layer in layers.items():
            is_variant = key in getattr(layer, "lora_variant", ()) or getattr(layer, "lora_bias", {}).get(key)
            if key not in getattr(layer, "lora_A", ()) or is_variant or type(layer.lora_A[key]) is not nn.Linear:
                return f"it changes {name} by other means than the two matrices of LoRA"
            if layer.base_layer is self._head:
                return f"it changes {name}, which computes logits"
        return None

    @torch.no_grad()
    def _is_right(self, name: str, key: str, layer: Any) -> bool:
        """Whether a token with an adapter and one without get from a layer what peft computes for them."""
        weight = layer.lora_A[key].weight
        states = torch.arange(2 * weight.shape[1], device=weight.device).sin().to(weight.dtype).view(2, -1)
        try:
            self._fill(self._layers[name], 1, key, layer)
            with self._names.of_rows([None, key]):
                expected = layer(states)
            with self.adding({name: layer}, 2):
                found = layer(states.clone())  # a merged product keeps its input, and what became of its output
            is_right = agree(expected, found)
        except Exception as error:  # a layer may do anything in its forward
            logger.debug("%s has no slots for adapters (%s)", name, error)
            return False
        return is_right

    # --- adapters that come and go -----------------------------------------------------------------------------------

    def admit(self, key: str, layers: Mapping[str, Any]) -> str | None:
        """Let an adapter have a slot when steps need it; why it has none and runs eagerly, None: it may."""
        reason = self._why_none(key, layers)
        if reason is None:
            self._admitted[key] = layers
        return reason

    def _why_none(self, key: str, layers: Mapping[str, Any]) -> str | None:
        if reason := self._why_not_plain(key, layers):
            return reason
        for name, layer in layers.items():
            own = self._layers.get(name)
            if name in self.wrong:
                return f"{name} computes something else than LoRA"
            if own is None:
                return f"it changes {name}, which no adapter did at load"
            if layer.r[key] > self.rank:
                return f"its rank {layer.r[key]} is larger than {self.rank}, the largest at load"
            if layer.lora_A[key].weight.dtype != own.a.dtype:
                return f"{name} has numbers of another type than at load"
        weights = [matrix[key].weight for layer in layers.values() for matrix in (layer.lora_A, layer.lora_B)]
        if not torch.stack([weight.isfinite().all() for weight in weights]).all():
            return "its weights are infinite in the model's type of numbers"  # times 0 they would be NaN for all
        return None

    def tensors(self) -> list[torch.Tensor]:
        """The weights of all slots."""
        return [matrix for layer in self._layers.values() for matrix in (layer.a, layer.b)]

    @property
    def has_any(self) -> bool:
        return bool(self._admitted)

    def drop(self, key: str) -> None:
        """Forget an adapter that leaves the model. What is in its slot stays until another takes it."""
        self._admitted.pop(key, None)

    def have_room(self, keys: set[str]) -> bool:
        return len(keys) <= MAX_SLOTS and keys <= self._admitted.keys()

    def lacks(self, keys: set[str]) -> bool:
        """Whether some of a step's adapters are in no slot yet."""
        return not keys <= self._slot_of.keys()

    @torch.no_grad()
    def bring(self, keys: set[str]) -> None:
        """Have all adapters of a step in slots; the model's adapters must not change meanwhile."""
        for key in keys & self._slot_of.keys():
            self._slot_of[key] = self._slot_of.pop(key)
        for key in keys - self._slot_of.keys():
            if not self._free:
                self._free.append(self._slot_of.pop(next(iter(self._slot_of))))
            layers = self._admitted[key]
            for name, own in self._layers.items():
                self._fill(own, self._free[-1], key, layers.get(name))
            self._slot_of[key] = self._free.pop()

    def _fill(self, own: SlotLayer, slot: int, key: str, layer: Any) -> None:
        """Copy an adapter's weights for a layer of peft into a slot; None: it has none there."""
        start = (slot - 1) * self.rank
        a, b = own.a[start : start + self.rank], own.b[:, start : start + self.rank]
        rank = 0 if layer is None else layer.r[key]
        a[rank:].zero_()
        b[:, rank:].zero_()
        if layer is not None:
            a[:rank].copy_(layer.lora_A[key].weight)
            b[:, :rank].copy_(layer.lora_B[key].weight)
            self._scales[own.row, slot].fill_(layer.scaling[key])

    # --- a forward ---------------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[str | None], num_tokens: int) -> None:
        """Bring the slot of each token's adapter, padding's too, to where a forward reads it, in the stream's order."""
        numbers = np.zeros(num_tokens, np.int64)
        numbers[: len(keys)] = [0 if key is None else self._slot_of[key] for key in keys]
        copy_to_device(numbers, self._tokens[:num_tokens])

    @contextmanager
    def adding(self, layers: Mapping[str, Any], num_tokens: int) -> Iterator[None]:
        """Add to layers what slots have, in a forward without peft's; another number of tokens raises RuntimeError."""
        tokens = self._tokens[:num_tokens]
        others = tokens[:, None] != self._columns
        scales = self._scales[:, tokens]
        with ExitStack() as hooks:
            for name, layer in layers.items():
                if own := self._layers.get(name):
                    add = partial(_add, name, own, others, scales[own.row, :, None])
                    hooks.callback(layer.register_forward_hook(add).remove)
            yield


def _add(
    name: str,
    own: SlotLayer,
    others: torch.Tensor,
    scales: torch.Tensor,
    _: Any,
    arguments: tuple[Any, ...],
    output: torch.Tensor,
) -> torch.Tensor:
    states = arguments[0].flatten(0, -2)
    if len(states) != len(others):
        raise RuntimeError(f"{name} sees {len(states)} of a step's {len(others)} tokens")
    down = functional.linear(states.to(own.a.dtype), own.a)
    down = down.masked_fill(others, 0)  # and not times 0: another adapter may overflow with this token
    added = functional.linear(down, own.b) * scales
    return output + added.to(output.dtype).view(output.shape)
