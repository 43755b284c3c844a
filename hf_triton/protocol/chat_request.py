# SPDX-License-Identifier: Apache-2.0
"""Chats: `messages` and their options, from JSON to a checked conversation. Knows no tokenizer.

A chat is input to a program, the model's chat template: number, depth and size are bounded here to bound the template's
running time.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Final, Self, cast

import annotated_types
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.custom_tools import (
    CUSTOM,
    CustomTool,
    FunctionTool,
    as_function,
    as_function_call,
    custom_of,
    format_of,
    hosted_type,
)
from hf_triton.protocol.image_files import (
    FORM,
    LOOSE,
    MAX_BASE64,
    ImageParts,
    count_base64,
    is_elsewhere,
    is_image,
    is_read,
    take_files,
)
from hf_triton.protocol.names import MESSAGES
from hf_triton.protocol.past import MAX_DEPTH, READ, is_deep, read_assistant_message
from hf_triton.protocol.tool_choice import ForcedCall, allowed_tools, forced_call, read_tool_choice
from hf_triton.protocol.validation import MAX_JSON, is_slip, parse_json, problems, suggest, validated
from hf_triton.sentence import param, param_list

logger = logging.getLogger(__name__)

EXAMPLE: Final = '{"role": "user", "content": "..."}'
ASSISTANT: Final = "assistant"
TOOL: Final = "tool"
MAX_MESSAGES: Final = 1024  # some templates loop over all earlier messages for each: quadratic time
MAX_TOOLS: Final = 128
MAX_UNKNOWN: Final = 64
"""Fields of a message that are passed over: each is compared with the known ones."""
MAX_ARGUMENT: Final = 1_000_000  # a template may loop as often as an argument says

RESERVED: Final = frozenset(
    {
        # set by other request parameters
        *(MESSAGES, "conversation", "conversations", "tools", "add_generation_prompt", "continue_final_message"),
        # transformers' own arguments
        *("self", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        # functions of every template
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner", "lipsum"),
        # special tokens of the tokenizer
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("additional_special_tokens", "extra_special_tokens"),
    }
)
"""Names that `chat_template_kwargs` may not set."""


# --- reading ---------------------------------------------------------------------------------------------------------


def _parse_bounded(name: str, value: object, most: int = MAX_JSON) -> Any:
    """Parse a string as JSON of up to `most` characters, and bound the depth of any value."""
    if isinstance(value, str):
        try:
            value = parse_json(value, most)
        except ValueError as error:
            raise ValueError(f"{param(name)} is not JSON: {error}") from None
    if is_deep(value):
        raise ValueError(f"{param(name)} is nested more than {MAX_DEPTH} levels deep")
    return value


def _read_tools(value: object) -> tuple[object, ...]:
    value = _parse_bounded("tools", value)
    given = enumerate(value if isinstance(value, list) else [value])
    tools = {(name := f"tools[{index}]"): _parse_bounded(name, tool) for index, tool in given}
    read = tuple(_read_tool(name, tool) for name, tool in tools.items() if not _is_hosted(tool))
    names = [(custom_of(tool) or tool["function"])["name"] for tool in read]
    for name in (custom["name"] for tool in read if (custom := custom_of(tool))):
        if names.count(name) > 1:
            raise ValueError(
                f"{param('tools')} has several of the name {clip(name)}: give the custom tool a name of its own"
            )
    return read


def _is_hosted(tool: object) -> bool:
    if kind := hosted_type(tool):
        _log_hosted(clip(kind))
    return kind is not None


@lru_cache(MAX_TOOLS)
def _log_hosted(kind: str) -> None:
    """Log the first tool of a type."""
    logger.info("passed over: tools of type %s, which this server has not", kind)


def _read_tool(name: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != CUSTOM:
        read = _function_object(name, FunctionTool, tool)
        return read | {"function": {key: given for key, given in read["function"].items() if given is not None}}
    custom = _checked(f"{name}.{CUSTOM}", CustomTool, tool.get(CUSTOM))
    try:
        format_of(custom)
    except ValueError as error:
        raise ValueError(f"{param(f'{name}.{CUSTOM}')}: {error}") from None
    return {**tool, CUSTOM: custom}


def _read_kwargs(value: object) -> object:
    value = _parse_bounded("chat_template_kwargs", value)
    for name, argument in value.items() if isinstance(value, dict) else ():
        if name in RESERVED:
            raise ValueError(f"{param('chat_template_kwargs')} cannot set {name}: take it out")
        if isinstance(argument, int | float) and abs(argument) > MAX_ARGUMENT:
            bounds = f">= -{MAX_ARGUMENT} and <= {MAX_ARGUMENT}"
            place = f"{param('chat_template_kwargs')}: {clip(name)}"
            raise ValueError(f"{place} must be {bounds}, got {clip(argument)}")
    return value


def _read_content(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """A string, or OpenAI's array of parts: joined by newlines as in vLLM, or, with images among them, as it is."""
    if not isinstance(value, list):
        return check(value)
    if not value:
        raise ValueError("content is an empty array: give a string")
    texts = {index: _read_text(index, part) for index, part in enumerate(value) if not is_read(part)}
    if len(texts) == len(value):
        return "\n".join(texts.values())
    return [{"type": "text", "text": texts[i]} if i in texts else part for i, part in enumerate(value)]


