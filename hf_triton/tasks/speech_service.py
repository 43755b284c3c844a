# SPDX-License-Identifier: Apache-2.0
"""Serves speech recognition: a request's audio becomes samples, and the model's transcripts become a response.

Knows no Triton: requests and responses are `InferenceRequest`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from hf_triton.engine.speech_params import SpeechGroup, Transcript
from hf_triton.errors import CheckpointError, RequestError, as_own_error, panics_as_errors
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.request_values import in_row
from hf_triton.protocol.task_declaration import AUDIO
from hf_triton.protocol.task_requests import Row, TaskRequest, encode_results, outputs_to_fill, read_task_request
from hf_triton.protocol.tensor_values import Array
from hf_triton.sentence import param
from hf_triton.tasks.audio import read_audio
from hf_triton.tasks.automatic_speech_recognition import SpeechOptions, SpeechRecognition
from hf_triton.tasks.engine_service import EngineService
from hf_triton.tasks.interface import ResponseConfig, model_info
from hf_triton.tasks.serving.admission import request_limits
from hf_triton.tasks.serving.answer import Answer
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.meter import Meter
from hf_triton.tasks.tokenizer_answers import TokenizerAnswers

if TYPE_CHECKING:
    from hf_triton.engine.speech_engine import SpeechEngine
    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings

NUM_THREADS: Final = 2  # each holds a whole audio
MIN_AUDIO_BYTES: Final = 64 << 20
"""The largest file, unless the folder says otherwise: half an hour of WAV at 16 kHz, and a day of OGG."""
BYTES_PER_PROMPT: Final = 1 << 20
SECONDS_PER_PROMPT: Final = 10
"""Audio counts as waiting prompts by the size of its file, then by its length: a megabyte for each, or less."""


class SpeechService(EngineService):
    """Answers requests with transcripts.

    Args:
        engine: Runs the model. It is closed with this service.
        max_seconds: The longest audio that is accepted.
        max_waiting: Prompts that may wait; see `AdmissionGate`.
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
        declaration = self._task.declaration
        checked = read_task_request(declaration, SpeechOptions, request.inputs(), request.parameters, self._limits)
        if config.is_batching:
            checked = dataclasses.replace(checked, shape=(len(checked.rows), 1))
        names = outputs_to_fill(declaration, config.named_outputs(request), config.output_names)
        answer = Answer(request, self._answers, self._meter)
        self._begin(
            answer,
            partial(self._prepare, answer, checked, names),
            num_prompts=sum(1 + len(row[AUDIO]) // BYTES_PER_PROMPT for row in cast(Sequence[Row], checked.rows)),
            deadline_s=request.deadline_s(),
            is_quick=False,
        )

    def _prepare(self, answer: Answer, checked: TaskRequest[SpeechOptions], names: Sequence[str]) -> None:
        """Read a request's audio and queue it."""
        try:
            with panics_as_errors():
                groups = self._read(answer, checked)
            durations_s = [len(group.samples) / self._task.extractor.sampling_rate for group in groups]
            self._meter.on_encoded(sum(map(self._num_tokens, durations_s)))
            answer.expect(len(groups), partial(self._make_outputs, durations_s, checked.options, checked.shape, names))
            self._engine.submit(groups)
        except Exception as error:
            answer.refuse(as_own_error("preparing the request", error))
        finally:
            self._leave(answer)

    def _read(self, answer: Answer, checked: TaskRequest[SpeechOptions]) -> list[SpeechGroup]:
        """The samples of each audio as a group; raises HfTritonError if one is refused, or the request has ended."""
        params, language_id = self._task.params(checked.options)
        rate, deadline_s = self._task.extractor.sampling_rate, answer.request.deadline_s()
        groups: list[SpeechGroup] = []
        for row, file in enumerate(cast(Sequence[Row], checked.rows)):
            try:
                samples = read_audio(file[AUDIO], rate, self._max_seconds, param(AUDIO), answer.check_wanted)
            except RequestError as error:
                if len(checked.rows) == 1:
                    raise
                raise in_row(error, row) from None
            group = SpeechGroup(samples, params, language_id, listener=answer, row=row, deadline_s=deadline_s)
            group.num_waiting = 1 + int(len(samples) / rate / SECONDS_PER_PROMPT)
            groups.append(group)
        return groups

    def _num_tokens(self, duration_s: float) -> int:
        """Positions of the encoder that an audio takes, in whole windows."""
        return -int(-duration_s // self._task.window_s) * self._task.num_positions

    def _make_outputs(
        self,
        durations_s: list[float],
        options: SpeechOptions,
        shape: tuple[int, ...],
        names: Sequence[str],
        transcripts: list[Transcript],
    ) -> dict[str, Array]:
        results = [
            self._task.decode(transcript, duration_s, options)
            for transcript, duration_s in zip(transcripts, durations_s, strict=True)
        ]
        return encode_results(results, [*map(self._num_tokens, durations_s)], self._task.declaration, shape, names)


def build_speech_service(
    task_class: type[SpeechRecognition],
    checkpoint: Checkpoint,
    settings: ModelSettings,
    *,
    on_fatal: Callable[[], None],
    meter: Meter,
) -> SpeechService:
    """The service of a loaded checkpoint, its engine running. Arguments and errors as in `build_encoder_service`."""
    from hf_triton.engine.speech_engine import SpeechEngine
    from hf_triton.runner.dtypes import leave_slow_dtype

    task, model = task_class(checkpoint, settings), checkpoint.model
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
