# SPDX-License-Identifier: Apache-2.0
"""The thread that an encoder runs in: what waits is computed, up to a number of tokens at a time, without delay.

Each input's outputs are its own whatever shares its forward, and so is its failure.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.encoder.forward import EncoderForward, Reduce, build_forward
from hf_triton.encoder.probe import Way
from hf_triton.encoder.types import EncoderGroup, EncoderInput, EncoderLoad
from hf_triton.encoder.waiting import Job, PendingGroup, WaitingGroups
from hf_triton.errors import GenerationError, HfTritonError, ShuttingDownError, UnavailableError, where
from hf_triton.runner.device import DeviceContext
from hf_triton.runner.dtypes import serving_dtype
from hf_triton.runner.faults import error_outcome, is_fatal, is_memory, kind, loggable

logger = logging.getLogger(__name__)

LINGER_S: Final = 0.001
"""How long the cores are kept without work: a client that asks again at once finds them."""
MAX_BATCH_TOKENS: Final = {"cpu": 1024, "cuda": 16384}
"""Tokens of a forward, by torch's device type: a newcomer waits for one. Other accelerators take CUDA's. A CPU computes
4096 at a time only two percent faster."""
MIN_BATCH_TOKENS: Final = 512
"""What is tried however often the memory had no room for more; a sixteenth is added after every forward."""


def build_encoder(
    model: Any,
    outputs: tuple[str, ...],
    *,
    per_token: bool,
    reduce: Reduce | None = None,
    max_batch_tokens: int | None = None,
    pack_weights: Literal["auto"] | bool = "auto",
    keeps_dtype: bool = False,
    way: Way | None = None,
    on_fatal: Callable[[], None] = lambda: None,
) -> EncoderEngine:
    """Probe a model and start its engine.

    Args:
        model: A transformers model in eval mode, on its device.
        outputs: Names of the model's outputs, as `("start_logits", "end_logits")`.
        per_token: Whether an output has a row for each token.
        reduce: Applied on the device to each sequence's outputs in float32, for pooling.
        max_batch_tokens: The most tokens of a forward, but for a longer sequence alone; None: the device's default.
        pack_weights: On a CPU, which linear layers get the layout that oneDNN computes with, in half the time; `auto`
            packs those that are faster so, by timing each shape.
        keeps_dtype: Whether a model of 16 bits keeps them on a CPU without instructions for them; if not, it becomes
            float32, which is several times faster there.
        way: How sequences share a forward, see `build_forward`.
        on_fatal: Called once, in the engine's thread, after the device was lost and every group answered.
    """
    dtype = serving_dtype(model.dtype, model.device)
    if dtype != model.dtype and not keeps_dtype and getattr(model, "hf_quantizer", None) is None:
        logger.info("this processor has no instructions for %s: the model becomes %s", model.dtype, dtype)
        model.to(dtype)
    forward = build_forward(model, outputs, per_token=per_token, reduce=reduce, pack_weights=pack_weights, way=way)
    return EncoderEngine(forward, max_batch_tokens=max_batch_tokens, on_fatal=on_fatal)


class EncoderEngine:
    """Queues groups and computes them in a thread of its own, until it is closed or the device is lost.

    Args:
        forward: Computes the outputs of inputs.
        max_batch_tokens: See `build_encoder`.
        on_fatal: See `build_encoder`.
    """

    def __init__(
        self,
        forward: EncoderForward,
        *,
        max_batch_tokens: int | None = None,
        on_fatal: Callable[[], None] = lambda: None,
    ) -> None:
        default = MAX_BATCH_TOKENS.get(forward.device.type, MAX_BATCH_TOKENS["cuda"])
        self._max_batch_tokens = default if max_batch_tokens is None else max_batch_tokens
        self._batch_tokens = self._max_batch_tokens
        """The same, but for what the memory had no room for lately."""
        self.way: Way = forward.way
        """How sequences share a forward."""
        self._forward = forward
        self._on_fatal = on_fatal
        self._waiting = WaitingGroups()
        self._running: list[Job] = []
        self._device_context = DeviceContext(forward.device)
        self._closing = threading.Event()
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hf_triton-encoder", daemon=True)
        self._thread.start()

    def submit(self, group: EncoderGroup) -> None:
        """Queue a group and return at once. One that the engine refuses, or that is empty, is answered here."""
        pending = PendingGroup(group)
        errors = (self._forward.input_error(each) for each in group.inputs)
        error = next((error for error in errors if error), None)
        with self._waiting.changed:
            error = error or self._rejection()
            if error is None and group.inputs:
                self._waiting.add(pending)
                return
        pending.fail(error) if error else pending.answer_empty()

    def run(self, inputs: list[EncoderInput]) -> list[npt.NDArray[np.float32]]:
        """The outputs of inputs, as soon as they are computed.

        Raises:
            HfTritonError: The engine refuses one, or fails on it.
        """
        answers: queue.SimpleQueue[list[npt.NDArray[np.float32]] | HfTritonError] = queue.SimpleQueue()
        self.submit(EncoderGroup(inputs, answers.put, lambda: False))
        answer = answers.get()
        if isinstance(answer, HfTritonError):
            raise answer
        return answer

    def load(self) -> EncoderLoad:
        """What the engine holds; from any thread, and not quite at one moment."""
        return EncoderLoad(self._waiting.num_inputs, len(self._running))

    def is_healthy(self) -> bool:
        """Whether the engine can still compute."""
        return self._rejection() is None and self._thread.is_alive()

    def close(self) -> None:
        """Answer every group that is not done with an error, and end the thread."""
        self._closing.set()
        with self._waiting.changed:
            self._waiting.changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _rejection(self) -> HfTritonError | None:
        """Why the engine accepts no group; None: it does."""
        if self._failed.is_set():
            return UnavailableError(
                "engine_failed", "the engine stopped after a fatal error, and the server is restarting"
            )
        return ShuttingDownError() if self._closing.is_set() else None

    # --- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._device_context.begin()
            while self._wait_for_work():
                self._device_context.busy()
                self._waiting.sweep()
                self._running = self._waiting.take(self._batch_tokens)
                self._run(self._running)
                self._running = []
        except BaseException as error:  # the thread's last resort: every group must be answered
            self._failed.set()
            with contextlib.suppress(Exception):  # a log that takes no line either
                logger.error("the encoder failed and stops (%s): %s", loggable(error), where(error))
        self._answer_all()
        self._device_context.idle()
        if self._failed.is_set():
            self._on_fatal()

    def _wait_for_work(self) -> bool:
        def has_work() -> bool:
            return bool(self._waiting) or self._closing.is_set()

        changed = self._waiting.changed
        with changed:
            if not changed.wait_for(has_work, LINGER_S):
                self._device_context.idle()
                changed.wait_for(has_work)
        return not self._closing.is_set()

    def _answer_all(self) -> None:
        with self._waiting.changed:
            pending = [*(job.pending for job in self._running), *self._waiting.clear()]
        rejection = self._rejection()
        assert rejection is not None  # the loop ends for no other reason
        for each in pending:
            each.fail(rejection)

    def _run(self, jobs: list[Job]) -> None:
        """Compute inputs; if that fails, in halves, so that only the one at fault fails its group."""
        parts = [jobs]
        while parts and not self._closing.is_set():
            part = [job for job in parts.pop() if not job.pending.drop_if_ended()]
            error = self._compute(part) if part else None
            if error is None:
                self._batch_tokens = min(self._max_batch_tokens, self._batch_tokens + MIN_BATCH_TOKENS // 16)
                continue
            if len(part) == 1:
                part[0].pending.fail(error_outcome(error))
                continue
            logger.warning("%d sequences failed together (%s); trying halves", len(part), kind(error))
            if is_memory(error) and len(part) == len(jobs):
                self._batch_tokens = max(self._batch_tokens // 2, min(self._max_batch_tokens, MIN_BATCH_TOKENS))
            half = len(part) // 2
            parts += [part[half:], part[:half]]

    def _compute(self, jobs: list[Job]) -> Exception | None:
        """Give each input its outputs, or its group an error if they are not finite.

        Returns:
            What the model raised.

        Raises:
            Exception: The device is lost.
        """
        for job in jobs:
            job.pending.begin()
        try:
            outputs = _to_host(self._forward([job.input for job in jobs]))
        except Exception as error:
            if is_fatal(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the model's tensors
            return error
        for job, output in zip(jobs, outputs, strict=True):
            if np.isfinite(output).all():
                job.pending.give(job.index, output)
            else:
                job.pending.fail(_not_finite(job))
        return None


def _not_finite(job: Job) -> HfTritonError:
    logger.error("the model's outputs are not finite for a sequence of %d tokens", len(job.input.ids))
    return GenerationError(
        "not_finite",
        f"the model's outputs for text {job.index} are NaN or infinite: its weights are broken, or its numbers are too "
        "large for 16 bits, which the setting dtype float32 mends",
    )


def _to_host(outputs: list[torch.Tensor]) -> list[npt.NDArray[np.float32]]:
    """Copy outputs to the CPU at once: each copy waits for the device."""
    if len(outputs) == 1:
        return [outputs[0].cpu().numpy()]
    flat = torch.cat([output.reshape(-1) for output in outputs]).cpu().numpy()
    ends = np.cumsum([output.numel() for output in outputs])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(tuple(output.shape)) for part, output in zip(parts, outputs, strict=True)]
