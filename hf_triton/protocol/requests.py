# SPDX-License-Identifier: Apache-2.0
"""One request, from tensors and parameters to a checked one. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.chat import MESSAGES, Chat, parse_chat
from hf_triton.protocol.dialects import ALIASES, NOT_SERVED, is_done_anyway
from hf_triton.protocol.options import CHAT_OPTIONS, OPTIONS, PARAMETERS, RequestOptions, parse_options
from hf_triton.protocol.parameters import GenerationParameters, parse_parameters, unknown_parameter
from hf_triton.protocol.ports import PROMPT, PROMPT_LOGPROBS, element_type, is_array
from hf_triton.protocol.tensors import Array, bad_byte, decode_string, values_per_prompt
from hf_triton.protocol.validation import MAX_JSON, json_error, reject_duplicates

TRITONS_OWN: Final = frozenset({"id", "sequence_id", "sequence_start", "sequence_end"})
"""Parameters that `/generate` passes on though they are Triton's own, as are those that begin with `triton_`."""
MAX_NUMBER_CHARS: Final = 64  # characters
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Limits:
    """What one request may hold."""

    max_prompts: int
    max_prompt_bytes: int
    """Bytes of the longest prompt."""


@dataclass(frozen=True)
class GenerationRequest:
    """One request, checked."""

    prompts: Sequence[str | Chat]
    """Texts, or one chat."""
    parameters: list[GenerationParameters]
    """One for each prompt."""
    options: RequestOptions
    shape: tuple[int, ...]
    """The shape of `text_input`, which the outputs follow."""


def with_named_outputs(
    parameters: Mapping[str, object], inputs: Collection[str], requested: Sequence[str], declared: Sequence[str]
) -> Mapping[str, object]:
    """A request's parameters, with those that fill the outputs that it names.

    Args:
        parameters: By name.
        inputs: The names of its tensors, which may be parameters too.
        requested: The outputs that it is to have; all of them where it names none.
        declared: Those of the folder.

    Raises:
        RequestError: It names one that is filled by a parameter with a value of its own, which it does not have.
    """
    if len(requested) >= len(declared):
        return parameters
    if PROMPT_LOGPROBS in requested and PROMPT_LOGPROBS not in (*parameters, *inputs):
        raise RequestError(
            "invalid_parameter", f"the output {PROMPT_LOGPROBS} is filled by the parameter of that name: add it"
        )
    asked = (f"return_{name}" for name in requested)
    return {
        **{name: True for name in asked if name in OPTIONS and name not in inputs},
        **parameters,
    }


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
    if parameters.get("stop") is False:  # TensorRT-LLM's default: nothing is given up
        parameters = {name: value for name, value in parameters.items() if name != "stop"}
    check_parameter_names(parameters)  # first: of a misspelt `text_input`, the spelling is to be told
    has_chat = MESSAGES in inputs or MESSAGES in parameters
    if not has_chat and PROMPT not in inputs and str(parameters.get("stop")).lower() == "true":
        got = clip(parameters["stop"])
        raise RequestError("invalid_parameter", f"stop gives a request up where it is true without quotes, got {got}")
    if has_chat == (PROMPT in inputs):
        raise RequestError("invalid_input", f"give {PROMPT} or {MESSAGES}, one of them")
    prompts: Sequence[str | Chat] = [] if has_chat else decode_prompts(inputs[PROMPT], limits)
    rows = _rows_of_parameters(inputs, parameters, 1 if has_chat else len(prompts))
    if has_chat:
        prompts = [_parse_chat(inputs, parameters, rows[0], limits)]
    elif not all(CHAT_OPTIONS.isdisjoint(row) for row in rows):
        names = ", ".join(sorted({name for row in rows for name in CHAT_OPTIONS & row.keys()}))
        raise RequestError("invalid_parameter", f"{names} has no effect without {MESSAGES}: leave it out")
    options = _parse_rows(parse_options, rows)
    _check_alike(options, OPTIONS - {"sampling_parameters"})
    generation = _parse_rows(_parse_generation, rows)
    if any(each.logprobs is not None for each in generation) and not options[0].return_logprobs:
        raise RequestError("invalid_parameter", "logprobs has no effect without return_logprobs true: add it")
    _check_alike(generation, {"num_return_sequences"})
    shape: tuple[int, ...] = (1,)  # of a chat
    if PROMPT in inputs:
        shape = inputs[PROMPT].shape
    elif MESSAGES in inputs:
        shape = (*inputs[MESSAGES].shape[:-1], 1)
    return GenerationRequest(prompts, generation, options[0], shape)


