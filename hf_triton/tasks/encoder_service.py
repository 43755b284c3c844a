# SPDX-License-Identifier: Apache-2.0
"""Serves the task of an encoder: a request's rows become token sequences, and the model's outputs become a response.

Knows no Triton: requests and responses are `InferenceRequest`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hf_triton.encoder.jobs import EncoderGroup, Outputs
from hf_triton.engine.protocols import EngineLoad, Nap
from hf_triton.errors import RequestError, as_own_error, clip, panics_as_errors
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.request_values import in_row
from hf_triton.protocol.task_declaration import JSON_OUTPUT
from hf_triton.protocol.task_requests import Row, TaskRequest, encode_results, outputs_to_fill
from hf_triton.protocol.tensor_values import Array
from hf_triton.protocol.token_rows import TokenRow
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.engine_service import EngineService
from hf_triton.tasks.image_task import ImageTask
from hf_triton.tasks.interface import ResponseConfig, model_info
from hf_triton.tasks.serving.adapters import AdapterStore
from hf_triton.tasks.serving.admission import MIN_ENCODER_BYTES, MIN_FILE_BYTES, request_limits
from hf_triton.tasks.serving.answer import Answer
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.meter import Meter
from hf_triton.tasks.tokenizer_answers import TokenizerAnswers

if TYPE_CHECKING:
    from hf_triton.encoder.engine import EncoderEngine
    from hf_triton.encoder.forward import EncoderForward
    from hf_triton.encoder.probe import Way
    from hf_triton.encoder.stacked import StackedForward
    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.hub.locate import Hub
    from hf_triton.runner.lora.model_adapters import Adapter
    from hf_triton.settings import ModelSettings

NUM_THREADS: Final = 4  # tokenizers run outside the interpreter's lock
MAX_INLINE_CHARACTERS: Final = 1000  # of a row that is tokenized in the caller's thread: less than a thread costs


class EncoderService(EngineService):
    """Answers requests by the task of an encoder.

    Args:
        engine: Runs the forward passes. It is closed with this service.
        max_waiting: Rows that may wait; see `AdmissionGate`.
        adapters: Its LoRA adapters; None: it takes none.
    """

    _engine: EncoderEngine | NoEngine

    def __init__(
        self,
        task: EncoderTask[Any],
        engine: EncoderEngine | NoEngine,
        limits: Limits,
        *,
        max_waiting: int,
        meter: Meter,
        info: ModelInfo | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        super().__init__(engine, limits, max_waiting=max_waiting, num_threads=NUM_THREADS, info=info, adapters=adapters)
        self._task = task
        self._meter = meter

    def submit(self, request: InferenceRequest, config: ResponseConfig) -> None:
        checked = self._task.read(request.inputs(), request.parameters, self._limits)
        if config.is_batching:
            checked = dataclasses.replace(checked, shape=(len(checked.rows), 1))
        declaration, named = self._task.declaration, config.named_outputs(request)
        names = outputs_to_fill(declaration, named, config.output_names, checked.default_outputs)
        if (*names,) == checked.default_outputs == (JSON_OUTPUT,) and len(checked.shape) == 1:
            checked = dataclasses.replace(checked, shape=(*checked.shape, 1))  # MLServer's
        answer, lora_name = Answer(request, self._pool, self._meter), checked.options.lora_name
        self._begin(
            answer,
            partial(self._prepare, answer, checked, names),
            num_prompts=len(checked.rows),
            deadline_s=request.deadline_s(),
            is_quick=len(checked.rows) == 1 and _takes_no_time(checked.rows[0]),
            adapters=[lora_name] if lora_name else [],
        )

    def _prepare(self, answer: Answer, checked: TaskRequest[Any], names: Sequence[str]) -> None:
        """Make token sequences of a request's rows and queue them."""
        request = answer.request
        try:
            adapter = self._find_adapter(checked.options.lora_name)
            request.adapter = "" if adapter is None else adapter.name
            with panics_as_errors():
                rows = list(self._encode(answer, checked))
            self._meter.on_encoded(sum(map(_num_tokens, rows)), request.adapter)
            inputs = [item for row in rows for item in row.inputs]
            if adapter is not None:
                inputs = [dataclasses.replace(item, adapter=adapter) for item in inputs]
            answer.expect(1, partial(self._make_outputs, rows, checked.options, checked.shape, names))
            deadline_s = request.deadline_s()
            request.on_ending(None)  # the queue decides from here on
            self._engine.submit([EncoderGroup(inputs, listener=answer, deadline_s=deadline_s)])
        except Exception as error:
            answer.refuse(as_own_error("preparing the request", error))
        finally:
            self._leave(answer)

    def _encode(self, answer: Answer, checked: TaskRequest[Any]) -> Iterator[EncodedRow]:
        for number, row in enumerate(checked.rows):
            answer.check_wanted()
            try:
                yield self._task.encode_row(row, checked.options)
            except RequestError as error:
                if len(checked.rows) == 1:
                    raise
                raise in_row(error, number) from None

    def _make_outputs(
        self,
        rows: list[EncodedRow],
        options: Any,
        shape: tuple[int, ...],
        names: Sequence[str],
        outcomes: list[Outputs],
    ) -> dict[str, Array]:
        arrays = iter(outcomes[0])  # those of a row side by side
        results = [self._task.decode(row, options, list(islice(arrays, len(row.inputs)))) for row in rows]
        return encode_results(results, [*map(_num_tokens, rows)], self._task.declaration, shape, names)

    def _find_adapter(self, name: str | None) -> Adapter | None:
        """The adapter that a request names; raises RequestError if there is none, or it cannot be used."""
        if not name:
            return None
        if self._adapters is None:
            sentence = f"there is no adapter {clip(name)}: this model takes none"
            raise RequestError("adapter_not_found", sentence, field="lora_name")
        return self._adapters.get(name)


