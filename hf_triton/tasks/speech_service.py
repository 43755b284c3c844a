# SPDX-License-Identifier: Apache-2.0
"""Serves speech recognition: a request's audio becomes samples, and the model's transcripts become a response.

Knows no Triton: requests and responses are `InferenceRequest`s.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from hf_triton.engine.speech_params import SpeechGroup, SpeechListener, Transcript
from hf_triton.errors import (
    CheckpointError,
    HfTritonError,
    RequestError,
    ShuttingDownError,
    as_own_error,
    panics_as_errors,
)
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.request_values import in_row
from hf_triton.protocol.task_declaration import AUDIO
from hf_triton.protocol.task_requests import TaskRequest, encode_results, outputs_to_fill, read_task_request
from hf_triton.protocol.tensors import Array
from hf_triton.sentence import param
from hf_triton.tasks.audio import Samples, read_audio
from hf_triton.tasks.automatic_speech_recognition import SpeechOptions, SpeechRecognition
from hf_triton.tasks.engine_service import EngineService
from hf_triton.tasks.interface import ResponseConfig, model_info
from hf_triton.tasks.serving.admission import request_limits
from hf_triton.tasks.serving.meter import Meter
from hf_triton.tasks.serving.request import InferenceRequest
from hf_triton.tasks.tokenizer_answers import TokenizerAnswers

if TYPE_CHECKING:
    from hf_triton.engine.speech_engine import SpeechEngine
    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings

logger = logging.getLogger(__name__)

NUM_THREADS: Final = 2  # each holds a whole audio
MIN_AUDIO_BYTES: Final = 64 << 20
"""Of a file, unless the folder says otherwise: half an hour of WAV at 16 kHz, and a day of OGG."""
BYTES_PER_PROMPT: Final = 1 << 20
SECONDS_PER_PROMPT: Final = 10
"""As how many waiting prompts audio counts, by its file and then by its samples: a megabyte for each, or less."""


class SpeechService(EngineService["_Response"]):
    """Answers requests with transcripts; see `RequestService`.

    Args:
        task: What is asked of the model, and what its tokens say.
        engine: Runs the model. It is closed with this service.
        limits: What one request may hold.
        max_seconds: Of one audio.
        max_waiting: Prompts that may wait; see `AdmissionGate`.
        meter: Counts tokens and times.
        info: What the model is.
    """

    _engine: SpeechEngine

    def __init__(
        self,
        task: SpeechRecognition,
        engine: SpeechEngine,
        limits: Limits,
        *,
        max_seconds: float,
        max_waiting: int,
        meter: Meter,
        info: ModelInfo | None = None,
    ) -> None:
        super().__init__(engine, limits, max_waiting=max_waiting, num_threads=NUM_THREADS, info=info)
        self._task = task
        self._max_seconds = max_seconds
        self._meter = meter
        self._answers = ThreadPoolExecutor(1, thread_name_prefix="hf_triton-answer")  # reading may take minutes
        self._pools.append(self._answers)

    def submit(self, request: InferenceRequest, config: ResponseConfig) -> None:
        """Check a request and start it, see `RequestService`."""
        declaration = self._task.declaration
        checked = read_task_request(declaration, SpeechOptions, request.inputs(), request.parameters, self._limits)
        if config.is_batching:
            checked = dataclasses.replace(checked, shape=(len(checked.rows), 1))
        names = outputs_to_fill(declaration, config.named_outputs(request), config.output_names)
        response = _Response(request, self._task, checked, names, self._meter, self._answers)
        num_prompts = sum(1 + len(row[AUDIO]) // BYTES_PER_PROMPT for row in response.files)
        self._begin(response, num_prompts, request.deadline_s(), is_quick=False)

    def _prepare(self, response: _Response) -> None:
        """Read a request's audio and queue it."""
        try:
            with panics_as_errors():
                groups = response.read(self._max_seconds)
            self._engine.submit(groups)
        except Exception as error:
            response.refuse(as_own_error("preparing the request", error))
        finally:
            self._leave(response)


