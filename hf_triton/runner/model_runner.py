# SPDX-License-Identifier: Apache-2.0
"""Runs a step through a model: one packed forward, or one for all decoding sequences and one for each chunk.

`Way` says how a model runs; the probe tries each. Knows no sampling and no scheduling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from hf_triton.runner.adapters import Adapters
from hf_triton.runner.calling import cache_name
from hf_triton.runner.cuda import forward_context
from hf_triton.runner.long_rope import LongRope, has_long_rope
from hf_triton.runner.paged_attention import NAME, TorchAttention, attention_of, register
from hf_triton.runner.paged_cache import PagedCache
from hf_triton.runner.state_slots import decodes_as_it_prefills
from hf_triton.runner.step import Step, TokenRange
from hf_triton.runner.step_tensors import InflightTokens, StepTensors
from hf_triton.runner.transfer import to_device, to_index

BLOCK_SIZES: Final = {"cpu": 64}
"""Tokens of a block: a CPU's prefetching wants long runs, a GPU's memory short ones."""
GPU_BLOCK_SIZE: Final = 16


@dataclass(frozen=True)
class Way:
    """How a model runs a step."""

    gathers: bool = False
    """Its attention is given the cached states of whole sequences (`PagedCache`)."""
    calls_torch: bool = False
    """It calls torch's attention itself."""
    prefills_whole: bool = False
    """A context is computed in one forward: a scan begins anew at each chunk."""


PACKED: Final = Way()