def _read_text(index: int, part: object) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind != "text" and isinstance(kind, str):
        raise ValueError(f"content[{index}] is of type {clip(kind)}; messages have parts of type 'text' and images")
    if kind != "text" or not isinstance(text, str):
        raise ValueError(f'content[{index}] must be {{"type": "text", "text": "..."}}, got {clip(part)}')
    return text


def _read_tool_calls(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [_read_tool_call(f"tool_calls[{index}]", call) for index, call in enumerate(value)]


def _read_tool_call(name: str, call: object) -> dict[str, Any]:
    if isinstance(call, dict) and call.get("type") == CUSTOM:
        try:
            call = as_function_call(call)
        except ValueError as error:
            raise ValueError(f"{param(name)} {error}") from None
    read = _function_object(name, _ToolCall, call)
    return read | {"id": str(read["id"])} if "id" in read else read


def _read_arguments(value: object) -> object:
    """A call's arguments as an object, which templates expect; OpenAI's API has a JSON string."""
    return {} if value == "" else _parse_bounded("arguments", value)


def _function_object(name: str, model: type[BaseModel], value: object) -> dict[str, Any]:
    """OpenAI's `{"type": "function", "function": {...}}`, with the function checked and other fields kept."""
    if not isinstance(value, dict) or value.get("type", "function") != "function" or "function" not in value:
        raise ValueError(f'{param(name)} must be {{"type": "function", "function": {{...}}}}, got {clip(value)}')
    return value | {"function": _checked(f"{name}.function", model, value["function"])}


def _checked(name: str, model: type[BaseModel], value: object) -> dict[str, Any]:
    """An object with the fields of `model` checked; their order is kept, because templates print it."""
    if not isinstance(value, dict):
        raise ValueError(f"{param(name)} must be a JSON object, got {clip(value)}")
    try:
        return value | model.model_validate(value).model_dump(exclude_unset=True, warnings=False)
    except ValidationError as error:
        raise ValueError(f"{param(name)}: {problems(model, error)[0].sentence}") from None


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class _ToolCall(_Declared):
    name: Annotated[str, annotated_types.MinLen(1)]
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments)] = {}


class _Message(_Declared):
    role: Annotated[str, annotated_types.MinLen(1)]
    content: Annotated[str, WrapValidator(_read_content)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], BeforeValidator(_read_tool_calls)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("content is required without tool_calls")
        return self


