# SPDX-License-Identifier: Apache-2.0
"""One request: from tensors and parameters to checked prompts and parameters. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.chat import MESSAGES, Chat, parse_chat
from hf_triton.protocol.dialects import ALIASES, has_no_effect
from hf_triton.protocol.options import CHAT_OPTIONS, OPTIONS, PARAMETERS, RequestOptions, parse_options
from hf_triton.protocol.parameters import GenerationParameters, parse_parameters, unknown_parameter
from hf_triton.protocol.ports import PROMPT, PROMPT_LOGPROBS, element_type, is_array
from hf_triton.protocol.tensors import Array, decode_string, values_per_prompt
from hf_triton.protocol.validation import MAX_JSON, json_error, read_json, reject_duplicates

TRITON_PARAMETERS: Final = frozenset({"id", "sequence_id", "sequence_start", "sequence_end"})
"""Triton's own parameters that `/generate` forwards, beside those that begin with `triton_`."""
MAX_NUMBER_CHARS: Final = 64
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    max_prompts: int
    max_prompt_bytes: int
    """Bytes of the longest prompt."""


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request."""

    prompts: Sequence[str | Chat]
    """Strings, or one chat."""
    parameters: list[GenerationParameters]
    """One per prompt."""
    options: RequestOptions
    shape: tuple[int, ...]
    """The shape of `text_input`, which the outputs follow."""


def with_named_outputs(
    parameters: Mapping[str, object], inputs: Collection[str], requested: Sequence[str], declared: Sequence[str]
) -> Mapping[str, object]:
    """A request's parameters, plus `return_NAME` for every output that it lists.

    Args:
        parameters: By name.
        inputs: The names of the request's tensors, which may be parameters too.
        requested: The outputs that the request lists; all of them if it lists none.
        declared: The folder's outputs.

    Raises:
        RequestError: The request lists `prompt_logprobs` without the parameter that fills it.
    """
    if len(requested) >= len(declared):
        return parameters
    if PROMPT_LOGPROBS in requested and PROMPT_LOGPROBS not in (*parameters, *inputs):
        raise RequestError(
            "invalid_parameter", f"the output {PROMPT_LOGPROBS} is filled by the parameter of that name: add it"
        )
    names = (f"return_{name}" for name in requested)
    return {**{name: True for name in names if name in OPTIONS and name not in inputs}, **parameters}


def is_cancel_request(parameters: Mapping[str, object]) -> bool:
    """Whether a request only cancels the requests of its own id: `"stop": true`, as in the TensorRT-LLM backend."""
    return parameters.get("stop") is True


def parse_request(inputs: Mapping[str, Array], parameters: Mapping[str, object], limits: Limits) -> GenerationRequest:
    """Check one request.

    Args:
        inputs: Tensors by name. `text_input` holds UTF-8 `bytes` and has shape `[n]`, or `[batch, n]`; a parameter's
            tensor holds one value, or one per prompt; arrays and objects may be JSON strings.
        parameters: The request's parameters, by name or alias.
        limits: What to accept.

    Raises:
        RequestError: The message names what is wrong and what is allowed.
    """
    if parameters.get("stop") is False:  # TensorRT-LLM's default: cancel nothing
        parameters = {name: value for name, value in parameters.items() if name != "stop"}
    check_parameter_names(parameters)  # first, so that a misspelt `text_input` is reported as one
    has_chat = MESSAGES in inputs or MESSAGES in parameters
    if not has_chat and PROMPT not in inputs and str(parameters.get("stop")).lower() == "true":
        got = clip(parameters["stop"])
        raise RequestError("invalid_parameter", f"stop cancels a request only as true without quotes, got {got}")
    if has_chat == (PROMPT in inputs):
        raise RequestError("invalid_input", f"give either {PROMPT} or {MESSAGES}")
    prompts: Sequence[str | Chat] = [] if has_chat else decode_prompts(inputs[PROMPT], limits)
    rows = _parameters_per_prompt(inputs, parameters, 1 if has_chat else len(prompts))
    if has_chat:
        prompts = [_parse_chat(inputs, parameters, rows[0], limits)]
    elif not all(CHAT_OPTIONS.isdisjoint(row) for row in rows):
        names = ", ".join(sorted({name for row in rows for name in CHAT_OPTIONS & row.keys()}))
        raise RequestError("invalid_parameter", f"{names} has no effect without {MESSAGES}: leave it out")
    options = _parse_rows(parse_options, rows)
    _check_equal(options, OPTIONS - {"sampling_parameters"})
    generation = _parse_rows(_parse_generation, rows)
    if any(row.logprobs is not None for row in generation) and not options[0].return_logprobs:
        raise RequestError("invalid_parameter", "logprobs has no effect without return_logprobs true: add it")
    _check_equal(generation, {"num_return_sequences"})
    return GenerationRequest(prompts, generation, options[0], _prompt_shape(inputs))


def _prompt_shape(inputs: Mapping[str, Array]) -> tuple[int, ...]:
    if PROMPT in inputs:
        return inputs[PROMPT].shape
    return (*inputs[MESSAGES].shape[:-1], 1) if MESSAGES in inputs else (1,)


def _check_equal(rows: Sequence[BaseModel], names: Iterable[str]) -> None:
    """Refuse prompts that differ in a parameter of the whole request."""
    if all(row is rows[0] for row in rows[1:]):
        return
    for name in sorted(names):
        if len({getattr(row, name) for row in rows}) > 1:
            raise RequestError("invalid_parameter", f"{name} must be the same for all rows of a request")


def _parse_chat(
    inputs: Mapping[str, Array], parameters: Mapping[str, object], row: Mapping[str, object], limits: Limits
) -> Chat:
    messages = parameters.get(MESSAGES)
    if MESSAGES in inputs:
        array = inputs[MESSAGES]
        if array.ndim > 1 and len(array) > 1:
            raise RequestError("invalid_input", f"{MESSAGES} holds one chat: send {len(array)} requests")
        messages = [decode_string(MESSAGES, element) for element in array.ravel()]
    if not isinstance(messages, (str, list)):
        raise RequestError("invalid_input", f"{MESSAGES} must be a JSON string, got {clip(messages)}")
    options = {name: value for name, value in row.items() if name in CHAT_OPTIONS}
    return parse_chat(messages, options, limits.max_prompt_bytes)


def decode_prompts(array: Array, limits: Limits) -> list[str]:
    """Read a BYTES tensor as strings.

    Args:
        array: Any shape, in C order; each element is UTF-8 `bytes`.
        limits: What to accept.

    Raises:
        RequestError: There are no elements or too many, or one is too long or not UTF-8; the message names its row.
    """
    if array.size == 0:
        raise RequestError("invalid_input", f"{PROMPT} holds no prompt, its shape is {list(array.shape)}")
    if array.size > limits.max_prompts:
        raise RequestError(
            "invalid_input",
            f"{PROMPT} holds {array.size} prompts, more than the {limits.max_prompts} that are accepted (setting "
            "max_prompts): send several requests",
        )
    elements = array.ravel()
    for row, element in enumerate(elements):
        if len(element) > limits.max_prompt_bytes:
            raise RequestError(
                "context_exceeded",
                f"{PROMPT} row {row} has {len(element)} bytes, more than the {limits.max_prompt_bytes} that are "
                "accepted (setting max_prompt_bytes)",
            )
    return [decode_string(f"{PROMPT} row {row}", element, "invalid_input") for row, element in enumerate(elements)]


def _parameters_per_prompt(
    inputs: Mapping[str, Array], parameters: Mapping[str, object], num_rows: int
) -> list[dict[str, object]]:
    """Each prompt's parameters, from request parameters and from tensors."""
    shared = {name: value for name, value in parameters.items() if not _is_triton_parameter(name) and name != MESSAGES}
    rows = [dict(shared) for _ in range(num_rows)]
    for name, array in inputs.items():
        if name in parameters:
            raise RequestError(
                "invalid_parameter", f"{name} is given twice, as an input and as a parameter: leave one out"
            )
        if name in (PROMPT, MESSAGES):
            continue
        for row, value in zip(rows, values_per_prompt(name, array, num_rows, is_array=is_array(name)), strict=True):
            row[name] = value
    return rows


