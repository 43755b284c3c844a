# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire: inputs, outputs and request parameters, from tensors to a checked request and back.

The one table behind `auto_complete_config`, parsing and the documentation. Knows numpy, not Triton, and no model.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import annotated_types
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from hf_triton.errors import RequestError, SettingsError, clip
from hf_triton.protocol.chat import MESSAGES, Chat, ChatOptions, parse_chat
from hf_triton.protocol.parameters import (
    ALIASES,
    MEANT,
    GenerationParameters,
    is_done_anyway,
    parse_parameters,
    unknown_parameter,
)
from hf_triton.protocol.validation import MAX_JSON, each_once, problems, suggest, why_no_json

PROMPT: Final = "text_input"
TEXT: Final = "text_output"
TEXT_OLD: Final = "text"
"""The tutorial's older name of the output; filled too where config.pbtxt declares it."""
TEXTS: Final = (TEXT, TEXT_OLD)
PROMPT_LOGPROBS: Final = "prompt_logprobs"
OUTPUTS: Final[Mapping[str, str]] = {
    TEXT: "TYPE_STRING",
    TEXT_OLD: "TYPE_STRING",
    "finish_reason": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32",
    "num_output_tokens": "TYPE_UINT32",
    "cumulative_logprob": "TYPE_FP32",
    "logprobs": "TYPE_STRING",
    PROMPT_LOGPROBS: "TYPE_STRING",
}
"""Every output and its type. Those but the text are filled where a request asks for them: by `return_...`, or by naming
some outputs and not all; and `prompt_logprobs` by the parameter of that name."""
TRITONS_OWN: Final = frozenset({"id", "sequence_id", "sequence_start", "sequence_end"})
"""Parameters that `/generate` passes on though they are Triton's own, as are those that begin with `triton_`."""

NOT_SERVED: Final[Mapping[str, str]] = {
    "lora_name": "LoRA adapters are not served",
    "embedding_request": "this model writes text and gives no embeddings",
}
"""Parameters of the vLLM backend that ask for something else."""

MAX_NUMBER: Final = 64  # characters
WHOLE_NUMBERS: Final = tuple(f"TYPE_{sign}{bits}" for sign in ("INT", "UINT") for bits in (64, 32, 16, 8))
TENSOR_TYPES: Final[Mapping[type, tuple[str, ...]]] = {
    bool: ("TYPE_BOOL",),
    int: WHOLE_NUMBERS,
    float: ("TYPE_FP32", "TYPE_FP64", "TYPE_FP16", *WHOLE_NUMBERS),
    str: ("TYPE_STRING",),
    dict: ("TYPE_STRING",),
}
"""By a parameter's Python type, or that of its elements where it holds several; objects come as JSON texts."""
DIALECT_TYPES: Final[Mapping[str, str]] = {
    "max_tokens": "TYPE_INT32",
    "max_completion_tokens": "TYPE_INT32",
    "min_tokens": "TYPE_INT32",
    "top_k": "TYPE_INT32",
    "seed": "TYPE_UINT64",
    "random_seed": "TYPE_UINT64",
    "end_id": "TYPE_INT32",
    "pad_id": "TYPE_INT32",
}
"""The types that clients of TensorRT-LLM and LiteLLM send, where Triton would refuse ours."""
DIALECT_INPUTS: Final[Mapping[str, str]] = {
    "beam_width": "TYPE_INT32",
    "length_penalty": "TYPE_FP32",
    "early_stopping": "TYPE_BOOL",
    "return_log_probs": "TYPE_BOOL",
    "return_context_logits": "TYPE_BOOL",
    "return_generation_logits": "TYPE_BOOL",
}
"""Tensors that clients of TensorRT-LLM send, of parameters that there are not: taken where they ask for what is done
anyway."""

Array = npt.NDArray[Any]
Parsed = TypeVar("Parsed")


