# SPDX-License-Identifier: Apache-2.0
"""Calls a model's forward with the arguments that it accepts. Knows no slots and no sampling."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_triton.runner.adapters import Adapter, AdapterRows, Adapters
from hf_triton.runner.cpu import fast_attention
from hf_triton.runner.cuda import forward_context
from hf_triton.runner.long_rope import LongRope, has_long_rope
from hf_triton.runner.padding import pad
from hf_triton.runner.states import cache_maker, decodes_as_it_prefills, memory_per_token

CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params")
"""Argument names of the cache: since transformers 5.24, before, and in models with states only."""


class Forward:
    """Calls a decoder-only model.

    Args:
        model: A transformers model with a cache, in eval mode, on its device.
        adapters: Its LoRA adapters; None: it has none.
    """

    def __init__(self, model: Any, adapters: Adapters | None = None) -> None:
        self.model = model
        self._adapters = adapters
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._cache_name = cache_name(model)
        self.new_cache = cache_maker(model.config)
        """Creates the empty cache of a prefill batch."""
        self.is_recurrent = self.new_cache is not DynamicCache
        """Whether some layers keep states, which cannot go back (`states.py`)."""
        self.has_keys = not self.is_recurrent or any(
            isinstance(layer, DynamicLayer) for layer in self.new_cache().layers
        )
        """Whether some layers keep keys and values of every token."""
        self.recomputes = decodes_as_it_prefills(model)
        """Whether a sequence can be recomputed: prefilling its tokens gives the KV that decoding gave."""
        self._attention = fast_attention()
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._long_rope = LongRope(model) if has_long_rope(model) else None
        self.recompute_length: float = self._long_rope.switch_length + 1 if self._long_rope else math.inf
        """A context that reaches this many tokens must be recomputed: it cannot use the KV of a shorter one."""
        self._device_context = forward_context(self.device)

    @property
    def is_on_one_device(self) -> bool:
        """Whether all of the model is on the device of its embedding."""
        device_map: dict[str, object] = getattr(self.model, "hf_device_map", None) or {}
        return len(set(map(str, device_map.values()))) <= 1

    def prefill(self, prompt: list[int]) -> tuple[Cache, torch.Tensor]:
        """The keys and values of one prompt, and the logits that follow it, `[1, vocabulary]`."""
        cache = self.new_cache()
        input_ids, attention_mask = pad([prompt], 0, self.device, at_left=True)
        return cache, self(input_ids, attention_mask, cache)[:, -1]

    def cache_key(self, token_ids: list[int], adapter: Adapter | None = None) -> list[int]:
        """A sequence's key in the prefix cache: sequences share KV as far as their keys are equal."""
        key = self._long_rope.cache_key(token_ids) if self._long_rope else token_ids
        return adapter.cache_key(key) if adapter else key

    @torch.inference_mode()
    def memory_per_token(self) -> tuple[Mapping[torch.device, int], int]:
        """See `states.memory_per_token`."""
        cache, _ = self.prefill([0])
        return memory_per_token(cache, self.device)

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Any,
        *,
        position_ids: torch.Tensor | None = None,
        num_logits: int = 1,
        num_context: int = 0,
        adapters: AdapterRows = None,
    ) -> torch.Tensor:
        """The logits that follow the last columns, `[rows, num_logits, vocabulary]`.

        Args:
            input_ids: `[rows, new]`, the newest tokens.
            attention_mask: `[rows, columns]`, cached and new ones.
            cache: Keys and values of the columns before; the new ones are appended.
            position_ids: `[rows, new]`, tokens of a row before each new one; None: by the mask.
            num_logits: Number of last columns.
            num_context: Tokens of the longest context that is being prefilled in chunks; at least those so far.
            adapters: See `Adapters.choose`.
        """
        num_new = input_ids.shape[1]
        mask: torch.Tensor | None = attention_mask
        if not self.has_keys:  # only new columns are visible, and a step has no padding
            mask = attention_mask[:, -num_new:] if num_new > 1 else None
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True, "attention_mask": mask}
        if "position_ids" in self._accepts:
            if position_ids is None:
                position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -num_new:]
            arguments["position_ids"] = position_ids
        if "logits_to_keep" in self._accepts:
            arguments["logits_to_keep"] = num_logits
        length = self._long_rope.prefilling(num_context) if self._long_rope else nullcontext()
        chosen = self._adapters.choose(adapters) if self._adapters else nullcontext()
        with self._attention, self._device_context, length, chosen:
            logits: torch.Tensor = self.model(input_ids=input_ids, **arguments).logits
        return logits[:, -num_logits:]


def cache_name(model: Any) -> str:
    """The argument name of a model's cache."""
    accepts = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in accepts), CACHE_NAMES[0])


def has_bare_state(model: Any) -> bool:
    """Whether a model's memory is a list of tensors (RWKV), whose rows beam search cannot reorder."""
    return "state" in inspect.signature(model.forward).parameters and not hasattr(model, "_reorder_cache")


def attention_for_generate() -> AbstractContextManager[object]:
    """A context for `model.generate`, with the CPU's attention kernel."""
    return fast_attention(patches_torch=False)


def begin_anew(model: Any, num_rows: int, device: torch.device) -> None:
    """Reset what a model keeps in its modules of an earlier batch.

    RecurrentGemma keeps its states and resets them only for prompts of two tokens or more. Dynamic NTK keeps the
    frequencies of the longest sequence so far.
    """
    first = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic" and hasattr(module, "max_seq_len_cached"):
            module(first.float(), first)  # a short sequence restores the first frequencies
    begin = getattr(model.base_model, "_setup_cache", None)
    if begin is not None:
        begin(model.config, num_rows, device, model.dtype)