def check_parameter_names(parameters: Mapping[str, object]) -> None:
    """Refuse unknown parameters.

    Raises:
        RequestError: Names the parameter and suggests a known one.
    """
    for name, value in parameters.items():
        is_known = ALIASES.get(name, name) in PARAMETERS or name == MESSAGES or _is_triton_parameter(name)
        if not (is_known or has_no_effect(name, value)):
            raise unknown_parameter(name, (*OPTIONS, *CHAT_OPTIONS, PROMPT, MESSAGES))


def _is_triton_parameter(name: str) -> bool:
    return name in TRITON_PARAMETERS or name.startswith("triton_")


def _parse_rows(parse: Callable[[Mapping[str, object]], Parsed], rows: Sequence[Mapping[str, object]]) -> list[Parsed]:
    """Parse each prompt's parameters, once if they are equal; otherwise an error names the row."""
    if all(row == rows[0] for row in rows[1:]):
        return [parse(rows[0])] * len(rows)
    parsed = []
    for number, row in enumerate(rows):
        try:
            parsed.append(parse(row))
        except RequestError as error:
            raise RequestError(error.code, f"{error.sentence} (row {number})") from None
    return parsed


def _parse_generation(row: Mapping[str, object]) -> GenerationParameters:
    own = {name: value for name, value in row.items() if name not in OPTIONS and name not in CHAT_OPTIONS}
    packed = _unpack_sampling_parameters(row.get("sampling_parameters"))
    for name in packed.keys() & own.keys():  # the vLLM backend's own client sends every parameter twice, as a string
        if packed[name] != _read_number(name, own[name]):
            raise RequestError(
                "invalid_parameter",
                f"{name} is given twice, in sampling_parameters and beside it, with two values: leave one out",
            )
    return parse_parameters(own | packed)


def _unpack_sampling_parameters(text: object) -> dict[str, object]:
    """Parse the vLLM backend's `sampling_parameters`."""
    if not isinstance(text, str) or not text.strip():
        return {}
    if len(text) > MAX_JSON:
        raise RequestError(
            "invalid_parameter", f"sampling_parameters must be JSON of up to {MAX_JSON} characters, got {len(text)}"
        )
    try:
        values = json.loads(text, object_pairs_hook=reject_duplicates)
    except RequestError:
        raise
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RequestError(
            "invalid_parameter", f"sampling_parameters must be a JSON object, got {clip(text)}{json_error(text)}"
        )
    if values.get("logprobs") is False:  # Triton's OpenAI frontend, for none
        del values["logprobs"]
    return {name: _read_number(name, value) for name, value in values.items()}


def _read_number(name: str, value: object) -> object:
    """Read a number or boolean that is sent as a string, as genai-perf and the vLLM backend's own client do."""
    parameter = ALIASES.get(name, name)
    is_number = parameter in GenerationParameters.model_fields and element_type(name) in (bool, int, float)
    return read_json(value) if is_number and isinstance(value, str) and len(value) <= MAX_NUMBER_CHARS else value
