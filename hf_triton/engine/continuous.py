# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over any decoder-only model's own forward: sequences join and leave between two steps.

A prompt is prefilled apart, chunk by chunk, so that the running sequences keep their pace; then its KV is copied into a
free slot (`runner/kv_cache.py`), and it takes part from the next decoding step on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from hf_triton.engine.config import EngineConfig, ModelTraits
from hf_triton.engine.executor import Executor
from hf_triton.engine.kv_memory import KVMemory
from hf_triton.engine.plan import ScheduledStep
from hf_triton.engine.recovery import Recovery
from hf_triton.engine.scheduler import Scheduler
from hf_triton.engine.sequence import SequenceGroup
from hf_triton.engine.types import EngineLoad, Observer, eos_ids
from hf_triton.engine.worker import EngineThread
from hf_triton.errors import HfTritonError, RequestError
from hf_triton.runner.adapters import Adapters
from hf_triton.runner.decode import Decoder, DecodingMode
from hf_triton.runner.forward import Forward


class ContinuousBatchingEngine(EngineThread):
    """Continuous batching.

    Args:
        model: A decoder-only transformers model with a cache, in eval mode, on its device.
        max_num_seqs: The most sequences that run at a time.
        max_cache_tokens: Tokens of KV cache memory, padding counted; None: what the device has free.
        enable_prefix_caching: Whether a prompt reuses the KV of an earlier one that begins like it.
        prefills_whole: Whether a context is prefilled in one chunk (`probe_continuous_batching`); then none is cached.
        decoding: How a decoding step runs, see `Decoder`.
        on_fatal: Called once, in the engine's thread, after the engine has failed for good and answered every group.
        observer: Observes the engine.
        config: The engine's constants.
        adapters: The model's LoRA adapters.
    """

    name: ClassVar[str] = "continuous"

    def __init__(
        self,
        model: Any,
        *,
        max_num_seqs: int,
        max_cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        prefills_whole: bool = False,
        decoding: DecodingMode = "auto",
        on_fatal: Callable[[], None] = lambda: None,
        observer: Observer | None = None,
        config: EngineConfig | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        forward = Forward(model, adapters)
        super().__init__(forward.device, eos_ids(model), on_fatal, observer, config or EngineConfig())
        chunk_sizes = self.config.chunk_sizes or self.device_context.chunk_sizes
        self.forward = forward
        self.decoder = Decoder(forward, decoding)
        padding_bytes = self.config.padding_fraction * model.get_memory_footprint(return_buffers=False)
        self.memory = KVMemory(
            forward,
            max_cache_tokens,
            padding_bytes=math.inf if self.decoder.is_static else padding_bytes,  # captured graphs are of one lane
            prefix_tokens=2 * chunk_sizes.per_weights,
            prefix_fraction=self.config.prefix_cache_fraction if enable_prefix_caching and not prefills_whole else 0.0,
        )
        traits = ModelTraits(
            chunk_sizes,
            recompute_length=forward.recompute_length,
            recomputes=forward.recomputes,
            prefills_whole=prefills_whole,
            stores_prompts=self.memory.prefixes.stores_prompts,
            can_run_ahead=lambda: self.decoder.is_static,
        )
        numbers = itertools.count()
        self.scheduler = Scheduler(
            self.memory,
            self.queue,
            traits,
            max_sequences=max_num_seqs,
            start=lambda group: self.start(group, arrival_number=next(numbers)),
            observer=self.observer,
            config=self.config,
        )
        self.executor = Executor(forward, self.decoder, self.memory)
        self.recovery = Recovery(self.scheduler, self.memory)
        self.thread.start()

    @torch.inference_mode()
    def step(self) -> None:
        """Schedule a step, run it, and update the sequences."""
        scheduled = ScheduledStep()
        try:
            scheduled = self.scheduler.schedule()
            output = self.executor.run(scheduled)
            self.scheduler.update(output)
        except Exception as error:
            self.recovery.recover(scheduled.sequences, error)

    def is_busy(self) -> bool:
        """Whether admitted groups have no outcome yet."""
        return self.scheduler.stages.is_busy

    def unfinished(self) -> list[SequenceGroup]:
        """The admitted groups that have no outcome yet."""
        return self.scheduler.stages.unfinished()

    def release(self) -> None:
        """Free the KV cache's memory, and allow as many sequences as at first."""
        self.memory.release()
        self.decoder.release()
        self.scheduler.reset_limits()

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread, and not quite at one moment."""
        return self.scheduler.load(self.memory.num_used_tokens, self.memory.budget.allowed)

    def admission_error(self, group: SequenceGroup) -> HfTritonError | None:
        """The error of a group that can never run in this memory, or searches by beams; None: it can."""
        num_beams = group.params.num_beams
        if num_beams > 1:
            return RequestError(
                "invalid_parameter",
                f"num_beams {num_beams} needs the batch engine, and this model runs in the continuous one: leave it "
                "out, or set the folder's setting engine to batch",
            )
        return self.memory.admission_error(len(group.prompt_ids), group.params.max_new_tokens)
