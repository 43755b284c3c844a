# SPDX-License-Identifier: Apache-2.0
"""The engine of encoders: what waits is computed, up to a number of tokens at a time, without delay.

Each input's outputs are its own whatever shares its forward, and so is its failure.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.encoder.forward import EncoderForward
from hf_triton.encoder.jobs import ArrayInput, EncoderGroup, EncoderInput, Job, Outputs
from hf_triton.encoder.probe import Way
from hf_triton.encoder.stacked import StackedForward
from hf_triton.engine.group import Listener
from hf_triton.engine.halves import BatchSize, run_in_halves
from hf_triton.engine.protocols import EngineLoad
from hf_triton.engine.worker import Worker
from hf_triton.errors import GenerationError, HfTritonError

logger = logging.getLogger(__name__)

LINGER_S: Final = 0.001
"""How long the cores are kept without work: a client that asks again at once finds them."""
MAX_BATCH_TOKENS: Final = {"cpu": 1024, "cuda": 16384}
"""Tokens of a forward, by torch's device type: a new request waits for one at most. Other accelerators take CUDA's. A
CPU computes 4096 at a time only two percent faster."""
MIN_BATCH_TOKENS: Final = 512
"""What is tried however often the memory had no room for more; a sixteenth is added after every forward."""


class _Waiter(Listener[Outputs]):
    """Keeps an outcome for the thread that waits for it."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[Outputs | HfTritonError] = queue.SimpleQueue()

    def on_finish(self, row: int, outcome: Outputs | HfTritonError) -> None:
        self.answers.put(outcome)


class EncoderEngine(Worker[EncoderGroup]):
    """Computes groups in a thread of its own, until it is closed or the device is lost.

    Args:
        max_batch_tokens: The most tokens of a forward, but for a longer sequence alone; None: the device's default.
        on_fatal: Called once, in the engine's thread, after the device was lost and every group answered.
    """

    def __init__(
        self,
        forward: EncoderForward | StackedForward,
        *,
        max_batch_tokens: int | None = None,
        on_fatal: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(forward.device, on_fatal, model=forward.model, adapters=forward.adapters, linger_s=LINGER_S)
        default = MAX_BATCH_TOKENS.get(forward.device.type, MAX_BATCH_TOKENS["cuda"])
        most = default if max_batch_tokens is None else max_batch_tokens
        self._tokens = BatchSize(most, least=MIN_BATCH_TOKENS, step=MIN_BATCH_TOKENS // 16)
        self.slower = list(forward.slower)
        self.way: Way = forward.way
        """How sequences share a forward."""
        self.adapters = forward.adapters
        """The model's LoRA adapters; None: it takes none."""
        self._forward: Any = forward
        self._running: list[Job] = []
        self.thread.start()

    def submit(self, groups: list[EncoderGroup]) -> None:
        """Queue the groups of one request and return at once; all of them, or none. One without inputs is answered."""
        super().submit([group for group in groups if group.inputs])
        for group in groups:
            if not group.inputs:
                group.finish([])

    def admission_error(self, group: EncoderGroup) -> HfTritonError | None:
        """The error of a group with an input that the model cannot compute; None: it can."""
        return next((error for each in group.inputs if (error := self._forward.input_error(each))), None)

    def run(self, inputs: Sequence[EncoderInput | ArrayInput]) -> list[npt.NDArray[np.float32]]:
        """The outputs of inputs, as soon as they are computed; raises HfTritonError if the engine refuses or fails."""
        waiter = _Waiter()
        self.submit([EncoderGroup(inputs, listener=waiter)])
        answer = waiter.answers.get()
        if isinstance(answer, HfTritonError):
            raise answer
        return answer

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread, and not quite at one moment."""
        return EngineLoad(len(self.queue), len(self._running))

    def unfinished(self) -> list[EncoderGroup]:
        """The groups that the current step computes."""
        return [job.group for job in self._running]

    def sleep(self) -> None:
        self._forward.drop_graphs()
        super().sleep()

    def wake(self) -> None:
        super().wake()
        self._forward.capture_again()

    def step(self) -> None:
        """Compute what waits, up to the most tokens of a forward."""
        groups = self.queue.take(self._tokens.now, takes_any=True)
        self._running = [job for group in groups for job in group.turns.popleft()]
        run_in_halves(
            self._running,
            self._compute,
            wanted=self._wanted,
            on_alone=lambda job, error: job.group.finish(error),
            size=self._tokens,
            cost=lambda jobs: sum(job.input.num_tokens for job in jobs),
        )
        if self.rejection() is None:  # else the thread ends, and answers them
            self._running = []
        if any(group.is_finished and group.num_waiting for group in groups):
            self.queue.drop_finished()

    def _wanted(self, jobs: list[Job]) -> list[Job]:
        if self.rejection():
            return []
        for group in {job.group for job in jobs}:
            group.refuse_if_ended()
        return [job for job in jobs if not job.group.is_finished]

    def _compute(self, jobs: list[Job]) -> None:
        """Give each input its outputs, or its group an error if they are not finite."""
        for job in jobs:
            job.group.begin()
        outputs = _to_host(self._forward([job.input for job in jobs]))
        for job, output in zip(jobs, outputs, strict=True):
            if np.isfinite(output).all():
                job.group.give(job.index, output)
            else:
                job.group.finish(_not_finite(job))


def _not_finite(job: Job) -> HfTritonError:
    logger.error("the model's outputs are not finite for a sequence of %d tokens", job.input.num_tokens)
    return GenerationError(
        "not_finite",
        f"the model's outputs for input {job.index} are NaN or infinite: its weights are broken, or its numbers are "
        "too large for 16 bits (set dtype to float32)",
    )


def _to_host(outputs: list[torch.Tensor]) -> list[npt.NDArray[np.float32]]:
    """Copy outputs to the CPU at once: each copy waits for the device."""
    if len(outputs) == 1:
        return [outputs[0].cpu().numpy()]
    flat = torch.cat([output.reshape(-1) for output in outputs]).cpu().numpy()
    ends = np.cumsum([output.numel() for output in outputs])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(tuple(output.shape)) for part, output in zip(parts, outputs, strict=True)]
