# SPDX-License-Identifier: Apache-2.0
"""A Triton request and its response. Imported inside Triton's stub alone.

A request's sender must not be used twice: asking it whether the request was cancelled after its final response takes
the whole server down, and one that is never answered hangs its client and the server's exit. `TritonRequest` owns it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hf_triton.errors import HfTritonError, RequestError, UnavailableError, where
from hf_triton.protocol.otlp import wants_traces
from hf_triton.protocol.validation import reject_duplicates
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.metrics import OK
from hf_triton.triton_backend.cancellation import RequestPoller
from hf_triton.triton_backend.forwarded_headers import ForwardedHeaders
from hf_triton.triton_backend.shared_memory import room_for

logger = logging.getLogger(__name__)


class TritonRequest(InferenceRequest):
    """A request over Triton's sender. A decoupled folder may send several responses.

    Args:
        on_answer: Called once, with `ok` or the error's code, and the adapter.
        headers: The headers that the server adds to the parameters; None: it adds none.
    """

    def __init__(
        self,
        request: pb_utils.InferenceRequest,
        poller: RequestPoller,
        on_answer: Callable[[str, str], None] = lambda outcome, adapter: None,
        headers: ForwardedHeaders | None = None,
    ) -> None:
        timeout_us: int = request.timeout()  # of `/infer` and of the clients
        super().__init__(_request_id(request), timeout_us / 1e6 if timeout_us else None)
        self._on_answer = on_answer
        self._headers = headers
        self._sender = request.get_response_sender()
        self._request = request
        self._requested_outputs: list[str] = list(request.requested_output_names())
        poller.add(self)

    def release_inputs(self) -> None:
        """Return the request's tensors to the server's shared memory, after they have been read."""
        del self._request

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """The request's tensors by name; copies, which may outlive `execute`."""
        return {tensor.name(): np.array(tensor.as_numpy(), copy=True) for tensor in self._request.inputs()}

    @cached_property
    def parameters(self) -> Mapping[str, object]:
        """The request's parameters by name; scalars. Parsed once.

        Raises:
            RequestError: A name or a value is not UTF-8, or one is given twice, beside the prompt and in `parameters`.
        """
        try:
            parsed: dict[str, object] = json.loads(
                self._request.parameters() or "{}",
                object_pairs_hook=reject_duplicates if self._headers is None else self._headers.parameters,
            )
        except UnicodeDecodeError:
            raise RequestError(
                "invalid_parameter", "a parameter's or a forwarded header's name or value is not valid UTF-8"
            ) from None
        return parsed | (trace_context(self._request) if traces_requests() else {})

    def requested_outputs(self) -> list[str]:
        return self._requested_outputs

    def poll(self) -> bool:
        """Ask Triton whether the client cancelled. Returns whether to poll again."""
        with self._lock:
            # Asking takes a while, and `cancel` may be called meanwhile: it must not be undone.
            if not (self._is_answered or self._is_cancelled) and self._sender.is_cancelled():
                self._is_cancelled = True
        return super().poll()

    def add(self, outputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Send a response with more to follow. The folder must be decoupled.

        If it cannot be sent, an error is the final response: a stream with a gap would look complete.
        """
        with self._lock:
            if self._is_answered:
                return
            try:
                self._sender.send(self._response(outputs))
            except Exception as error:  # the shared memory is full
                logger.error("a response could not be sent: %s", where(error))
                self._is_cancelled = True
                self._finish(_out_of_shared_memory(), "out_of_memory")

    def answer(self, outputs: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, int] | None = None) -> None:
        """Send the final response; `parameters` are the response's own, see `takes_response_parameters`."""
        num_bytes = sum(_num_bytes(array) for name, array in outputs.items() if name in self._requested_outputs)
        self._send(self._response(outputs, parameters), OK, num_bytes)

    def refuse(self, error: HfTritonError) -> None:
        """Send an error as the final response."""
        code: int = getattr(pb_utils.TritonError, error.triton_code)
        sentence = self.error_sentence(error)
        message = f"{error.code}: {sentence}".encode(errors="replace").decode()  # a folder's own error may not be UTF-8
        self._send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(message, code)), error.code)

    def _response(
        self, outputs: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, int] | None = None
    ) -> pb_utils.InferenceResponse:
        """A response with the outputs that the client asked for, and no other.

        Triton's stub (24.10) drops the others without Python's lock, which on Python 3.12 ends the process.
        """
        tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items() if name in self._requested_outputs]
        if not parameters:
            return pb_utils.InferenceResponse(tensors)
        return pb_utils.InferenceResponse(tensors, parameters=dict(parameters))

    def _send(self, response: pb_utils.InferenceResponse, outcome: str, num_bytes: int = 0) -> None:
        with self._lock:
            if not self._is_answered:
                self._finish(response, outcome, num_bytes)

    def _finish(self, response: pb_utils.InferenceResponse, outcome: str, num_bytes: int = 0) -> None:
        """Send the final response; the lock is held. Raises nothing.

        It is one send, with the FINAL flag: Triton 24.10 dies of a flag by itself if the client of a response before it
        has cancelled over gRPC. A sender that fails takes no other one, so what may not fit is not tried.
        """
        self._is_answered = True
        with room_for(num_bytes) as fits:
            if not fits and num_bytes:
                response, outcome = _out_of_shared_memory(), "out_of_memory"
            try:
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as error:  # the shared memory was filled meanwhile
                logger.error("the final response could not be sent: %s", where(error))
                outcome = "out_of_memory"
        self._note_answer(outcome)

    def __del__(self) -> None:
        if not getattr(self, "_is_answered", True):
            self.refuse(HfTritonError("internal", "the request was dropped; the server's log may say why"))


def _request_id(request: pb_utils.InferenceRequest) -> str:
    try:
        return request.request_id()
    except UnicodeDecodeError:  # `parameters` contains it too, and refuses the request
        return ""


@cache
def traces_requests() -> bool:
    """Whether this process's environment asks for spans."""
    return wants_traces(os.environ)


def trace_context(request: pb_utils.InferenceRequest) -> dict[str, object]:
    """`traceparent` of Triton's own span, the parent of ours, if the server traces this request; Triton 24.10 says."""
    trace = getattr(request, "trace", None)  # older servers have none
    context = None if trace is None else trace().get_context()
    return dict(json.loads(context)) if context else {}


@cache
def takes_response_parameters() -> bool:
    """Whether responses may have parameters: from Triton 25.02 on."""
    try:
        pb_utils.InferenceResponse([], parameters={})
    except TypeError:
        return False
    return True


def _num_bytes(array: npt.NDArray[Any]) -> int:
    """Shared memory that an output takes."""
    return sum(4 + len(element) for element in array.flat) if array.dtype == np.object_ else array.nbytes


def _out_of_shared_memory() -> pb_utils.InferenceResponse:
    error = UnavailableError(
        "out_of_memory", "the answer does not fit the server's shared memory: ask for less, or raise --shm-size"
    )
    return pb_utils.InferenceResponse([], error=pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE))
