# SPDX-License-Identifier: Apache-2.0
"""Values in tensors: strings, and a parameter's value for each prompt. Knows numpy, not Triton."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_triton.errors import RequestError

Array = npt.NDArray[Any]


def values_per_prompt(name: str, array: Array, num_rows: int, *, is_array: bool) -> list[object]:
    """A parameter tensor's value for each prompt: one for all, or one each; of several texts, a row each or all."""
    if is_array:
        parts = array if array.ndim == 2 else array.reshape(1, -1)
        if len(parts) not in (1, num_rows):
            raise RequestError(
                "invalid_parameter",
                f"{name} has {len(parts)} rows for {num_rows} prompts: give one, or one for each prompt",
            )
        values = [_array_value(name, part) for part in parts]
    else:
        if array.size not in (1, num_rows):
            raise RequestError(
                "invalid_parameter",
                f"{name} has {array.size} values for {num_rows} prompts: give one, or one for each prompt",
            )
        values = [_scalar_value(name, each) for each in array.ravel()]
    return values * num_rows if len(values) == 1 else values


def _array_value(name: str, array: Array) -> object:
    """One element may be a JSON text of them all; empty texts fill a row up where another one has more."""
    values = [value for each in array if (value := _scalar_value(name, each)) != ""]
    return values[0] if len(values) == 1 else values


def _scalar_value(name: str, value: Any) -> object:
    """A tensor's element as Python's own type; an FP32 0.7 is the number 0.7, as it is in JSON."""
    if isinstance(value, bytes):
        return decode_string(name, value)
    if isinstance(value, np.floating):
        return float(str(value)) if math.isfinite(value) else float(value)
    return value.item() if isinstance(value, np.generic) else value


def decode_string(name: str, element: bytes) -> str:
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("invalid_parameter", f"{name} is not valid UTF-8: {bad_byte(element, error)}") from None


def bad_byte(element: bytes, error: UnicodeDecodeError) -> str:
    return f"byte 0x{element[error.start]:02x} at offset {error.start}"


def encode_strings(texts: Iterable[str], shape: tuple[int, ...]) -> Array:
    """Texts as a BYTES tensor.

    Args:
        texts: In row order, the sequences of one prompt side by side.
        shape: The shape of `text_input`; the last dimension grows by the number of texts for each prompt.

    Returns:
        dtype object, elements UTF-8 `bytes`. Code points that UTF-8 cannot hold become `?`.
    """
    elements = [text.encode("utf-8", errors="replace") for text in texts]
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array.reshape(*shape[:-1], -1)
