# SPDX-License-Identifier: Apache-2.0
"""One request: from tensors and parameters to checked prompts and parameters. Knows no model."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypeVar

from pydantic import BaseModel

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.chat_request import Chat
from hf_triton.protocol.declared_ports import PROMPT_LOGPROBS, element_type, is_array
from hf_triton.protocol.dialects import ALIASES, BEAM_SEARCH, GUIDES, NO_EFFECT, SUGGESTIONS, UNSUPPORTED, has_no_effect
from hf_triton.protocol.names import CANCEL, IMAGE, MESSAGES, PROMPT, PROMPT_ALIASES, PROMPT_TOKEN_IDS
from hf_triton.protocol.parameters import GenerationParameters, parse_parameters, unknown_parameter
from hf_triton.protocol.prompts import (
    SOURCES,
    Limits,
    Prompt,
    decode_chat,
    decode_texts,
    decode_token_ids,
    prompt_shape,
    read_images,
)
from hf_triton.protocol.request_options import CHAT_OPTIONS, OPTIONS, PARAMETERS, RequestOptions, parse_options
from hf_triton.protocol.request_values import given_name, in_row, is_triton_parameter, merge_values
from hf_triton.protocol.tensor_values import Array, values_per_prompt
from hf_triton.protocol.validation import MAX_JSON, json_error, read_json, reject_duplicates
from hf_triton.sentence import param, param_list

NOT_PARAMETERS: Final = (*SOURCES, IMAGE)
PARAMETER_NAMES: Final = frozenset({*PARAMETERS, *ALIASES, BEAM_SEARCH, *GUIDES, *SOURCES})
"""Every name of a parameter or a prompt of text generation."""
MAX_NUMBER_CHARS: Final = 64
MAX_NAMES: Final = 1024
MIN_LIKENESS: Final = 0.75
"""A name at least this like another, from 0 to 1, is taken for it misspelt."""
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class GenerationRequest:
    prompts: Sequence[Prompt]
    """Strings, or one chat or array of token ids."""
    parameters: list[GenerationParameters]
    options: RequestOptions
    shape: tuple[int, ...]
    """The shape of `text_input`, which the outputs follow."""
    images: tuple[bytes, ...] = ()
    """Image files beside the one text of a request, in the order of its placeholders; a chat has its own."""
    is_from_mlserver: bool = False
    """Whether the prompts came in one of `PROMPT_ALIASES`."""
    fills_text: bool = True
    """Whether the response has the text as it is."""

    @property
    def files(self) -> tuple[bytes, ...]:
        """All image files, those of its chats too."""
        return sum([prompt.images for prompt in self.prompts if isinstance(prompt, Chat)], self.images)

    @property
    def has_images(self) -> bool:
        return bool(self.images) or any(isinstance(prompt, Chat) and prompt.images for prompt in self.prompts)


def with_named_outputs(
    parameters: Mapping[str, object], inputs: Collection[str], named: Sequence[str]
) -> Mapping[str, object]:
    """A request's parameters, plus `return_NAME` for every output that it lists."""
    if PROMPT_LOGPROBS in named and PROMPT_LOGPROBS not in (*parameters, *inputs):
        raise RequestError(
            "invalid_parameter", f"the output {param(PROMPT_LOGPROBS)} is filled by the parameter of that name: add it"
        )
    names = (f"return_{name}" for name in named)
    return {**{name: True for name in names if name in OPTIONS and name not in inputs}, **parameters}


def is_cancel_request(parameters: Mapping[str, object]) -> bool:
    """Whether a request only cancels the requests of its own id: `cancel` true, or `stop` true as in TensorRT-LLM."""
    return parameters.get(CANCEL) is True or parameters.get("stop") is True