class NoEngine:
    """Gives each input an empty array, for a task that needs token sequences alone."""

    slower: Final = ()
    is_sleeping = False

    def set_sleeping(self, is_sleeping: bool) -> Future[Nap]:
        """Sleep until work comes: there is no memory to give back, but a gateway is to count it as asleep."""
        self.is_sleeping = is_sleeping
        done: Future[Nap] = Future()
        done.set_result(Nap(is_sleeping))
        return done

    def submit(self, groups: list[EncoderGroup]) -> None:
        self.is_sleeping = False
        for group in groups:
            group.begin()
            group.finish([np.empty(0, np.float32) for _ in group.inputs])

    def load(self) -> EngineLoad:
        return EngineLoad()

    def is_healthy(self) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to end."""


def _takes_no_time(row: Row | TokenRow) -> bool:
    """Whether a row is tokens or a short text; a small file may hold a large image."""
    if isinstance(row, TokenRow):
        return True
    is_text = all(isinstance(text, str) for text in row.values())
    return is_text and sum(map(len, row.values())) <= MAX_INLINE_CHARACTERS


def _num_tokens(row: EncodedRow) -> int:
    return sum(item.num_tokens for item in row.inputs)


def build_encoder_service(
    task_class: type[EncoderTask[Any]],
    checkpoint: Checkpoint,
    settings: ModelSettings,
    *,
    on_fatal: Callable[[], None],
    meter: Meter,
    hub: Hub | None = None,
) -> EncoderService:
    """The running service of a loaded checkpoint; raises LoadError if the checkpoint does not fit the task."""
    task = task_class(checkpoint, settings)
    reads_files = any(text.is_file for text in task.declaration.texts)
    limits = request_limits(settings, task.max_length, MIN_FILE_BYTES if reads_files else MIN_ENCODER_BYTES)
    engine: EncoderEngine | NoEngine = NoEngine()
    store = None
    if settings.has_weights:
        engine = build_task_engine(task, checkpoint, settings, takes_adapters=hub is not None, on_fatal=on_fatal)
        if hub is not None and engine.adapters is not None:
            store = AdapterStore(engine.adapters, settings.adapters, hub.model_folder, hub.resolve_adapter)
    info = dataclasses.replace(
        model_info(checkpoint, settings, task=task.declaration.name, engine=settings.runtime),
        context_length=task.max_length,
        inputs=task.declaration.given_texts,
        mask_token=task.mask_token,
        slower=tuple(engine.slower),
    )
    service = EncoderService(
        task, engine, limits, max_waiting=settings.max_waiting_prompts, meter=meter, info=info, adapters=store
    )
    if task.tokenizer is not None:
        service.tokenizer = TokenizerAnswers(checkpoint, task.max_length, limits)
    return service


def build_task_engine(
    task: EncoderTask[Any],
    checkpoint: Checkpoint,
    settings: ModelSettings,
    *,
    way: Way | None = None,
    takes_adapters: bool = False,
    on_fatal: Callable[[], None] = lambda: None,
) -> EncoderEngine:
    """The engine for a task, running; `way` and `takes_adapters` as in `build_forward`, the others as above."""
    from hf_triton.encoder.engine import EncoderEngine
    from hf_triton.encoder.forward import build_forward
    from hf_triton.encoder.stacked import build_stacked_forward
    from hf_triton.runner.dtypes import leave_slow_dtype

    model = checkpoint.model
    if settings.dtype == "auto":
        leave_slow_dtype(model)
    forward: EncoderForward | StackedForward
    if isinstance(task, ImageTask):
        forward = build_stacked_forward(model, task.compute, task.examples(), pack_weights=settings.pack_weights)
    else:
        forward = build_forward(
            model,
            task.model_outputs,
            per_token=task.per_token,
            reduce=task.reduce,
            merge=task.merge,
            takes_adapters=takes_adapters,
            pack_weights=settings.pack_weights,
            way=way,
            decoding=settings.decoding,
        )
    return EncoderEngine(forward, max_batch_tokens=settings.max_batch_tokens, on_fatal=on_fatal)
