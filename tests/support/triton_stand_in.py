# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Triton's module, which raises on calls that kill the real server."""

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from hf_triton import triton_backend

FINAL = 1
MODULES = ("triton_request", "process", "config_pbtxt", "metrics_sink", "dispatcher")  # modules that import Triton's


class Sender:
    """Records responses. Triton's own sender kills the server if it is used after the final response."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.sent: list[Any] = []
        self.was_cancelled = False
        self.is_broken = False
        self.num_asked = 0

    def send(self, response: Any, flags: int = 0) -> None:
        assert not self.sent, "sent after the final answer"
        assert flags in (0, FINAL)
        (self.sent if flags == FINAL else self.parts).append(response)

    def is_cancelled(self) -> bool:
        assert not self.sent, "SIGSEGV: asked after the final answer"
        self.num_asked += 1
        if self.is_broken:
            raise RuntimeError
        return self.was_cancelled


class Request:
    def __init__(self, request_id: str = "", requested_outputs: Sequence[str] = ("text_output",)) -> None:
        self.sender = Sender()
        self.timeout_us = 0
        self._requested_outputs = requested_outputs
        self._id = request_id

    def request_id(self) -> str:
        return self._id

    def requested_output_names(self) -> Sequence[str]:
        return self._requested_outputs

    def timeout(self) -> int:
        return self.timeout_us

    def get_response_sender(self) -> Sender:
        return self.sender


class Error:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = range(4)

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class Response:
    """A response as from Triton 25.02 on, which takes what that takes (python_backend's src/pb_stub.cc)."""

    def __init__(
        self, output_tensors: Sequence[Any] = (), error: Error | None = None, parameters: object = None
    ) -> None:
        if not isinstance(parameters, dict | None):
            raise RuntimeError(f"Expect dict, got {type(parameters)}")
        for name, value in (parameters or {}).items():
            if not isinstance(name, str):
                raise RuntimeError(f"Expect parameters keys to have type str, found type {type(name)}")
            if not isinstance(value, bool | int | str):
                raise RuntimeError(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        self.tensors, self.error = dict(output_tensors), error
        self._parameters = json.dumps(parameters or {})

    def parameters(self) -> str:
        return self._parameters


def response_before_25_02(output_tensors: Sequence[Any] = (), error: Error | None = None) -> Any:
    return error or output_tensors


@contextmanager
def stand_in(response: Callable[..., Any]) -> Iterator[types.ModuleType]:
    """`triton_backend.triton_request` on a module that stands in for Triton's, with this for its responses."""
    fake = types.SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        TritonError=Error,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=response,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", fake)
        for name in MODULES:
            patch.delitem(sys.modules, f"{triton_backend.__name__}.{name}", raising=False)
        yield importlib.import_module("hf_triton.triton_backend.triton_request")
        for name in MODULES:
            sys.modules.pop(f"{triton_backend.__name__}.{name}", None)
            vars(triton_backend).pop(name, None)