def parse_request(inputs: Mapping[str, Array], parameters: Mapping[str, object], limits: Limits) -> GenerationRequest:
    """Check one request.

    Args:
        inputs: Tensors by name. `text_input` holds UTF-8 `bytes` and has shape `[n]`, or `[batch, n]`; a parameter's
            tensor holds one value, or one per prompt; arrays and objects may be JSON strings. `image` holds files.
        parameters: The request's parameters, by name or alias.
        limits: What to accept.
    """
    if parameters.get("stop") is False:  # TensorRT-LLM's default: cancel nothing
        parameters = {name: value for name, value in parameters.items() if name != "stop"}
    check_parameter_names(parameters)  # first, so that a misspelt `text_input` is reported as one
    inputs, is_from_mlserver = _with_prompts(inputs)
    source, value = _find_source(inputs, parameters)
    prompts: Sequence[Prompt] = decode_texts(PROMPT, inputs[PROMPT], limits, "prompt") if source == PROMPT else []
    images = read_images(merge_values(inputs, parameters).get(IMAGE), limits)
    rows = _parameters_per_prompt(inputs, parameters, len(prompts) or 1)
    if source == MESSAGES:
        chat_options = {name: value for name, value in rows[0].items() if name in CHAT_OPTIONS}
        prompts, images = [decode_chat(value, chat_options, limits, images)], ()
    elif not all(CHAT_OPTIONS.isdisjoint(row) for row in rows):
        names = param_list(sorted({name for row in rows for name in CHAT_OPTIONS & row.keys()}))
        raise RequestError("invalid_parameter", f"{names} has no effect without {param(MESSAGES)}: leave it out")
    elif source == PROMPT_TOKEN_IDS:
        prompts = [decode_token_ids(value, limits)]
    if images and (source != PROMPT or len(prompts) > 1):
        names = param_list((PROMPT, MESSAGES), " or ")
        raise RequestError("invalid_input", f"{param(IMAGE)} goes with one {names}: send a request for each")
    options = _parse_rows(parse_options, rows)
    _check_equal(options, OPTIONS - {"sampling_parameters"})
    generation = _parse_rows(_parse_generation, rows)
    if any(row.logprobs is not None for row in generation) and not options[0].return_logprobs:
        raise RequestError(
            "invalid_parameter", f"{param('logprobs')} has no effect without {param('return_logprobs')} true: add it"
        )
    _check_equal(generation, {"num_return_sequences"})
    if isinstance(prompts[0], Chat) and prompts[0].forced_call is not None:
        _check_unconstrained(generation[0])
    whole = options[0].model_copy(update={"stream": False}) if options[0].tokenize_only else options[0]
    return GenerationRequest(prompts, generation, whole, prompt_shape(inputs), images, is_from_mlserver)


def _with_prompts(inputs: Mapping[str, Array]) -> tuple[Mapping[str, Array], bool]:
    """A request's tensors with the prompts under their own name, and whether they had another."""
    name = given_name((PROMPT, *PROMPT_ALIASES), inputs)
    if name is None or name == PROMPT:
        return inputs, False
    return {PROMPT if other == name else other: array for other, array in inputs.items()}, True


def with_default_outputs(
    request: GenerationRequest, *, names_outputs: bool, has_json: bool, fills_json: bool
) -> GenerationRequest:
    """A request that says whether the output `output`, if the response can have it, is filled.

    One in MLServer's form that names no outputs gets this one alone, in the shape `[n, 1]`.
    """
    wanted = request.options.return_output
    if not has_json:
        if wanted:
            raise RequestError(
                "invalid_parameter",
                f"{param('return_output')} cannot be streamed: leave it out, or say {param('stream')} false",
            )
        return request
    if wanted is None:
        wanted = fills_json or request.is_from_mlserver
    options = request.options.model_copy(update={"return_output": wanted})
    is_alone = wanted and request.is_from_mlserver and not names_outputs
    shape = (*request.shape, 1) if is_alone and len(request.shape) == 1 else request.shape
    return replace(request, options=options, fills_text=not is_alone, shape=shape)


def _find_source(inputs: Mapping[str, Array], parameters: Mapping[str, object]) -> tuple[str, object]:
    """The one of `SOURCES` that a request gives, and its tensor or its value as a parameter."""
    given = [name for name in SOURCES if name in inputs or name in parameters]
    if len(given) > 1:
        raise RequestError("invalid_input", f"give one of {param_list(SOURCES)}, got {param_list(given, ' and ')}")
    if not given:
        is_to_cancel = not {"stop", CANCEL}.isdisjoint({*inputs, *parameters})
        hint = f"; to cancel a request, send its id and {param(CANCEL)} true without quotes" if is_to_cancel else ""
        raise RequestError("invalid_input", f"give one of {param_list(SOURCES)}{hint}")
    [name] = given
    return name, inputs.get(name, parameters.get(name))


def _check_unconstrained(parameters: GenerationParameters) -> None:
    """Refuse parameters that contradict a `tool_choice` which makes the model call a tool.

    A `response_format` does not: it is for text, and there is none.
    """
    grammar = parameters.grammar
    also = parameters.end_parameter if grammar is None or grammar.parameter == "response_format" else grammar.parameter
    if also:
        raise RequestError(
            "invalid_parameter",
            f"{param(also)} and this {param('tool_choice')} both constrain the output: leave one of them out, or say "
            f"{param('tool_choice')} auto",
        )