class ChatOptions(_Declared):
    """Options that render a chat as a prompt; None means "not given"."""

    add_generation_prompt: bool | None = None
    """Whether to append the start of an assistant message to the prompt. By default true, unless
    `continue_final_message` is."""

    continue_final_message: bool | None = None
    """Whether the model continues the last of the `messages`, which must be the assistant's, instead of starting a new
    one."""

    tools: (
        Annotated[tuple[dict[str, Any], ...], annotated_types.MaxLen(MAX_TOOLS), BeforeValidator(_read_tools)] | None
    ) = None
    """Functions that the model may call, as in OpenAI's API:
    `[{"type": "function", "function": {"name": "weather", "parameters": {}}}]`; also custom tools, of one text:
    `{"type": "custom", "custom": {"name": "patch"}}`. Calls of a function with `"strict": true` follow its schema."""

    tool_choice: Annotated[str, BeforeValidator(read_tool_choice)] | None = None
    """Which of the `tools` the model calls: `auto` (it chooses), `none` (the model does not see them), `required` (one
    or more), or `{"type": "function", "function": {"name": "weather"}}` (this one). The last two are enforced by a
    grammar made of the tools' `parameters` or `format`, with any model, and cannot be combined with `response_format`
    or the `guided_` parameters. `{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools":
    [...]}}` leaves the model those tools, with the mode `auto` or `required`. By default `auto`."""

    parallel_tool_calls: bool | None = None
    """Whether a message may have several tool calls. If false, the output `message` has the first one only. By default
    true."""

    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_read_kwargs)] | None = None
    """Variables for the model's chat template, as a JSON object: `{"enable_thinking": false}`. A variable that the
    template does not read is a hint: it is passed over, and the log says so once. `enable_thinking` and `thinking` are
    one switch."""

    reasoning_effort: Annotated[str, annotated_types.MinLen(1), annotated_types.MaxLen(100)] | None = None
    """The variable of that name of the model's chat template, as in OpenAI's API: `low`, `high`. If the template does
    not read it, it is passed over. `none` also switches thinking off."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.reasoning_effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ValueError(
                f"{param('reasoning_effort')} is given twice, in {param('chat_template_kwargs')} and beside it: leave "
                "one out"
            )
        for name in ("tool_choice", "parallel_tool_calls"):
            if self.tools is None and getattr(self, name) is not None:
                raise ValueError(
                    f"{param(name)} has no effect without {param('tools')}: add {param('tools')}, or leave it out"
                )
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                f"{param('add_generation_prompt')} starts a new message, {param('continue_final_message')} continues "
                "the last one: leave one of them out"
            )
        return self


@dataclass(frozen=True)
class Chat:
    """A checked conversation, in the form that templates expect."""

    messages: tuple[dict[str, Any], ...]
    """Content is a string in each, or, where there are images, parts of `type` `text` or `image` in order; the
    arguments of tool calls are objects, nothing is None."""
    tools: tuple[dict[str, Any], ...] | None
    """The tools that the model may call, or has to, custom ones as functions."""
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    is_parallel: bool = True
    """Whether the answer may have several tool calls."""
    forced_call: ForcedCall | None = None
    custom_names: frozenset[str] = frozenset()
    strict: Mapping[str, bool] = field(default_factory=dict)
    """Whether calls of a tool follow its schema, for those that say so."""
    images: tuple[bytes, ...] = ()
    """Image files, one for each part of type `image`, in order; not looked at yet."""
    image_places: tuple[str, ...] = ()
    """Where the client has them: `messages[0].content[1]`."""


def parse_chat(
    messages: str | Sequence[str], options: Mapping[str, object], max_bytes: int, images: ImageParts | None = None
) -> Chat:
    """Check a chat.

    Args:
        messages: An array of messages as JSON, or one JSON string per message.
        options: The request's `ChatOptions`; arrays and objects may be JSON strings.
        max_bytes: Limit of messages, tools and template arguments together, as UTF-8, without images.
        images: Reads the images among the messages; None: the model takes none.

    Raises:
        RequestError: The message names the field (`messages[2].content`), its value and what is allowed.
    """
    texts = [messages] if isinstance(messages, str) else list(messages)
    given = [entry for value in options.values() for entry in (value if isinstance(value, list) else [value])]
    images = ImageParts() if images is None else images
    num_base64 = sum(map(count_base64, texts))
    num_bytes = sum(len(text.encode(errors="replace")) for text in [*texts, *given] if isinstance(text, str))
    num_bytes -= num_base64
    if num_base64 > MAX_BASE64:
        raise RequestError(
            "invalid_input",
            f"{param(MESSAGES)} hold {num_base64} characters of base64, more than the {MAX_BASE64} that are accepted: "
            "send fewer images, or smaller ones",
        )
    if num_bytes > max_bytes:
        raise RequestError(
            "context_exceeded",
            f"{param_list((MESSAGES, 'tools'))} and {param('chat_template_kwargs')} have {num_bytes} bytes, more than "
            f"the {max_bytes} that are accepted (setting max_prompt_bytes)",
            sizes={"bytes": num_bytes, "limit": max_bytes},
        )
    checked = validated(ChatOptions, options)
    try:
        conversation = _parse_messages(texts, images, MAX_JSON + num_base64)
        if checked.continue_final_message:
            _check_final_message(conversation)
    except RequestError:  # about an image
        raise
    except ValueError as error:
        raise RequestError("invalid_input", str(error)) from None
    effort = {} if checked.reasoning_effort is None else {"reasoning_effort": checked.reasoning_effort}
    continues, starts = bool(checked.continue_final_message), checked.add_generation_prompt
    offered = checked.tools or ()
    formats = {custom["name"]: format_of(custom) for tool in offered if (custom := custom_of(tool))}
    functions = tuple(as_function(custom) if (custom := custom_of(tool)) else _shown_tool(tool) for tool in offered)
    strict = {own["name"]: own["strict"] for tool in offered if "strict" in (own := tool.get("function", {}))}
    tools, choice = allowed_tools(functions, checked.tool_choice or "auto")
    is_parallel = checked.parallel_tool_calls is not False
    files = take_files(conversation)
    return Chat(
        tuple(message if "content" in message else message | {"content": ""} for message in conversation),
        None if choice == "none" or not tools else tuple(tools),
        (checked.chat_template_kwargs or {}) | effort,
        add_generation_prompt=not continues if starts is None else starts,
        continue_final_message=continues,
        is_parallel=is_parallel,
        forced_call=forced_call(tools, choice, is_parallel=is_parallel, formats=formats),
        custom_names=frozenset(formats),
        strict=strict,
        images=tuple(files.values()),
        image_places=tuple(files),
    )


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates see it."""
    return tool | {"function": {name: value for name, value in tool["function"].items() if name != "strict"}}