def _check_alike(rows: Sequence[BaseModel], names: Iterable[str]) -> None:
    """Refuse rows that differ in what a whole request has once."""
    if all(row is rows[0] for row in rows[1:]):
        return
    for name in sorted(names):
        if len({getattr(row, name) for row in rows}) > 1:
            raise RequestError("invalid_parameter", f"{name} must be the same for all rows of a request")


def _parse_chat(
    inputs: Mapping[str, Array], parameters: Mapping[str, object], row: Mapping[str, object], limits: Limits
) -> Chat:
    if MESSAGES in inputs and MESSAGES in parameters:
        raise RequestError("invalid_parameter", f"{MESSAGES} is given twice, as an input and as a parameter")
    given = parameters.get(MESSAGES)
    if MESSAGES in inputs:
        array = inputs[MESSAGES]
        if array.ndim > 1 and len(array) > 1:
            raise RequestError("invalid_input", f"{MESSAGES} holds one chat: send {len(array)} requests")
        given = [decode_string(MESSAGES, each) for each in array.ravel()]
    if not isinstance(given, (str, list)):
        raise RequestError("invalid_input", f"{MESSAGES} must be a JSON text, got {clip(given)}")
    options = {name: value for name, value in row.items() if name in CHAT_OPTIONS}
    return parse_chat(given, options, limits.max_prompt_bytes)


def is_cancel_request(parameters: Mapping[str, object]) -> bool:
    """Whether a request only gives up those with its own id: `"stop": true`, as the TensorRT-LLM backend has it."""
    return parameters.get("stop") is True


def decode_prompts(array: Array, limits: Limits) -> list[str]:
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
            f"{PROMPT} row {row} is not valid UTF-8: {bad_byte(element, error)}",
        ) from None


def _rows_of_parameters(
    inputs: Mapping[str, Array], parameters: Mapping[str, object], num_rows: int
) -> list[dict[str, object]]:
    """What each prompt asks for, from request parameters and parameter tensors alike."""
    shared = {name: value for name, value in parameters.items() if not _is_tritons_own(name) and name != MESSAGES}
    rows = [dict(shared) for _ in range(num_rows)]
    for name, array in inputs.items():
        if name in (PROMPT, MESSAGES):
            continue
        if name in shared:
            raise RequestError(
                "invalid_parameter", f"{name} is given twice, as an input and as a parameter: leave one out"
            )
        for row, value in zip(rows, values_per_prompt(name, array, num_rows, is_array=is_array(name)), strict=True):
            row[name] = value
    return rows


def check_parameter_names(parameters: Mapping[str, object]) -> None:
    """Refuse a parameter that there is not.

    Raises:
        RequestError: It names the parameter, and those that it may have been meant for.
    """
    for name in parameters:
        is_known = ALIASES.get(name, name) in PARAMETERS or name == MESSAGES or _is_tritons_own(name)
        if not (is_known or is_done_anyway(name, parameters[name])):
            raise _unknown_parameter(name)


def _unknown_parameter(name: str) -> RequestError:
    if name in NOT_SERVED:
        return RequestError("unknown_parameter", f"{NOT_SERVED[name]}: leave {name} out")
    return unknown_parameter(name, (*OPTIONS, *CHAT_OPTIONS, PROMPT, MESSAGES))


def _is_tritons_own(name: str) -> bool:
    return name in TRITONS_OWN or name.startswith("triton_")


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


def _parse_generation(row: Mapping[str, object]) -> GenerationParameters:
    own = {name: value for name, value in row.items() if name not in OPTIONS and name not in CHAT_OPTIONS}
    packed = _unpack(row.get("sampling_parameters"))
    for name in packed.keys() & own.keys():  # the vLLM backend's own client says everything twice, in texts
        if packed[name] != _number(name, own[name]):
            raise RequestError(
                "invalid_parameter",
                f"{name} is given twice, in sampling_parameters and beside it, with two values: leave one out",
            )
    for name in packed:
        if name in NOT_SERVED:
            raise _unknown_parameter(name)
    return parse_parameters(own | packed)


def _unpack(text: object) -> dict[str, object]:
    """The parameters in the vLLM backend's `sampling_parameters`.

    Triton's OpenAI frontend says `"logprobs": false` where it wants none.
    """
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
    return {name: _number(name, value) for name, value in values.items() if not (name == "logprobs" and value is False)}


def _number(name: str, value: object) -> object:
    """A number that comes as a text, as genai-perf and the vLLM backend's own client write it."""
    parameter = ALIASES.get(name, name)
    is_number = parameter in GenerationParameters.model_fields and element_type(name) in (bool, int, float)
    if not is_number or not isinstance(value, str):
        return value
    try:
        return json.loads(value) if len(value) <= MAX_NUMBER_CHARS else value
    except (ValueError, RecursionError):
        return value
