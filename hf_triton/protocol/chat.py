# SPDX-License-Identifier: Apache-2.0
"""Chats: `messages` and what belongs to them, from JSON texts to a checked conversation. Knows no tokenizer.

What a client sends is data for a program, the model's chat template: number, depth and size are bounded here, so that
it keeps no template busy that is meant well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

import annotated_types
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.validation import problems, suggest

MESSAGES: Final = "messages"
EXAMPLE: Final = '{"role": "user", "content": "..."}'
ASSISTANT: Final = "assistant"
MAX_MESSAGES: Final = 1024  # some templates look back from every message: their time grows with the square
MAX_TOOLS: Final = 128
MAX_DEPTH: Final = 32  # templates indent tools: every level makes every line of them longer
MAX_ARGUMENT: Final = 1_000_000  # a template may repeat something as often as an argument says

RESERVED: Final = frozenset(
    {
        # what the request says in another place
        *(MESSAGES, "conversation", "conversations", "tools", "add_generation_prompt", "continue_final_message"),
        # transformers' own
        *("self", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        # what every template can call
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner", "lipsum"),
        # the tokenizer's own, and more where it has more
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("additional_special_tokens", "extra_special_tokens"),
    }
)
"""What `chat_template_kwargs` may not set."""


# --- what a client says ----------------------------------------------------------------------------------------------


def _read_json(name: str, value: object) -> Any:
    """Read a JSON text; anything else is taken to be read already."""
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"{name} is no JSON: {error}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(f"{name} is nested more than {MAX_DEPTH} levels deep")
    return value


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _read_tools(value: object) -> tuple[object, ...]:
    value = _read_json("tools", value)
    tools = {f"tools[{place}]": each for place, each in enumerate(value if isinstance(value, list) else [value])}
    return tuple(_function_object(name, _Tool, _read_json(name, each)) for name, each in tools.items())


def _read_kwargs(value: object) -> object:
    value = _read_json("chat_template_kwargs", value)
    for name, each in value.items() if isinstance(value, dict) else ():
        if name in RESERVED:
            raise ValueError(f"chat_template_kwargs cannot set {name}: take it out")
        if isinstance(each, int | float) and abs(each) > MAX_ARGUMENT:
            raise ValueError(
                f"chat_template_kwargs: {clip(name)} must be >= -{MAX_ARGUMENT} and <= {MAX_ARGUMENT}, got {clip(each)}"
            )
    return value


def _read_content(value: object) -> object:
    """A text, or OpenAI's array of parts, as one text: parts stand in lines of their own, as in vLLM."""
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError("content is an empty array: give a text")
    return "\n".join(_read_part(place, part) for place, part in enumerate(value))


def _read_part(place: int, part: object) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind != "text" and isinstance(kind, str):
        raise ValueError(f"content[{place}] is of type {clip(kind)}, and this model takes parts of type 'text' alone")
    if kind != "text" or not isinstance(text, str):
        raise ValueError(f'content[{place}] must be {{"type": "text", "text": "..."}}, got {clip(part)}')
    return text


def _read_tool_calls(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [_function_object(f"tool_calls[{place}]", _ToolCall, each) for place, each in enumerate(value)]


def _read_arguments(value: object) -> object:
    """A call's arguments as an object, which templates expect; OpenAI's API has them as a JSON text."""
    return {} if value == "" else _read_json("arguments", value)


def _function_object(name: str, model: type[BaseModel], value: object) -> dict[str, Any]:
    """OpenAI's `{"type": "function", "function": {...}}`, the function checked; what else it holds is kept."""
    if not isinstance(value, dict) or value.get("type", "function") != "function" or "function" not in value:
        raise ValueError(f'{name} must be {{"type": "function", "function": {{...}}}}, got {clip(value)}')
    return value | {"function": _checked(f"{name}.function", model, value["function"])}


def _checked(name: str, model: type[BaseModel], value: object) -> dict[str, Any]:
    """An object with the fields of `model` checked and read; their order is kept, because templates print it."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {clip(value)}")
    try:
        return value | model.model_validate(value).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ValueError(f"{name}: {problems(model, error)[0].sentence}") from None


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, use_attribute_docstrings=True)


class _Tool(_Declared):
    name: Annotated[str, annotated_types.MinLen(1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ToolCall(_Declared):
    name: Annotated[str, annotated_types.MinLen(1)]
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments)] = {}


class _Message(_Declared):
    role: Annotated[str, annotated_types.MinLen(1)]
    content: Annotated[str, BeforeValidator(_read_content)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], BeforeValidator(_read_tool_calls)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("content is required where there are no tool_calls")
        return self


class ChatOptions(_Declared):
    """How a chat becomes a prompt; None means "not said"."""

    add_generation_prompt: bool | None = None
    """Whether the beginning of an answer is put behind the last of the `messages`. By default true, unless
    `continue_final_message` is."""

    continue_final_message: bool | None = None
    """Whether the model goes on with the last of the `messages`, which must be the assistant's, in place of a new
    one."""

    tools: (
        Annotated[
            tuple[dict[str, Any], ...],
            annotated_types.MinLen(1),
            annotated_types.MaxLen(MAX_TOOLS),
            BeforeValidator(_read_tools),
        ]
        | None
    ) = None
    """Functions that the model may call, as in OpenAI's API:
    `[{"type": "function", "function": {"name": "weather", "parameters": {}}}]`."""

    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_read_kwargs)] | None = None
    """Variables of the model's chat template, as a JSON object: `{"enable_thinking": false}`. One that the template
    does not read is refused."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt begins a new message and continue_final_message goes on with the last one: "
                "leave one of them out"
            )
        return self


