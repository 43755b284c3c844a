# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire: inputs, outputs and request parameters, from tensors to a checked request and back.

The one table behind `auto_complete_config`, parsing and the documentation. Knows numpy, not Triton, and no model.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from hf_triton.declare import problems, suggest
from hf_triton.errors import RequestError, SettingsError
from hf_triton.generation import ALIASES, GenerationParameters, parse_parameters, unknown_parameter

PROMPT: Final = "text_input"
TEXT: Final = "text_output"
TEXT_OLD: Final = "text"
"""The tutorial's older name of the output; filled too where config.pbtxt declares it."""
TRITONS_OWN: Final = frozenset({"id", "sequence_id", "sequence_start", "sequence_end"})
"""Parameters that `/generate` passes on though they are Triton's own, as are those that begin with `triton_`."""

WHOLE_NUMBERS: Final = tuple(f"TYPE_{sign}{bits}" for sign in ("INT", "UINT") for bits in (64, 32, 16, 8))
TENSOR_TYPES: Final[Mapping[type, tuple[str, ...]]] = {
    bool: ("TYPE_BOOL",),
    int: WHOLE_NUMBERS,
    float: ("TYPE_FP32", "TYPE_FP64", "TYPE_FP16", *WHOLE_NUMBERS),
    tuple: ("TYPE_STRING",),
    dict: ("TYPE_STRING",),
}
"""By a parameter's Python type; arrays and objects come as JSON texts."""

Array = npt.NDArray[Any]
Parsed = TypeVar("Parsed")


class RequestOptions(BaseModel):
    """Parameters of a whole request; those of generation are in `GenerationParameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    exclude_input_in_output: bool | None = None
    """Whether `text_output` holds the continuation alone, without the prompt. By default what the folder's setting of
    the same name says."""


PARAMETERS: Final[Mapping[str, type[BaseModel]]] = {
    name: model for model in (RequestOptions, GenerationParameters) for name in model.model_fields
}
"""Every request parameter and where it is declared."""


@dataclass(frozen=True)
class Limits:
    """What one request may hold."""

    max_prompts: int
    max_prompt_bytes: int
    """Bytes of the longest prompt."""


@dataclass(frozen=True)
class GenerationRequest:
    """One request, checked."""

    prompts: list[str]
    parameters: list[GenerationParameters]
    """One for each prompt."""
    exclude_input_in_output: bool | None
    shape: tuple[int, ...]
    """The shape of `text_input`, which `text_output` follows."""


# --- the configuration -----------------------------------------------------------------------------------------------


def missing_ports(
    config: Mapping[str, Any], parameters_as_inputs: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The inputs and outputs that config.pbtxt leaves out, in Triton's form.

    Args:
        config: The model configuration as Triton gives it: `input`, `output`, `max_batch_size`, ...
        parameters_as_inputs: Whether to declare every request parameter as an optional input as well.
    """
    declared = {port["name"] for port in [*config["input"], *config["output"]]}
    is_batched = config["max_batch_size"] > 0
    inputs: list[dict[str, Any]] = [{"name": PROMPT, "data_type": "TYPE_STRING", "dims": [1 if is_batched else -1]}]
    if parameters_as_inputs:
        inputs += [
            {"name": name, "data_type": _triton_types(name)[0], "dims": [1], "optional": True} for name in PARAMETERS
        ]
    outputs = [{"name": TEXT, "data_type": "TYPE_STRING", "dims": [-1]}] if TEXT_OLD not in declared else []
    return [port for port in inputs if port["name"] not in declared], [
        port for port in outputs if port["name"] not in declared
    ]


