# SPDX-License-Identifier: Apache-2.0
"""What a client sends, before a task's own reader: tensors and parameters as one mapping, each name once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from hf_triton.errors import ERROR_FORM, RequestError
from hf_triton.protocol.otlp import TRACE_CONTEXT
from hf_triton.protocol.tensor_values import Array, values_per_prompt
from hf_triton.sentence import param, param_list
from hf_triton.sentence import row as row_words

TRITON_PARAMETERS: Final = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "content_type", ERROR_FORM, *TRACE_CONTEXT}
)
"""Parameters that a request carries for others; `/generate` forwards Triton's own, as those with `triton_`, and
MLServer's client library names its codec in `content_type`."""


def is_triton_parameter(name: str) -> bool:
    """Whether a parameter is Triton's own, or one that a request carries for others."""
    return name in TRITON_PARAMETERS or name.startswith("triton_")


def merge_values(inputs: Mapping[str, Array], parameters: Mapping[str, object]) -> dict[str, object]:
    """Tensors and the client's own parameters by name; a name that is given twice is refused."""
    twice = next((name for name in inputs if name in parameters), None)
    if twice is not None:
        raise RequestError(
            "invalid_parameter", f"{param(twice)} is given twice, as an input and as a parameter: leave one out"
        )
    return {**{name: value for name, value in parameters.items() if not is_triton_parameter(name)}, **inputs}


def given_name(names: Collection[str], given: Collection[str]) -> str | None:
    """The one of an input's names that a request uses; None: it does not give the input. Several are refused."""
    used = [name for name in names if name in given]
    if len(used) > 1:
        raise RequestError("invalid_input", f"{param_list(used, ' and ')} are the same input: give one of them")
    return used[0] if used else None


def one_value(name: str, value: object, *, is_array: bool) -> object:
    """The value of a parameter that holds for all rows, which may be a tensor."""
    return values_per_prompt(name, value, 1, is_array=is_array)[0] if isinstance(value, np.ndarray) else value


def in_row(error: RequestError, row: int) -> RequestError:
    """An error that names the row of the request that is wrong."""
    sentence = f"{error.open_sentence}{row_words(row, ' (row {})')}"
    return RequestError(error.code, sentence, field=error.field, sizes=error.sizes)