@dataclass(frozen=True)
class Chat:
    """A conversation, checked, in the form that templates expect."""

    messages: tuple[dict[str, Any], ...]
    """Content is text, the arguments of tool calls are objects, nothing is None."""
    tools: tuple[dict[str, Any], ...] | None
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


def parse_chat(messages: str | Sequence[str], options: Mapping[str, object], max_bytes: int) -> Chat:
    """Check a chat; knows no model.

    Args:
        messages: The JSON text of an array of messages, or JSON texts of one message each.
        options: Those of `ChatOptions` that the request gives; objects may be JSON texts, and so may an array of them.
        max_bytes: What messages, tools and template arguments may have together, as UTF-8.

    Raises:
        RequestError: The message names the place, `messages[2].content` for one, and what would do.
    """
    texts = [messages] if isinstance(messages, str) else list(messages)
    _check_size([*texts, *(text for value in options.values() for text in _texts_in(value))], max_bytes)
    checked = _parse_options(options)
    try:
        turns = _parse_messages(texts)
        if checked.continue_final_message:
            _check_final_message(turns)
    except ValueError as error:
        raise RequestError("invalid_input", str(error)) from None
    continues, begins = bool(checked.continue_final_message), checked.add_generation_prompt
    return Chat(
        turns,
        checked.tools,
        checked.chat_template_kwargs or {},
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
    )


def _texts_in(option: object) -> list[str]:
    return [each for each in (option if isinstance(option, list) else [option]) if isinstance(each, str)]


def _check_size(texts: Sequence[str], max_bytes: int) -> None:
    num_bytes = sum(len(text.encode(errors="replace")) for text in texts)
    if num_bytes > max_bytes:
        raise RequestError(
            "context_exceeded",
            f"{MESSAGES}, tools and chat_template_kwargs have {num_bytes} bytes, more than the {max_bytes} that are "
            "accepted (setting max_prompt_bytes)",
        )


def _parse_options(options: Mapping[str, object]) -> ChatOptions:
    for name in options:
        if name not in ChatOptions.model_fields:
            raise RequestError(
                "unknown_parameter", f"there is no parameter {clip(name)}{suggest(name, ChatOptions.model_fields)}"
            )
    try:
        return ChatOptions.model_validate(dict(options))
    except ValidationError as error:
        raise RequestError("invalid_parameter", problems(ChatOptions, error)[0].sentence) from None


def _parse_messages(texts: Sequence[str]) -> tuple[dict[str, Any], ...]:
    try:
        values = _read_json(MESSAGES, texts[0]) if len(texts) == 1 else list(texts)
    except ValueError as error:
        raise ValueError(f"{error}; it must be like [{EXAMPLE}]") from None
    values = values if isinstance(values, list) else [values]
    if not 1 <= len(values) <= MAX_MESSAGES:
        raise ValueError(f"{MESSAGES} must hold 1 to {MAX_MESSAGES} messages, got {len(values)}")
    return tuple(_parse_message(f"{MESSAGES}[{place}]", each) for place, each in enumerate(values))


def _parse_message(name: str, value: object) -> dict[str, Any]:
    value = _read_json(name, value)
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be like {EXAMPLE}, got {clip(value)}")
    said = {field: each for field, each in value.items() if each is not None}
    if said.get("tool_calls") == []:  # as servers answer where there are none
        del said["tool_calls"]
    for field in said:
        if field not in _Message.model_fields:
            raise ValueError(f"{name} has no field {clip(field)}{suggest(field, _Message.model_fields)}")
    return _checked(name, _Message, said)


def _check_final_message(messages: Sequence[Mapping[str, Any]]) -> None:
    last, name = messages[-1], f"{MESSAGES}[{len(messages) - 1}]"
    if last["role"] != ASSISTANT:
        raise ValueError(
            f"continue_final_message goes on with the assistant's last message, and {name} is of role "
            f"{clip(last['role'])}"
        )
    if "content" not in last or "tool_calls" in last:
        raise ValueError(f"continue_final_message goes on with a text, and {name} ends with something else")