def _triton_types(name: str) -> tuple[str, ...]:
    """The tensor types that hold a parameter's value, the one we declare first."""
    declared = typing.get_args(PARAMETERS[name].model_fields[name].annotation)[0]  # of `declared | None`
    python_type = typing.get_args(declared)[0] if typing.get_origin(declared) is typing.Annotated else declared
    return TENSOR_TYPES[typing.get_origin(python_type) or python_type]


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that could not be served as it reads.

    Raises:
        SettingsError: An input or output is unknown or of a wrong type, or the response cache would mix requests up.
    """
    for port in config["input"]:
        _check_input(port["name"], port["data_type"])
    for port in config["output"]:
        if port["name"] not in (TEXT, TEXT_OLD) or port["data_type"] != "TYPE_STRING":
            raise SettingsError(
                f"config.pbtxt declares the output '{port['name']}' as {port['data_type']}; "
                f"the outputs are {TEXT} and {TEXT_OLD}, TYPE_STRING"
            )
    if config.get("response_cache", {}).get("enable"):
        raise SettingsError(
            "response_cache is on, but Triton's cache ignores request parameters and would answer one request with "
            "another's text: take it out of config.pbtxt"
        )


def _check_input(name: str, data_type: str) -> None:
    parameter = ALIASES.get(name, name)
    if name != PROMPT and parameter not in PARAMETERS:
        raise SettingsError(
            f"config.pbtxt declares the input '{name}', and there is no such request parameter"
            f"{suggest(name, [PROMPT, *PARAMETERS, *ALIASES])}"
        )
    types = ("TYPE_STRING",) if name == PROMPT else _triton_types(parameter)
    if data_type not in types:
        raise SettingsError(f"config.pbtxt declares {name} as {data_type}; it must be {' or '.join(types)}")


# --- requests --------------------------------------------------------------------------------------------------------


def parse_request(inputs: Mapping[str, Array], parameters: Mapping[str, object], limits: Limits) -> GenerationRequest:
    """Check one request.

    Args:
        inputs: Tensors by name. `text_input` holds UTF-8 `bytes` and has shape `[n]`, or `[batch, n]`; a parameter's
            tensor holds one value, or one for each prompt; a JSON text where the value is an array or an object.
        parameters: The request's parameters, by name or alias.
        limits: How much to accept.

    Raises:
        RequestError: The message names what is wrong and what would do.
    """
    if PROMPT not in inputs:
        raise RequestError("invalid_input", f"{PROMPT} is missing")
    array = inputs[PROMPT]
    prompts = decode_texts(array, limits)
    rows = _rows_of_parameters(inputs, parameters, len(prompts))
    options = _parse_rows(_parse_options, rows)
    if any(each != options[0] for each in options):
        raise RequestError("invalid_parameter", "exclude_input_in_output must be the same for all rows of a request")
    generation = _parse_rows(lambda row: parse_parameters(_without_options(row)), rows)
    if len({each.num_return_sequences for each in generation}) > 1:
        raise RequestError("invalid_parameter", "num_return_sequences must be the same for all rows of a request")
    return GenerationRequest(prompts, generation, options[0].exclude_input_in_output, tuple(array.shape))


def decode_texts(array: Array, limits: Limits) -> list[str]:
    """Read a BYTES tensor as text, row by row.

    Args:
        array: Any shape, taken in C order; each element is UTF-8 `bytes`.
        limits: How much to accept.

    Raises:
        RequestError: There is no element or too many, or one is too long or not valid UTF-8; the message names its row.
    """
    if array.size == 0:
        raise RequestError("invalid_input", f"{PROMPT} holds no prompt, its shape is {list(array.shape)}")
    if array.size > limits.max_prompts:
        raise RequestError(
            "invalid_input",
            f"{PROMPT} holds {array.size} prompts, and a request may have {limits.max_prompts} (setting max_prompts): "
            "send several requests",
        )
    return [_decode_text(row, element, limits.max_prompt_bytes) for row, element in enumerate(array.ravel())]


def _decode_text(row: int, element: bytes, max_bytes: int) -> str:
    if len(element) > max_bytes:
        raise RequestError(
            "context_exceeded",
            f"{PROMPT} row {row} has {len(element)} bytes, more than the {max_bytes} that are accepted "
            "(setting max_prompt_bytes)",
        )
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "invalid_input",
            f"{PROMPT} row {row} is not valid UTF-8: {_bad_byte(element, error)}",
        ) from None


def _bad_byte(element: bytes, error: UnicodeDecodeError) -> str:
    return f"byte 0x{element[error.start]:02x} at offset {error.start}"


def _rows_of_parameters(
    inputs: Mapping[str, Array], parameters: Mapping[str, object], num_rows: int
) -> list[dict[str, object]]:
    """What each prompt asks for, from request parameters and parameter tensors alike."""
    shared = {name: value for name, value in parameters.items() if not _is_tritons_own(name)}
    for name in shared:
        if ALIASES.get(name, name) not in PARAMETERS:
            raise unknown_parameter(name, (*RequestOptions.model_fields, PROMPT))
    rows = [dict(shared) for _ in range(num_rows)]
    for name, array in inputs.items():
        if name == PROMPT:
            continue
        if name in shared:
            raise RequestError(
                "invalid_parameter", f"{name} is given twice, as an input and as a parameter: leave one out"
            )
        for row, value in zip(rows, _values(name, array, num_rows), strict=True):
            row[name] = value
    return rows


def _is_tritons_own(name: str) -> bool:
    return name in TRITONS_OWN or name.startswith("triton_")


def _values(name: str, array: Array, num_rows: int) -> list[object]:
    if array.size not in (1, num_rows):
        raise RequestError(
            "invalid_parameter",
            f"{name} has {array.size} values for {num_rows} prompts: give one, or one for each prompt",
        )
    values = [_plain_value(name, each) for each in array.ravel()]
    return values * num_rows if array.size == 1 else values


def _plain_value(name: str, value: Any) -> object:
    """A tensor's element as Python's own type; an FP32 0.7 is the number 0.7, as it is in JSON."""
    if isinstance(value, bytes):
        return _decode_value(name, value)
    if isinstance(value, np.floating):
        return float(str(value)) if math.isfinite(value) else float(value)
    return value.item() if isinstance(value, np.generic) else value


def _decode_value(name: str, element: bytes) -> str:
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("invalid_parameter", f"{name} is not valid UTF-8: {_bad_byte(element, error)}") from None


def _parse_rows(parse: Callable[[Mapping[str, object]], Parsed], rows: Sequence[Mapping[str, object]]) -> list[Parsed]:
    """Parse what each prompt asks for, once where all ask for the same; the refusal of one row names it."""
    if all(row == rows[0] for row in rows[1:]):
        return [parse(rows[0])] * len(rows)
    parsed = []
    for number, row in enumerate(rows):
        try:
            parsed.append(parse(row))
        except RequestError as error:
            raise RequestError(error.code, f"{error.sentence} (row {number})") from None
    return parsed


def _without_options(row: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in RequestOptions.model_fields}


def _parse_options(row: Mapping[str, object]) -> RequestOptions:
    try:
        return RequestOptions.model_validate({name: row[name] for name in RequestOptions.model_fields if name in row})
    except ValidationError as error:
        raise RequestError("invalid_parameter", problems(RequestOptions, error)[0].sentence) from None


# --- answers ---------------------------------------------------------------------------------------------------------


def encode_texts(texts: Iterable[str], shape: tuple[int, ...]) -> Array:
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