def _check_equal(rows: Sequence[BaseModel], names: Iterable[str]) -> None:
    """Refuse prompts that differ in a parameter of the whole request."""
    if all(row is rows[0] for row in rows[1:]):
        return
    for name in sorted(names):
        if len({getattr(row, name) for row in rows}) > 1:
            raise RequestError("invalid_parameter", f"{param(name)} must be the same for all rows of a request")


def _parameters_per_prompt(
    inputs: Mapping[str, Array], parameters: Mapping[str, object], num_rows: int
) -> list[dict[str, object]]:
    """Each prompt's parameters, from request parameters and from tensors."""
    given = merge_values(inputs, parameters)
    rows = [{name: value for name, value in given.items() if name not in NOT_PARAMETERS} for _ in range(num_rows)]
    for name, array in inputs.items():
        if name not in NOT_PARAMETERS:
            values = values_per_prompt(name, array, num_rows, is_array=is_array(name))
            for row, value in zip(rows, values, strict=True):
                row[name] = value
    return rows


def check_parameter_names(parameters: Mapping[str, object]) -> None:
    """Refuse unknown parameters, and suggest known ones."""
    for name, value in parameters.items():
        if not (_is_known(name) or has_no_effect(name, value)):
            raise unknown_parameter(name, (*OPTIONS, *CHAT_OPTIONS, *NOT_PARAMETERS))


def is_parameter_name(name: str) -> bool:
    """Whether a name is a parameter's, one that is refused with advice included."""
    return _is_known(name) or name in UNSUPPORTED or name in NO_EFFECT or name in NOT_PARAMETERS


@lru_cache(MAX_NAMES)
def resembles_parameter(name: str) -> bool:
    """Whether a name looks like a misspelt parameter."""
    if not re.fullmatch("[a-z0-9_]{1,64}", name):
        return False
    known = [*PARAMETERS, *ALIASES, BEAM_SEARCH, *GUIDES, *SOURCES, *SUGGESTIONS]
    return bool(difflib.get_close_matches(name, known, n=1, cutoff=MIN_LIKENESS))


def _is_known(name: str) -> bool:
    is_own = ALIASES.get(name, name) in PARAMETERS or name in (MESSAGES, PROMPT_TOKEN_IDS, IMAGE, BEAM_SEARCH, *GUIDES)
    return is_own or is_triton_parameter(name)


def _parse_rows(parse: Callable[[Mapping[str, object]], Parsed], rows: Sequence[Mapping[str, object]]) -> list[Parsed]:
    """Parse each prompt's parameters, once if they are equal; otherwise an error names the row."""
    if all(row == rows[0] for row in rows[1:]):
        return [parse(rows[0])] * len(rows)
    parsed = []
    for number, row in enumerate(rows):
        try:
            parsed.append(parse(row))
        except RequestError as error:
            raise in_row(error, number) from None
    return parsed


def _parse_generation(row: Mapping[str, object]) -> GenerationParameters:
    own = {name: value for name, value in row.items() if name not in OPTIONS and name not in CHAT_OPTIONS}
    packed = _unpack_sampling_parameters(row.get("sampling_parameters"))
    for name in packed.keys() & own.keys():  # the vLLM backend's own client sends every parameter twice, as a string
        if packed[name] != _read_number(name, own[name]):
            raise RequestError(
                "invalid_parameter",
                f"{param(name)} is given twice, in {param('sampling_parameters')} and beside it, with two values: "
                "leave one out",
            )
    return parse_parameters(own | packed)


def _unpack_sampling_parameters(text: object) -> dict[str, object]:
    """Parse the vLLM backend's `sampling_parameters`."""
    if not isinstance(text, str) or not text.strip():
        return {}
    if len(text) > MAX_JSON:
        raise RequestError(
            "invalid_parameter",
            f"{param('sampling_parameters')} must be JSON of up to {MAX_JSON} characters, got {len(text)}",
        )
    try:
        values = json.loads(text, object_pairs_hook=reject_duplicates)
    except RequestError:
        raise
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RequestError(
            "invalid_parameter",
            f"{param('sampling_parameters')} must be a JSON object, got {clip(text)}{json_error(text)}",
        )
    if values.get("logprobs") is False:  # Triton's OpenAI frontend, for none
        del values["logprobs"]
    return {name: _read_number(name, value) for name, value in values.items()}


def _read_number(name: str, value: object) -> object:
    """Read a number or boolean that is sent as a string, as genai-perf and the vLLM backend's own client do."""
    parameter = ALIASES.get(name, name)
    is_number = parameter in GenerationParameters.model_fields and element_type(name) in (bool, int, float)
    return read_json(value) if is_number and isinstance(value, str) and len(value) <= MAX_NUMBER_CHARS else value
