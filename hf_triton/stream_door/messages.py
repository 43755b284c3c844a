# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a stream door say to each other, as values that JSON can hold.

The door sends `{"id": 1, "request": {...}}` and `{"id": 1, "cancel": true}`. The engine answers each request with any
number of `{"id": 1, "add": {...}}`, then one `{"id": 1, "answer": {...}, "parameters": {...}}` or
`{"id": 1, "refuse": [...]}`. `{"id": 0, "cancel_all": "abc"}` gives up all requests that clients call abc; no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hf_triton.errors import CancelledError, HfTritonError, RequestError, UnavailableError

Array = npt.NDArray[Any]
Message = dict[str, Any]

DTYPES: Final = frozenset(
    ["object", "bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
ERRORS: Final = {each.triton_code: each for each in (HfTritonError, RequestError, UnavailableError)}


class ProtocolError(ValueError):
    """The other side says what cannot be understood; nothing of it may be quoted, it may be somebody's prompt."""


@dataclass(frozen=True)
class DoorRequest:
    """A request as the door has it from Triton, not yet checked, and how it is to be answered."""

    inputs: Mapping[str, Array]
    parameters: Mapping[str, object]
    request_id: str
    timeout_s: float | None
    """Seconds that are left of it."""
    output_names: list[str]
    """The outputs that the door's folder declares."""
    requested_outputs: list[str]
    """Those that the client is to have."""
    streams: bool
    """Whether the text comes piece by piece where the request does not say."""


def pack_request(request: DoorRequest) -> Message:
    """A request as JSON's values."""
    return vars(request) | {"inputs": pack_tensors(request.inputs)}


def read_request(value: object) -> DoorRequest:
    """A request that came in.

    Raises:
        ProtocolError: It is not one.
    """
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
    raise ProtocolError("this is no request")


def pack_tensors(tensors: Mapping[str, Array]) -> Message:
    """Tensors as JSON's values: type, shape and elements. Bytes that are no UTF-8 pass unchanged."""
    return {name: [str(array.dtype), list(array.shape), _elements(array)] for name, array in tensors.items()}


def _elements(array: Array) -> list[Any]:
    flat: list[Any] = array.ravel().tolist()
    return [element.decode("utf-8", "surrogateescape") for element in flat] if array.dtype == object else flat


def read_tensors(value: object) -> dict[str, Array]:
    """Tensors that came in.

    Raises:
        ProtocolError: They are none.
    """
    if not isinstance(value, dict):
        raise ProtocolError("these are no tensors")
    return {name: _read_tensor(each) for name, each in value.items()}


def _read_tensor(value: object) -> Array:
    match value:
        case [str() as dtype, list() as shape, list() as elements] if dtype in DTYPES:
            try:
                return _array(dtype, elements).reshape(shape)
            except (ValueError, TypeError, OverflowError, AttributeError):
                pass
    raise ProtocolError("this is no tensor")


def _array(dtype: str, elements: list[Any]) -> Array:
    if dtype != "object":
        return np.array(elements, dtype)
    array = np.empty(len(elements), np.object_)
    array[:] = [element.encode("utf-8", "surrogateescape") for element in elements]
    return array


def read_parameters(value: object) -> dict[str, int]:
    """The parameters of a response that came in.

    Raises:
        ProtocolError: They are none.
    """
    if not isinstance(value, dict) or any(type(each) is not int for each in value.values()):
        raise ProtocolError("these are no parameters of a response")
    return value


def pack_error(error: HfTritonError) -> list[str]:
    """An error as JSON's values."""
    return [error.triton_code, error.code, error.sentence]


def read_error(value: object) -> HfTritonError:
    """An error that came in, of the same code and sentence.

    Raises:
        ProtocolError: It is not one.
    """
    match value:
        case [CancelledError.triton_code, str(), str()]:
            return CancelledError()
        case [str() as kind, str() as code, str() as sentence] if kind in ERRORS:
            return ERRORS[kind](code, sentence)
    raise ProtocolError("this is no error")