class RequestOptions(BaseModel):
    """Parameters of a whole request; those of generation are in `GenerationParameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    stream: bool | None = None
    """Whether the text comes piece by piece, as it is written: from folders that say `decoupled`, over
    `/generate_stream` and gRPC streams. The others answer once. By default what the folder's setting of the same name
    says."""

    exclude_input_in_output: bool | None = None
    """Whether `text_output` holds the continuation alone, without the prompt. By default what the folder's setting of
    the same name says; a stream leaves the prompt out."""

    return_finish_reason: bool | None = None
    """Whether to fill the output `finish_reason`: `stop` (the model or a stop string ended the text), `length`
    (`max_new_tokens`) or `deadline` (`max_time`)."""

    return_num_input_tokens: bool | None = None
    """Whether to fill the output `num_input_tokens`, the prompt's."""

    return_num_output_tokens: bool | None = None
    """Whether to fill the output `num_output_tokens`, the text's."""

    return_cumulative_logprob: bool | None = None
    """Whether to fill the output `cumulative_logprob`, the sum of the log probabilities of the text's tokens."""

    return_logprobs: bool | None = None
    """Whether to fill the output `logprobs`: a JSON array with an object for each token of the text, which holds the
    token and the likeliest `logprobs` by their ids, each with `logprob` (the model's own, before temperature, penalties
    and biases), `rank` among those likeliest (`null` beyond them) and `decoded_token`."""

    return_timings: bool | None = None
    """Whether the last response has the request's own times among its parameters, in whole microseconds since its
    arrival: `queue_time_us` until the engine took a prompt of it, `time_to_first_token_us` until a text of it had its
    first token, `e2e_request_latency_us` until its answer was made. In the JSON of `/generate` they are beside the
    outputs. Behind a stream door a request arrives where its model is. Needs a server of Triton 25.02 or newer, and is
    refused by others."""

    pad_id: Annotated[int, annotated_types.Ge(0)] | None = None
    """What clients of TensorRT-LLM say of padding. It is in no text, so that this changes none."""

    sampling_parameters: str | None = None
    """Generation parameters as one JSON text, as the vLLM backend takes them: `{"temperature": 0.5, "max_tokens": 20}`.
    """


PARAMETERS: Final[Mapping[str, type[BaseModel]]] = {
    name: model for model in (RequestOptions, ChatOptions, GenerationParameters) for name in model.model_fields
}
"""Every request parameter and where it is declared."""
OPTIONS: Final = frozenset(RequestOptions.model_fields)
CHAT_OPTIONS: Final = frozenset(ChatOptions.model_fields)
NO_OPTIONS: Final = RequestOptions()


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


@dataclass(frozen=True)
class GeneratedOutput:
    """One text of an answer."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    cumulative_logprob: float
    """Natural logarithm; 0 where log probabilities were not asked for."""
    logprobs: str
    """JSON, see `return_logprobs`; empty where they were not asked for."""
    prompt_logprobs: str | None = None
    """JSON, see `GenerationParameters.prompt_logprobs`; None where they were not asked for."""


# --- the configuration -----------------------------------------------------------------------------------------------


def missing_ports(
    config: Mapping[str, Any], parameters_as_inputs: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The inputs and outputs that config.pbtxt leaves out, in Triton's form.

    Args:
        config: The model configuration as Triton gives it: `input`, `output`, `max_batch_size`, ...
        parameters_as_inputs: Whether to declare every request parameter as an optional input as well.
    """
    has_inputs, has_outputs = ({port["name"] for port in config[side]} for side in ("input", "output"))
    prompt_dims = [1 if config["max_batch_size"] > 0 else -1]
    inputs: list[dict[str, Any]] = [  # the prompt's absence is ours to say
        {"name": PROMPT, "data_type": "TYPE_STRING", "dims": prompt_dims, "optional": True}
    ]
    if parameters_as_inputs:
        inputs.append({"name": MESSAGES, "data_type": "TYPE_STRING", "dims": [-1], "optional": True})
        inputs += [
            {"name": name, "data_type": _triton_types(name)[0], "dims": [-1 if _is_many(name) else 1], "optional": True}
            for name in (*PARAMETERS, *ALIASES, *DIALECT_INPUTS)
        ]
    outputs = [
        {"name": name, "data_type": data_type, "dims": [-1]}
        for name, data_type in OUTPUTS.items()
        if name != TEXT_OLD and not (name == TEXT and TEXT_OLD in has_outputs)
    ]
    return [port for port in inputs if port["name"] not in has_inputs], [
        port for port in outputs if port["name"] not in has_outputs
    ]


def _triton_types(name: str) -> tuple[str, ...]:
    """The tensor types that hold a parameter's value, the one we declare first."""
    if name in DIALECT_INPUTS:
        return (DIALECT_INPUTS[name],)
    types = TENSOR_TYPES[_python_type(name)]
    if _is_many(name):
        types = tuple(dict.fromkeys([*types, "TYPE_STRING"]))  # or all of them as one JSON text
    return tuple(dict.fromkeys([DIALECT_TYPES.get(name, types[0]), *types]))


def _is_many(name: str) -> bool:
    """Whether a parameter holds several texts or numbers."""
    return name not in DIALECT_INPUTS and typing.get_origin(_declared_type(name)) is tuple


def _python_type(name: str) -> type:
    """A parameter's type, or that of its elements."""
    declared = _plain_type(typing.get_args(_declared_type(name))[0]) if _is_many(name) else _declared_type(name)
    found: type = typing.get_origin(declared) or declared
    return found