class ModelRunner:
    """Runs steps of one model.

    Args:
        model: A decoder-only transformers model with a cache, in eval mode, on its device.
        way: How it runs.
        adapters: Its LoRA adapters; None: it has none.
        block_size: Tokens of a block; None: the device's.
    """

    def __init__(
        self, model: Any, way: Way, adapters: Adapters | None = None, *, block_size: int | None = None
    ) -> None:
        register()
        self.model = model
        self.way = way
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.block_size = block_size or BLOCK_SIZES.get(self.device.type, GPU_BLOCK_SIZE)
        self.recomputes = decodes_as_it_prefills(model)
        """Whether a sequence can be recomputed: prefilling its tokens gives the KV that decoding gave."""
        self._adapters = adapters
        self._adapter_of: dict[int, str] = {}
        self._is_split = len({parameter.device for parameter in model.parameters()}) > 1
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._cache_name = cache_name(model)
        self._configs = _attention_configs(model)
        self._torch_attention: AbstractContextManager[Any] = TorchAttention() if way.calls_torch else nullcontext()
        self._device_context = forward_context(self.device)
        self._long_rope = LongRope(model) if has_long_rope(model) else None
        self.switch_length = self._long_rope.switch_length if self._long_rope else None
        """The most tokens of a sequence with LongRoPE's first set of frequencies; None: the model has one set."""
        self.cache = self._new_cache(1)
        self.is_packed = not self.cache.has_states
        """Whether the ranges of a step are one row; else each chunk is a forward, and one token of every sequence."""

    def _new_cache(self, num_blocks: int) -> PagedCache:
        config = self.model.config.get_text_config(decoder=True)
        return PagedCache(config, num_blocks, self.block_size, gathers=self.way.gathers)

    def allocate(self, num_blocks: int, num_slots: int = 1) -> None:
        """Use an empty cache of so many blocks.

        On a CPU its memory is touched when blocks are written. On any other device all is allocated here, states of
        so many sequences too: layers allocate at their first token.
        """
        self.cache = self._new_cache(num_blocks)
        if self.device.type != "cpu":
            self._run_token(num_slots - 1)

    def give_back(self, blocks: list[int]) -> None:
        """Free the memory of blocks that hold nothing."""
        for layer in self.cache.blocks():
            layer.give_back(blocks)

    def memory_per_token(self) -> tuple[Mapping[torch.device, int], int]:
        """See `PagedCache.memory_per_token`; it runs one token through the model."""
        self.cache = self._new_cache(1)
        self._run_token(0)
        return self.cache.memory_per_token(self.device)

    def _run_token(self, slot: int) -> None:
        self.run(Step((TokenRange(0, 0, 1, [0], [0], 1, samples=(0,), slot=slot),)))

    # --- a step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, step: Step, inflight: InflightTokens | None = None) -> torch.Tensor:
        """Compute a step's ranges.

        Args:
            step: At least one range.
            inflight: The tokens of ranges without any, which the step before samples; None: there are none.

        Returns:
            `[logits, vocabulary]`: range by range, those of its first `num_scored` tokens, then that of its last token
            if it samples.
        """
        for sequence in step.finished:
            self._adapter_of.pop(sequence, None)
        self._adapter_of.update({new.sequence_id: new.adapter for new in step.admitted if new.adapter})
        if step.block_copies:
            self.cache.copy_blocks(step.block_copies)
        if step.slot_copies:
            self.cache.copy_slots(step.slot_copies)
        logits = [self._forward(group, inflight) for group in self._groups(step.ranges)]
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _groups(self, ranges: tuple[TokenRange, ...]) -> Iterator[Sequence[TokenRange]]:
        """The ranges of each forward."""
        if self.is_packed:
            yield ranges
            return
        num_decodes = next((at for at, part in enumerate(ranges) if not part.is_decode), len(ranges))
        if num_decodes:
            yield ranges[:num_decodes]
        for part in ranges[num_decodes:]:
            yield (part,)

    def _forward(self, ranges: Sequence[TokenRange], inflight: InflightTokens | None) -> torch.Tensor:
        step = StepTensors(ranges, self.block_size, self.device, inflight)
        indices = _logit_indices(ranges, step.bounds)
        num_wanted, indices = len(indices), indices or [0]  # kernels of linear layers need a row
        # Rows of one token keep that token's logits; other forwards those that are wanted.
        shape = (1, -1) if self.is_packed or len(ranges) == 1 else (-1, 1)
        arguments: dict[str, Any] = {self._cache_name: self.cache, "use_cache": True, "attention_mask": None}
        if "position_ids" in self._accepts:
            arguments["position_ids"] = step.positions.view(shape)
        keeps = "logits_to_keep" in self._accepts and shape[0] == 1 and len(indices) < step.num_tokens
        if keeps:  # a list is an index on whichever device the last layer is; the host waits for it
            arguments["logits_to_keep"] = indices if self._is_split else to_index(indices, self.device)
        self.cache.begin(step)
        with self._contexts(ranges, step, indices):
            output = self.model(input_ids=step.token_ids.view(shape), **arguments)
        self.cache.end()
        logits: torch.Tensor = output.logits.flatten(0, 1)
        if not keeps and len(indices) < len(logits):
            logits = logits[to_index(indices, logits.device)]
        return logits[:num_wanted]

    @contextmanager
    def _contexts(self, ranges: Sequence[TokenRange], step: StepTensors, indices: list[int]) -> Iterator[None]:
        with (
            self._choose_adapters(ranges, step, indices),
            self._choose_frequencies(ranges),
            self._device_context,
            attention_of(self.cache),
            self._torch_attention,
        ):
            if self.way.calls_torch:
                yield
                return
            before = [config._attn_implementation_internal for config in self._configs]
            try:
                for config in self._configs:
                    config._attn_implementation_internal = NAME
                yield
            finally:
                for config, name in zip(self._configs, before, strict=True):
                    config._attn_implementation_internal = name

    def _choose_adapters(
        self, ranges: Sequence[TokenRange], step: StepTensors, indices: list[int]
    ) -> AbstractContextManager[None]:
        if self._adapters is None:
            return nullcontext()
        keys = [self._adapter_of.get(part.sequence_id) for part in ranges]
        if not any(keys):
            return self._adapters.choose(None)
        of_token = [key for key, part in zip(keys, ranges, strict=True) for _ in range(part.num_tokens)]
        wanted = [of_token[index] for index in indices]
        gathered = None
        if self.way.gathers:
            gathered = [key for key, end in zip(keys, step.ends, strict=True) for _ in range(end)]
        return self._adapters.choose_tokens(of_token, wanted, gathered)

    def _choose_frequencies(self, ranges: Sequence[TokenRange]) -> AbstractContextManager[None]:
        if self._long_rope is None:
            return nullcontext()
        assert self.switch_length is not None
        is_long = [part.context_length > self.switch_length for part in ranges for _ in range(part.num_tokens)]
        return self._long_rope.by_token(to_device(is_long, torch.bool, self.device) if any(is_long) else None)


def _logit_indices(ranges: Sequence[TokenRange], bounds: list[int]) -> list[int]:
    """The tokens of a forward whose logits are wanted, see `ModelRunner.run`."""
    indices: list[int] = []
    for part, start, end in zip(ranges, bounds, bounds[1:], strict=False):
        indices += range(start, start + part.num_scored)
        if part.samples:
            indices.append(end - 1)
    return indices


def _attention_configs(model: Any) -> list[Any]:
    """The configs in which modules look up their attention, each once."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    configs.append(model.config.get_text_config(decoder=True))
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}.values())