class _Response(SpeechListener):
    """One request from its audio to its final response.

    Args:
        request: Gets the response.
        task: Says what is asked of the model, and what its tokens say.
        checked: The files and options.
        names: The outputs to fill.
        meter: Counts tokens and times.
        pool: Makes the response.
    """

    def __init__(
        self,
        request: InferenceRequest,
        task: SpeechRecognition,
        checked: TaskRequest[SpeechOptions],
        names: Sequence[str],
        meter: Meter,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.request = request
        self.files: list[Any] = list(checked.rows)
        self._task = task
        self._options = checked.options
        self._shape = checked.shape
        self._names = names
        self._meter = meter
        self._pool = pool
        self._durations_s: list[float] = []
        self._transcripts: dict[int, Transcript] = {}
        self._has_begun = False
        self._ended = threading.Event()

    def is_cancelled(self) -> bool:
        """Whether the request is cancelled or refused."""
        return self._ended.is_set() or self.request.is_cancelled()

    def read(self, max_seconds: float) -> list[SpeechGroup]:
        """The samples of each audio as a group.

        Raises:
            HfTritonError: An audio is refused, or the request has ended meanwhile.
        """
        params, language_id = self._task.params(self._options)
        groups: list[SpeechGroup] = []
        deadline_s = self.request.deadline_s()
        for row, file in enumerate(self.files):
            samples = self._read(row, file[AUDIO], max_seconds)
            self._durations_s.append(len(samples) / self._task.extractor.sampling_rate)
            group = SpeechGroup(samples, params, language_id, listener=self, row=row, deadline_s=deadline_s)
            group.num_waiting = 1 + int(self._durations_s[-1] / SECONDS_PER_PROMPT)
            groups.append(group)
        self.files.clear()
        self._meter.on_encoded(sum(self._nums_tokens))
        return groups

    def _read(self, row: int, data: bytes, max_seconds: float) -> Samples:
        try:
            return read_audio(data, self._task.extractor.sampling_rate, max_seconds, param(AUDIO), self._check)
        except RequestError as error:
            if len(self.files) == 1:
                raise
            raise in_row(error, row) from None

    def _check(self) -> None:
        """Check that the response is still wanted.

        Raises:
            RequestError: The request was cancelled or has expired, or the model is being unloaded.
        """
        error = self.request.ending()
        if error or self._ended.is_set():
            raise error or ShuttingDownError()

    @property
    def _nums_tokens(self) -> list[int]:
        """Positions of the encoder that each audio takes, in whole windows."""
        return [-int(-duration_s // self._task.window_s) * self._task.num_positions for duration_s in self._durations_s]

    def on_begin(self) -> None:
        """Note how long the request has waited."""
        if not self._has_begun:
            self._has_begun = True
            self._meter.on_begin(self.request.times)

    def on_finish(self, row: int, outcome: Transcript | HfTritonError) -> None:
        """Answer the request with its last transcript, in a thread of the pool, or refuse it."""
        if isinstance(outcome, HfTritonError):
            self.refuse(outcome)
            return
        self._transcripts[row] = outcome
        if len(self._transcripts) == len(self._durations_s):
            try:
                self._pool.submit(self._answer)
            except RuntimeError as error:  # the pool is shut down, or no thread is available
                self.refuse(as_own_error("preparing the request", error))

    def _answer(self) -> None:
        """Make the results and send the final response."""
        try:
            with panics_as_errors():
                self.request.answer(self._outputs())
            self.request.on_ending(None)
        except Exception as error:
            self.refuse(as_own_error("answering the request", error))

    def _outputs(self) -> dict[str, Array]:
        results = [
            self._task.decode(self._transcripts[row], duration_s, self._options)
            for row, duration_s in enumerate(self._durations_s)
        ]
        return encode_results(results, self._nums_tokens, self._task.declaration, self._shape, self._names)

    def refuse(self, error: HfTritonError) -> None:
        """End the request with an error, unless it has ended."""
        self._ended.set()
        self.request.on_ending(None)
        self.request.refuse(error)


def build_speech_service(
    task: SpeechRecognition,
    checkpoint: Checkpoint,
    settings: ModelSettings,
    *,
    on_fatal: Callable[[], None],
    meter: Meter,
) -> SpeechService:
    """The service of a loaded checkpoint, its engine running. Arguments as `Task.start` has them."""
    from hf_triton.engine.speech_engine import SpeechEngine
    from hf_triton.runner.dtypes import leave_slow_dtype

    model = checkpoint.model
    if settings.dtype == "auto":
        leave_slow_dtype(model)
    _try_window(task, checkpoint)
    info = dataclasses.replace(
        model_info(checkpoint, settings, task=task.declaration.name, engine=settings.runtime),
        context_length=task.max_targets,
    )
    limits = request_limits(settings, 0, MIN_AUDIO_BYTES)
    service = SpeechService(
        task,
        SpeechEngine(model, task.extractor, max_rows=settings.max_num_seqs, on_fatal=on_fatal),
        limits,
        max_seconds=task.max_seconds(settings),
        max_waiting=settings.max_waiting_prompts,
        meter=meter,
        info=info,
    )
    service.tokenizer = TokenizerAnswers(checkpoint, task.max_targets, limits)
    return service


def _try_window(task: SpeechRecognition, checkpoint: Checkpoint) -> None:
    """Give the encoder a silent window, as the checkpoint's feature extractor makes it.

    Raises:
        CheckpointError: They do not fit, or what comes is NaN.
    """
    import numpy as np
    import torch

    model, extractor = checkpoint.model, task.extractor
    config = model.config
    try:
        silence = np.zeros(int(extractor.n_samples), np.float32)
        features = extractor(silence, sampling_rate=extractor.sampling_rate, return_tensors="pt")["input_features"]
        with torch.inference_mode():
            states = model.get_encoder()(features.to(model.device, model.dtype))[0]
    except Exception as error:  # shapes of a config, which transformers does not check
        raise CheckpointError(
            "checkpoint_invalid",
            f"the model cannot read what preprocessor_config.json makes of sound ({extractor.feature_size} mel bins in "
            f"{extractor.n_samples / extractor.sampling_rate:g} s, and its config.json has num_mel_bins "
            f"{config.num_mel_bins} and max_source_positions {config.max_source_positions}): take the "
            "preprocessor_config.json of the model that this one was trained from",
        ) from error
    if not bool(states.isfinite().all()):
        raise CheckpointError(
            "checkpoint_invalid", f"the encoder makes NaN or infinite numbers of silence in {model.dtype}: set dtype"
        )
