# SPDX-License-Identifier: Apache-2.0
"""Messages between the two sides of a stream door, as values that JSON can hold.

The door sends `{"id": 1, "request": {...}}` and `{"id": 1, "cancel": true}`. The engine answers each request with any
number of `{"id": 1, "add": {...}}`, then one `{"id": 1, "answer": {...}, "parameters": {...}}` or
`{"id": 1, "refuse": [...]}`. `{"id": 0, "cancel_all": "abc"}` cancels all requests with the client's id abc; no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hf_triton.errors import CancelledError, HfTritonError, RequestError, UnavailableError, read_error_data
from hf_triton.protocol.tensor_values import Array as Array

Message = dict[str, Any]

TENSOR_DTYPES: Final = frozenset(
    ["object", "bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
ERRORS: Final = {error.triton_code: error for error in (HfTritonError, RequestError, UnavailableError)}


class ProtocolError(ValueError):
    """A malformed message from the other side; its content may be a prompt and must not be quoted."""


@dataclass(frozen=True)
class DoorRequest:
    """An unchecked request as the door got it from Triton, and how to answer it."""

    inputs: Mapping[str, Array]
    parameters: Mapping[str, object]
    request_id: str
    timeout_s: float | None
    """Remaining seconds."""
    output_names: list[str]
    """The outputs that the door's folder declares."""
    requested_outputs: list[str]
    streams: bool
    """Whether to stream if the request does not say."""


def pack_request(request: DoorRequest) -> Message:
    return vars(request) | {"inputs": pack_tensors(request.inputs)}


def read_request(value: object) -> DoorRequest:
    """Parse a request; raises ProtocolError if it is malformed."""
    match value:
        case {
            "inputs": dict() as inputs,
            "parameters": dict() as parameters,
            "request_id": str() as request_id,
            "timeout_s": float() | None as timeout_s,
            "output_names": list() as output_names,
            "requested_outputs": list() as requested,
            "streams": bool() as streams,
        } if all(isinstance(name, str) for name in (*output_names, *requested)):
            return DoorRequest(
                read_tensors(inputs), parameters, request_id, timeout_s, output_names, requested, streams
            )
    raise ProtocolError("malformed request")


def pack_tensors(tensors: Mapping[str, Array]) -> Message:
    """Tensors as JSON values: type, shape and elements. Bytes that are not UTF-8 pass unchanged."""
    return {name: [str(array.dtype), list(array.shape), _elements(array)] for name, array in tensors.items()}


def _elements(array: Array) -> list[Any]:
    flat: list[Any] = array.ravel().tolist()
    return [element.decode("utf-8", "surrogateescape") for element in flat] if array.dtype == object else flat


def read_tensors(value: object) -> dict[str, Array]:
    """Parse tensors; raises ProtocolError if they are malformed."""
    if not isinstance(value, dict):
        raise ProtocolError("malformed tensors")
    return {name: _read_tensor(entry) for name, entry in value.items()}


def _read_tensor(value: object) -> Array:
    match value:
        case [str() as dtype, list() as shape, list() as elements] if dtype in TENSOR_DTYPES:
            try:
                return _array(dtype, elements).reshape(shape)
            except (ValueError, TypeError, OverflowError, AttributeError):
                pass
    raise ProtocolError("malformed tensor")


def _array(dtype: str, elements: list[Any]) -> Array:
    if dtype != "object":
        return np.array(elements, dtype)
    array = np.empty(len(elements), np.object_)
    array[:] = [element.encode("utf-8", "surrogateescape") for element in elements]
    return array


def read_parameters(value: object) -> dict[str, int]:
    """Parse the parameters of a response; raises ProtocolError if they are malformed."""
    if not isinstance(value, dict) or any(type(entry) is not int for entry in value.values()):
        raise ProtocolError("malformed response parameters")
    return value


def pack_error(error: HfTritonError, sentence: str | None = None) -> list[str]:
    """An error as JSON values; `sentence` is what the client reads of it."""
    return [error.triton_code, error.code, error.sentence if sentence is None else sentence]


def read_error(value: object) -> HfTritonError:
    """Parse an error, with its code and sentence; raises ProtocolError if it is malformed."""
    match value:
        case [CancelledError.triton_code, str(), str()]:
            return CancelledError()
        case [str() as kind, str() as code, str() as sentence] if kind in ERRORS:
            open_sentence, field, sizes = read_error_data(sentence)
            return ERRORS[kind](code, open_sentence, field=field, sizes=sizes)
    raise ProtocolError("malformed error")