def _declared_type(name: str) -> Any:
    parameter = ALIASES.get(name, name)
    return _plain_type(typing.get_args(PARAMETERS[parameter].model_fields[parameter].annotation)[0])  # of `it | None`


def _plain_type(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that could not be served as it reads.

    Raises:
        SettingsError: An input or output is unknown, of a wrong type or reshaped; a sequence batcher brings inputs of
            its own; the response cache would mix requests up.
    """
    for port in config["input"]:
        _check_input(port["name"], port["data_type"])
    for port in config["output"]:
        if OUTPUTS.get(port["name"]) != port["data_type"]:
            known = ", ".join(f"{name} {data_type}" for name, data_type in OUTPUTS.items())
            raise SettingsError(
                f"config.pbtxt declares the output '{port['name']}' as {port['data_type']}; the outputs are {known}"
            )
    for port in (*config["input"], *config["output"]):
        if port.get("reshape"):
            raise SettingsError(
                f"config.pbtxt reshapes {port['name']}, whose last dimension must be that of the prompts: leave it out"
            )
    for kind in ("control_input", "state"):
        if config.get("sequence_batching", {}).get(kind):
            raise SettingsError(
                f"sequence_batching has {kind}, and a request here depends on no other: take it out of config.pbtxt"
            )
    if config.get("response_cache", {}).get("enable"):
        raise SettingsError(
            "response_cache is on, but Triton's cache ignores request parameters and would answer one request with "
            "another's text: take it out of config.pbtxt"
        )


def _check_input(name: str, data_type: str) -> None:
    parameter = ALIASES.get(name, name)
    if name not in (PROMPT, MESSAGES, *DIALECT_INPUTS) and parameter not in PARAMETERS:
        raise SettingsError(
            f"config.pbtxt declares the input '{name}', and there is no such request parameter"
            f"{suggest(MEANT.get(name, name), [PROMPT, MESSAGES, *PARAMETERS, *ALIASES])}"
        )
    types = ("TYPE_STRING",) if name in (PROMPT, MESSAGES) else _triton_types(name)
    if data_type not in types:
        raise SettingsError(f"config.pbtxt declares {name} as {data_type}; it must be {' or '.join(types)}")


# --- requests --------------------------------------------------------------------------------------------------------


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
    check_names(parameters)  # first: of a misspelt `text_input`, the spelling is to be told
    has_chat = MESSAGES in inputs or MESSAGES in parameters
    if not has_chat and PROMPT not in inputs and str(parameters.get("stop")).lower() == "true":
        got = clip(parameters["stop"])
        raise RequestError("invalid_parameter", f"stop gives a request up where it is true without quotes, got {got}")
    if has_chat == (PROMPT in inputs):
        raise RequestError("invalid_input", f"give {PROMPT} or {MESSAGES}, one of them")
    prompts: Sequence[str | Chat] = [] if has_chat else decode_texts(inputs[PROMPT], limits)
    rows = _rows_of_parameters(inputs, parameters, 1 if has_chat else len(prompts))
    if has_chat:
        prompts = [_parse_chat(inputs, parameters, rows[0], limits)]
    elif not all(CHAT_OPTIONS.isdisjoint(row) for row in rows):
        names = ", ".join(sorted({name for row in rows for name in CHAT_OPTIONS & row.keys()}))
        raise RequestError("invalid_parameter", f"{names} has no effect without {MESSAGES}: leave it out")
    options = _parse_rows(_parse_options, rows)
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
        given = [_decode_value(MESSAGES, each) for each in array.ravel()]
    if not isinstance(given, (str, list)):
        raise RequestError("invalid_input", f"{MESSAGES} must be a JSON text, got {clip(given)}")
    options = {name: value for name, value in row.items() if name in CHAT_OPTIONS}
    return parse_chat(given, options, limits.max_prompt_bytes)


def asks_to_cancel(parameters: Mapping[str, object]) -> bool:
    """Whether a request only gives up those with its own id: `"stop": true`, as the TensorRT-LLM backend has it."""
    return parameters.get("stop") is True


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
    shared = {name: value for name, value in parameters.items() if not _is_tritons_own(name) and name != MESSAGES}
    rows = [dict(shared) for _ in range(num_rows)]
    for name, array in inputs.items():
        if name in (PROMPT, MESSAGES):
            continue
        if name in shared:
            raise RequestError(
                "invalid_parameter", f"{name} is given twice, as an input and as a parameter: leave one out"
            )
        for row, value in zip(rows, _values(name, array, num_rows), strict=True):
            row[name] = value
    return rows


def check_names(parameters: Mapping[str, object]) -> None:
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


def _values(name: str, array: Array, num_rows: int) -> list[object]:
    """A parameter tensor's value for each prompt: one for all, or one each; of several texts, a row each or all."""
    if _is_many(name):
        parts = array if array.ndim == 2 else array.reshape(1, -1)
        if len(parts) not in (1, num_rows):
            raise RequestError(
                "invalid_parameter",
                f"{name} has {len(parts)} rows for {num_rows} prompts: give one, or one for each prompt",
            )
        values = [_plain_values(name, part) for part in parts]
    else:
        if array.size not in (1, num_rows):
            raise RequestError(
                "invalid_parameter",
                f"{name} has {array.size} values for {num_rows} prompts: give one, or one for each prompt",
            )
        values = [_plain_value(name, each) for each in array.ravel()]
    return values * num_rows if len(values) == 1 else values


def _plain_values(name: str, array: Array) -> object:
    """One element may be a JSON text of them all; empty texts fill a row up where another one has more."""
    values = [value for each in array if (value := _plain_value(name, each)) != ""]
    return values[0] if len(values) == 1 else values


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
        values = json.loads(text, object_pairs_hook=each_once)
    except RequestError:
        raise
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RequestError(
            "invalid_parameter", f"sampling_parameters must be a JSON object, got {clip(text)}{why_no_json(text)}"
        )
    return {name: _number(name, value) for name, value in values.items() if not (name == "logprobs" and value is False)}


def _number(name: str, value: object) -> object:
    """A number that comes as a text, as genai-perf and the vLLM backend's own client write it."""
    parameter = ALIASES.get(name, name)
    is_number = parameter in GenerationParameters.model_fields and _python_type(name) in (bool, int, float)
    if not is_number or not isinstance(value, str):
        return value
    try:
        return json.loads(value) if len(value) <= MAX_NUMBER else value
    except (ValueError, RecursionError):
        return value


def _parse_options(row: Mapping[str, object]) -> RequestOptions:
    said = {name: value for name, value in row.items() if name in OPTIONS}
    try:
        return RequestOptions.model_validate(said) if said else NO_OPTIONS
    except ValidationError as error:
        raise RequestError("invalid_parameter", problems(RequestOptions, error)[0].sentence) from None


# --- answers ---------------------------------------------------------------------------------------------------------


def encode_answer(
    texts: Sequence[GeneratedOutput], request: GenerationRequest, output_names: Iterable[str]
) -> dict[str, Array]:
    """An answer's outputs: the text, and what else the request asks for.

    Args:
        texts: In row order, the sequences of one prompt side by side.
        request: What is answered.
        output_names: The outputs that the folder declares.
    """
    outputs = {}
    for name in output_names:
        if name in TEXTS:
            outputs[name] = encode_texts([each.text for each in texts], request.shape)
        elif name == PROMPT_LOGPROBS:
            found = [each.prompt_logprobs for each in texts]
            if any(each is not None for each in found):
                outputs[name] = encode_texts([each or "null" for each in found], request.shape)
        elif getattr(request.options, f"return_{name}"):
            values = [getattr(each, name) for each in texts]
            is_text = OUTPUTS[name] == "TYPE_STRING"
            outputs[name] = encode_texts(values, request.shape) if is_text else _numbers(name, values, request.shape)
    return outputs


def encode_times(
    arrival_s: float, *, admitted_s: float | None, first_token_s: float | None, answered_s: float
) -> dict[str, int]:
    """What `return_timings` asks for, as parameters of a response; of what did not happen there is none.

    Args:
        arrival_s: When the request came; all by one clock.
        admitted_s: When its first prompt left the queue.
        first_token_s: When its first text had a token.
        answered_s: When its answer was made.
    """
    ends_s = {
        "queue_time_us": admitted_s,
        "time_to_first_token_us": first_token_s,
        "e2e_request_latency_us": answered_s,
    }
    return {name: round((end_s - arrival_s) * 1e6) for name, end_s in ends_s.items() if end_s is not None}


def encode_pieces(pieces: Sequence[str], request: GenerationRequest, output_names: Iterable[str]) -> dict[str, Array]:
    """A part of a stream: what each text goes on with, empty where it does not."""
    return {name: encode_texts(pieces, request.shape) for name in output_names if name in TEXTS}


def _numbers(name: str, values: Sequence[float], shape: tuple[int, ...]) -> Array:
    dtype = np.float32 if OUTPUTS[name] == "TYPE_FP32" else np.uint32
    return np.array(values, dtype).reshape(*shape[:-1], -1)


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
