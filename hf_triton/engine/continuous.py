# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a paged KV cache.

Each step computes tokens of many sequences: one of each that decodes, and chunks of the contexts of others
(`scheduler.py` tells the rule). Keys and values lie in blocks, so nothing is padded, moved or copied.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any, ClassVar

from hf_triton.engine.allocate import allocate_cache
from hf_triton.engine.decoding import capture_forwards
from hf_triton.engine.engine_config import ModelTraits
from hf_triton.engine.executor import Executor
from hf_triton.engine.generate_calls import GenerateCalls
from hf_triton.engine.generation import GenerationWorker
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.proposal_costs import find_costs
from hf_triton.engine.protocols import EngineLoad
from hf_triton.engine.recovery import Recovery
from hf_triton.engine.scheduler import Scheduler
from hf_triton.engine.sequence import SequenceGroup
from hf_triton.errors import HfTritonError, RequestError
from hf_triton.runner.faults import error_outcome, is_fatal
from hf_triton.runner.image_inputs import ImageInput
from hf_triton.runner.model_runner import PACKED, ModelRunner, Way
from hf_triton.runner.step import Step
from hf_triton.sampling.draw import prepare_draws
from hf_triton.sentence import param

logger = logging.getLogger(__name__)


class ContinuousBatchingEngine(GenerationWorker):
    """Lets each sequence of a decoder-only model join and leave at any step."""

    name: ClassVar[str] = "continuous"

    def __init__(
        self, model: Any, options: EngineOptions, way: Way = PACKED, *, images: str = "no", image_obstacle: str = ""
    ) -> None:
        config, max_num_seqs = options.config, options.max_num_seqs
        self.runner = _build_runner(model, way, options)
        super().__init__(model, self.runner.device, options, images, image_obstacle)
        if options.decoding != "eager":
            self.runner.allocate_slots()
        self.memory = allocate_cache(self.runner, options)
        self.runner.warm_up()
        num_proposed = self._num_proposed(options.prompt_lookup)
        if options.decoding != "eager" and options.ranks is None and not options.has_own_code:
            self.runner.record(max_num_seqs * (1 + num_proposed))
        self.slower += capture_forwards(
            options.decoding, self.runner.device, lambda: self.runner.capture(max_num_seqs, num_proposed)
        )
        self.slower += self.runner.partly
        if self.runner.device.type == "cuda":
            prepare_draws(self.runner.run_token())
        traits = ModelTraits(
            config.chunk_sizes or self.device_context.chunk_sizes,
            recompute_length=float("inf") if self.runner.switch_length is None else self.runner.switch_length + 1,
            recomputes=self.runner.recomputes,
            prefills_whole=way.prefills_whole,
            has_states=self.runner.cache.has_states,
            caches_prefixes=options.enable_prefix_caching
            and not way.prefills_whole
            and (not self.runner.cache.has_states or self.memory.pool.states.num_slots > 0),
            joins_images=way.joins_images,
            proposals=find_costs(self.runner, max_num_seqs, num_proposed, config) if num_proposed else None,
            runs_ahead=self.runner.device.type == "cuda" if config.runs_ahead is None else config.runs_ahead,
        )
        numbers = itertools.count()
        self.scheduler = Scheduler(
            self.memory,
            self.queue,
            traits,
            max_sequences=max_num_seqs,
            start=lambda group: self._start(group, next(numbers)),
            observer=options.observer,
            config=config,
        )
        self.executor = Executor(self.runner)
        self.recovery = Recovery(self.scheduler, self.memory)
        self._calls = GenerateCalls(self, model, alone=True) if images == "generate" else None
        if options.ranks is not None:
            self.slower.append(
                "runs in ranks, whose layers are neither fused nor packed, and eagerly unless decoding is cuda_graphs"
            )
            options.ranks.serve(self.fail)
        self.thread.start()

    def close(self) -> None:
        super().close()
        if self.options.ranks is not None:
            self.options.ranks.close()

    def _num_proposed(self, wanted: int) -> int:
        """The most tokens of a proposal; 0 for a model whose computed tokens cannot be taken back."""
        runner = self.runner
        if wanted and (runner.cache.has_states or runner.way.prefills_whole):
            logger.warning("the setting prompt_lookup does nothing: this model's states cannot roll back")
            return 0
        return wanted

    def _start(self, group: SequenceGroup, number: int) -> None:
        self.start(group, arrival_number=number)
        if group.images is not None and self._calls is not None:
            self._generate(group, self._calls)
            return
        self.executor.samplers.update((sequence.id, sequence.sampler) for sequence in group.sequences)

    def _generate(self, group: SequenceGroup, calls: GenerateCalls) -> None:
        """Run a group whose images the model's own `generate` sees alone, while all others wait."""
        calls.run([group])
        if not group.is_finished and (rejection := self.rejection()):
            group.finish(rejection)

    def step(self) -> None:
        """Schedule a step, run it, and update the sequences."""
        try:
            step = self.scheduler.schedule()
        except Exception as error:
            self._recover(Step(), error)
            return
        try:
            if step.wait_s:
                self.wait(step.wait_s)
            self.executor.drop_images(step.dropped_images)
            for image in step.images:
                self._see(image)
            for output in self.executor.run(step):
                self.scheduler.update(output)
        except Exception as error:
            self._recover(step, error)

    def _see(self, image: ImageInput) -> None:
        """Compute an image's features before the step: a vision tower that raises ends the image's own groups alone."""
        try:
            seconds = self.executor.compute_image(image)
        except Exception as error:
            if is_fatal(error):
                raise
            outcome = error_outcome(error)
            for group in self.scheduler.features.users(image):
                group.finish(outcome)
        else:
            if seconds is not None:
                self.options.observer.on_tower(seconds)

    def _recover(self, step: Step, error: Exception) -> None:
        self.executor.lose_inflight()
        self.recovery.recover(step, error)

    def is_busy(self) -> bool:
        """Whether admitted groups have no outcome yet."""
        return self.scheduler.is_busy

    def unfinished(self) -> list[SequenceGroup]:
        """The admitted groups that have no outcome yet."""
        return self.scheduler.unfinished()

    def release(self) -> None:
        """Give back memory that the prefix cache does not keep, and allow as many sequences as at first."""
        self.executor.lose_inflight()
        self.executor.drop_images(self.scheduler.features.take_dropped(is_idle=True))
        self.memory.rest()
        self.scheduler.admission.reset_limit()

    def sleep(self) -> None:
        """Give back all blocks, states and features, the captured graphs, and a GPU's weights."""
        self.release()
        self.memory.forget()
        self.runner.sleep()
        super().sleep()

    def wake(self) -> None:
        super().wake()
        self.runner.wake()

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread, and not quite at one moment."""
        return self.scheduler.load()

    def admission_error(self, group: SequenceGroup) -> HfTritonError | None:
        """The error of a group that can never run in this memory, or searches by beams; None: it can."""
        num_beams = group.params.num_beams
        if group.images and (error := self.image_error()):
            return error
        if num_beams > 1:
            return RequestError(
                "invalid_parameter",
                f"{param('num_beams')} {num_beams} needs the batch engine, and this model runs in the continuous "
                "one: leave it out, or set the folder's setting engine to batch",
            )
        return self.memory.admission_error(len(group.prompt_ids), group.params.max_new_tokens)


def _build_runner(model: Any, way: Way, options: EngineOptions) -> ModelRunner:
    block_size = options.config.block_size
    if options.ranks is None:
        return ModelRunner(model, way, options.adapters, block_size=block_size)
    from hf_triton.runner.ranks.leading import LeadingRunner

    return LeadingRunner(options.ranks, model, way, block_size=block_size)
