# SPDX-License-Identifier: Apache-2.0
"""Tensors to values and back: strings, and a parameter's value for each prompt. Knows numpy, not Triton."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_triton.errors import RequestError
from hf_triton.sentence import param

Array = npt.NDArray[Any]


def values_per_prompt(name: str, array: Array, num_prompts: int, *, is_array: bool) -> list[object]:
    """A parameter's value for each prompt: there is one for all, or one for each.

    Of an array parameter, `[n]` holds one array for all, and each row of `[rows, n]` one array.

    Raises:
        RequestError: The number of values fits neither, or a string is not UTF-8.
    """
    if is_array:
        parts = array if array.ndim == 2 else array.reshape(1, -1)
        values, unit = [_array_value(name, part) for part in parts], "rows"
    else:
        values, unit = [_scalar_value(name, element) for element in array.ravel()], "values"
    if len(values) not in (1, num_prompts):
        raise RequestError(
            "invalid_parameter",
            f"{param(name)} has {len(values)} {unit} for {num_prompts} prompts: give one, or one for each prompt",
        )
    return values * num_prompts if len(values) == 1 else values


def _array_value(name: str, row: Array) -> object:
    """A row's elements. One alone may be the array as JSON; empty strings pad shorter rows."""
    values = [value for element in row if (value := _scalar_value(name, element)) != ""]
    return values[0] if len(values) == 1 else values


def _scalar_value(name: str, element: Any) -> object:
    """An element as a Python value; FP32 0.7 becomes 0.7, as in JSON."""
    if isinstance(element, bytes):
        return decode_string(param(name), element)
    if isinstance(element, np.floating):
        return float(str(element)) if math.isfinite(element) else float(element)
    return element.item() if isinstance(element, np.generic) else element


def decode_string(about: str, element: bytes, code: str = "invalid_parameter") -> str:
    """A text; an error's sentence begins with `about`."""
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        position = f"byte 0x{element[error.start]:02x} at offset {error.start}"
        raise RequestError(code, f"{about} is not valid UTF-8: {position}") from None


def encode_strings(strings: Iterable[str], shape: tuple[int, ...]) -> Array:
    """Strings as a BYTES tensor.

    Args:
        strings: In row order, the completions of one prompt side by side.
        shape: The shape of `text_input`; the last dimension grows by the number of completions per prompt.

    Returns:
        dtype object, elements UTF-8 `bytes`. Code points that UTF-8 cannot hold become `?`.
    """
    elements = [string.encode("utf-8", errors="replace") for string in strings]
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array.reshape(*shape[:-1], -1)