def _parse_messages(texts: Sequence[str], images: ImageParts, most: int) -> tuple[dict[str, Any], ...]:
    """The messages of JSON of up to `most` characters each, their images read."""
    try:
        values = _parse_bounded(MESSAGES, texts[0], most) if len(texts) == 1 else list(texts)
    except ValueError as error:
        raise ValueError(f"{error}; {param(MESSAGES)} must be like [{EXAMPLE}]") from None
    values = values if isinstance(values, list) else [values]
    if not 1 <= len(values) <= MAX_MESSAGES:
        raise ValueError(f"{param(MESSAGES)} must hold 1 to {MAX_MESSAGES} messages, got {len(values)}")
    messages = [_parse_message(f"{MESSAGES}[{index}]", value, images, most) for index, value in enumerate(values)]
    images.check_end()
    return _with_results_in_order(messages)


def _with_results_in_order(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The results of a message's calls in the order of the calls: most templates write them without ids."""
    ordered: list[dict[str, Any]] = []
    for is_result, run in itertools.groupby(messages, lambda message: message["role"] == TOOL):
        if is_result and ordered:
            ids = [call.get("id") for call in ordered[-1].get("tool_calls", ())]
            places = {call_id: place for place, call_id in enumerate(ids)}
            run = iter(sorted(run, key=lambda result: places.get(result.get("tool_call_id"), len(places))))
        ordered += run
    return tuple(ordered)


def _parse_message(name: str, value: object, images: ImageParts, most: int) -> dict[str, Any]:
    value = _parse_bounded(name, value, most)
    if not isinstance(value, dict):
        raise ValueError(f"{param(name)} must be like {EXAMPLE}, got {clip(value)}")
    message = {given: content for given, content in value.items() if content is not None}
    role, parts = message.get("role"), message.get("content")
    if isinstance(parts, list):
        message["content"] = [
            _read_part(f"{name}.content[{index}]", part, role, images) for index, part in enumerate(parts)
        ]
    if role == ASSISTANT:
        message = read_assistant_message(message)
    for number, given in enumerate(unknown_fields(message)):
        if given in LOOSE and message[given] and role not in (ASSISTANT, TOOL):
            raise ValueError(f"{param(name)} has no field {clip(given)}: an image is a part of its content, {FORM}")
        if number >= MAX_UNKNOWN or is_slip(given, _Message.model_fields):
            raise ValueError(f"{param(name)} has no field {clip(given)}{suggest(given, _Message.model_fields)}")
        del message[given]
    return _checked(name, _Message, message)


def unknown_fields(message: Mapping[str, object]) -> list[str]:
    """The fields of a message that no chat template reads (`id`, `cache_control`): they are passed over."""
    known = _Message.model_fields
    if message.get("role") == ASSISTANT:
        return [
            name
            for name, value in message.items()
            if value not in (None, False, [], {}) and name not in {*known, *READ}
        ]
    return [name for name, value in message.items() if value is not None and name not in known]


def _read_part(place: str, part: object, role: object, images: ImageParts) -> object:
    """A part of a content, with its image read.

    What a tool has answered the client cannot leave out: a note stands in place of what the model does not read.
    """
    kind = hidden_type(part) if role == TOOL else None
    if not is_image(part):
        return part if kind is None else {"type": "text", "text": unseen(kind)}
    image = cast("dict[str, Any]", part)
    if kind is not None and not images.max_images:
        return {"type": "text", "text": unseen(kind, "this model reads text alone")}
    if kind is not None and is_elsewhere(image):
        return {"type": "text", "text": unseen(kind, "nothing is fetched")}
    return part if role == ASSISTANT and not images.max_images else images.read(place, image)


def unseen(kind: str, why: str = "this server does not read it") -> str:
    """What the model reads in place of a part of a tool's output."""
    return f"[{clip(kind)[1:-1]}: not shown, as {why}]"


def hidden_type(part: object) -> str | None:
    """The type of a part that holds no text; None: a text, or no part."""
    has_text = not isinstance(part, dict) or (part.get("text") is not None and not is_image(part))
    kind = None if has_text else cast("dict[str, Any]", part).get("type")
    return kind if isinstance(kind, str) and kind != "text" else None


def _check_final_message(messages: Sequence[Mapping[str, Any]]) -> None:
    last, name = messages[-1], f"{MESSAGES}[{len(messages) - 1}]"
    if last["role"] != ASSISTANT:
        raise ValueError(
            f"{param('continue_final_message')} continues a message of the assistant, but {param(name)} is of role "
            f"{clip(last['role'])}"
        )
    if "content" not in last or "tool_calls" in last:
        raise ValueError(
            f"{param('continue_final_message')} continues content, but {param(name)} does not end with content"
        )
    if not isinstance(last["content"], str):
        raise ValueError(f"{param('continue_final_message')} continues text, but {param(name)} holds images")
