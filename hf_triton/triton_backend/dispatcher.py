# SPDX-License-Identifier: Apache-2.0
"""Requests from Triton to a folder's service: each that arrives gets exactly one final response."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from hf_triton.errors import ERROR_FORM, ERROR_FORM_VERSION, HfTritonError, RequestError, as_own_error, where
from hf_triton.protocol.model_info import MODEL_INFO
from hf_triton.protocol.names import JSON_OUTPUT, TEXT_OUTPUTS
from hf_triton.protocol.prompts import prompt_shape
from hf_triton.protocol.requests import check_parameter_names, is_cancel_request
from hf_triton.protocol.sleep import SLEEP, SleepAnswer
from hf_triton.protocol.tensor_values import encode_strings
from hf_triton.protocol.tokenizer_request import TOKENIZER_REQUEST
from hf_triton.sentence import param
from hf_triton.tasks.interface import RequestService, ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.meter import Meter
from hf_triton.tasks.serving.tracing import RequestTracer
from hf_triton.tasks.tokenizer_answers import TokenizerAnswers
from hf_triton.triton_backend.cancellation import RequestPoller
from hf_triton.triton_backend.forwarded_headers import ForwardedHeaders
from hf_triton.triton_backend.triton_request import TritonRequest

logger = logging.getLogger(__name__)


class Dispatcher:
    """Hands a folder's requests to its service, and answers those that are no work for an engine.

    Args:
        cancel_elsewhere: Cancels the requests of an id in the server's other processes; may take seconds.
        sleep_elsewhere: Has the model's other processes sleep or wake; may take seconds.
        closing: Closes what serves the folder; `close` does so.
        headers: The headers that the server adds to requests' parameters; None: it adds none.
    """

    def __init__(
        self,
        service: RequestService,
        config: ResponseConfig,
        *,
        poller: RequestPoller,
        meter: Meter,
        cancel_elsewhere: Callable[[str], None],
        closing: ExitStack,
        sleep_elsewhere: Callable[[bool], None] = lambda _: None,
        headers: ForwardedHeaders | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.service = service
        self.closing = closing
        self._config = config
        self._poller = poller
        self._meter = meter
        self._cancel_elsewhere = cancel_elsewhere
        self._sleep_elsewhere = sleep_elsewhere
        self._headers = headers
        self._tracer = tracer
        self._others_pool = ThreadPoolExecutor(1, thread_name_prefix="hf_triton-others")
        self._tokenizer_pool = ThreadPoolExecutor(1, thread_name_prefix="hf_triton-tokenizer")

    def execute(self, requests: list[Any]) -> None:
        """Start Triton's requests and return at once. Raises nothing.

        An exception would show file paths to the client, and could crash the server.
        """
        for triton_request in requests:
            request = TritonRequest(triton_request, self._poller, self._meter.begin_request(), self._headers)
            self.take(request, self._config)
            request.release_inputs()

    def take(self, request: InferenceRequest, config: ResponseConfig) -> None:
        """Start a request, from Triton or from a stream door, or refuse it. Raises nothing."""
        try:
            parameters = request.parameters
            request.wants_error_data = parameters.get(ERROR_FORM) == ERROR_FORM_VERSION
            if is_cancel_request(parameters):
                self._cancel(request, parameters)
            elif parameters.get(MODEL_INFO) is True and self.service.info is not None:
                request.is_counted = False
                shape = self._json_shape(request, MODEL_INFO)
                info = dataclasses.replace(self.service.info, is_sleeping=self.service.is_sleeping())
                request.answer({JSON_OUTPUT: encode_strings([info.to_json()], shape)})
            elif isinstance(parameters.get(SLEEP), bool) and self.service.info is not None:
                request.is_counted = False
                shape = self._json_shape(request, SLEEP)
                is_sleeping = parameters[SLEEP] is True
                turn = partial(self._set_sleeping, request, shape, is_sleeping)
                self._others_pool.submit(self._tell_others, partial(self._sleep_elsewhere, is_sleeping), turn)
            elif TOKENIZER_REQUEST in parameters:
                request.is_counted = False
                if self.service.tokenizer is None:
                    raise RequestError("invalid_parameter", "this model has no tokenizer to ask")
                shape = self._json_shape(request, TOKENIZER_REQUEST)
                self._tokenizer_pool.submit(self._answer_tokens, self.service.tokenizer, request, parameters, shape)
            else:
                if self._tracer is not None:
                    self._tracer.begin(request, parameters)
                self.service.submit(request, config)
        except HfTritonError as error:
            request.refuse(error)
        except Exception as error:
            logger.error("starting a request failed: %s", where(error))
            request.refuse(HfTritonError("internal", "the request could not be started; the server's log says why"))

    def close(self) -> None:
        """Answer every request, then stop. Triton calls this when no request is in flight."""
        with self.closing:  # whatever fails, the rest is closed
            self._others_pool.shutdown(wait=True)
            self._tokenizer_pool.shutdown(wait=True)

    def _cancel(self, request: InferenceRequest, parameters: Mapping[str, object]) -> None:
        """Cancel the requests with this request's id, in all processes, and answer it with empty strings."""
        check_parameter_names(parameters)
        if not request.request_id:
            raise RequestError(
                "invalid_parameter", f"{param('cancel')} true cancels the requests of the same id: add the id"
            )
        shape = prompt_shape(request.inputs())  # a folder with max_batch_size gets no request without an input
        empty = encode_strings([""] * math.prod(shape), shape)
        self._poller.cancel(request.request_id)
        answer = partial(request.answer, {name: empty for name in self._config.output_names if name in TEXT_OUTPUTS})
        self._others_pool.submit(self._tell_others, partial(self._cancel_elsewhere, request.request_id), answer)

    def _set_sleeping(self, request: InferenceRequest, shape: tuple[int, ...], is_sleeping: bool) -> None:
        done = self.service.set_sleeping(is_sleeping)

        def end(error: HfTritonError) -> None:
            """Withdraw what nobody waits for any more."""
            request.refuse(error)
            done.cancel()

        request.on_ending(end, request.deadline_s())
        done.add_done_callback(partial(_answer_sleep, request, shape))

    def _answer_tokens(
        self,
        tokenizer: TokenizerAnswers,
        request: InferenceRequest,
        parameters: Mapping[str, object],
        shape: tuple[int, ...],
    ) -> None:
        """Answer what is asked of the tokenizer, or refuse it. Raises nothing."""
        try:
            answer = tokenizer.answer(parameters[TOKENIZER_REQUEST])
            request.answer({JSON_OUTPUT: encode_strings([answer], shape)})
        except Exception as error:
            request.refuse(as_own_error("asking the tokenizer", error))

    def _json_shape(self, request: InferenceRequest, name: str) -> tuple[int, ...]:
        """The shape of an answer to a parameter's question: of one element, with the rank of the request's tensors."""
        if JSON_OUTPUT not in self._config.output_names:
            raise RequestError(
                "invalid_parameter", f"{param(name)} fills the output {JSON_OUTPUT}: declare it in config.pbtxt"
            )
        return (1,) * max((array.ndim for array in request.inputs().values()), default=1)

    def _tell_others(self, tell: Callable[[], None], answer: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:
            logger.error("another process of the model was not told: %s", where(error))
        answer()


def _answer_sleep(request: InferenceRequest, shape: tuple[int, ...], done: Future[SleepAnswer]) -> None:
    """Answer a request that has a model sleep or wake, or refuse it. Raises nothing."""
    request.on_ending(None)
    if done.cancelled():
        return
    try:
        request.answer({JSON_OUTPUT: encode_strings([done.result().to_json()], shape)})
    except Exception as error:
        request.refuse(as_own_error("having the model sleep or wake", error))
