# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Final

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton.errors import clip
from hf_triton.protocol.chat_request import MAX_MESSAGES, MAX_TOOLS
from hf_triton_gateway.agents.agents import (
    ANY,
    AgentRequest,
    ToolFields,
    has_calls,
    named_event,
    read_tool,
    steps_of,
)
from hf_triton_gateway.agents.answer_blocks import Blocks, Step, blocks_of
from hf_triton_gateway.agents.message_blocks import block_delta, content_block, read_messages
from hf_triton_gateway.app_state import Gateway, gateway_of, request_id_of
from hf_triton_gateway.chat.answers import COUNTS, finish_reason_of, message_of, stop_reason_of
from hf_triton_gateway.chat.conversation import Conversation, parse_at
from hf_triton_gateway.chat.fields import HINT, ONE_TIER, Fields, Ignored, StopStrings
from hf_triton_gateway.http.api_errors import ANTHROPIC_RESPONSES, ApiError
from hf_triton_gateway.http.bodies import ChatRoute, beside_loop, json_response
from hf_triton_gateway.http.client_names import ELSEWHERE
from hf_triton_gateway.http.disconnect import run_while_connected
from hf_triton_gateway.http.sse import RESPONSES, EventStream
from hf_triton_gateway.triton.triton_messages import Generation, Outputs, size_of

router = APIRouter(route_class=ChatRoute)
NAMES: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "text_input": ELSEWHERE,
    **dict.fromkeys(("stop", "stop_strings"), "stop_sequences"),
}
"""The client's names of the chat's fields and of ours."""
FORMAT: Final = "output_config.format"
CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}
"""Types of `tool_choice`, and what the chat calls them."""


class _Tool(ToolFields):
    chat_names: ClassVar[Mapping[str, str]] = {"input_schema": "parameters"}
    ignored: ClassVar[Mapping[str, Ignored]] = {
        "type": ANY,
        **dict.fromkeys(("cache_control", "input_examples"), HINT),
        "eager_input_streaming": Ignored((False,), is_hint=True),
        "allowed_callers": Ignored((["direct"],)),
        "defer_loading": Ignored((False,)),
    }
    input_schema: dict[str, Any]
    strict: bool | None = None


TOOLS: Final = {"custom": _Tool}


class _Choice(Fields):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputConfig(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {"effort": HINT}
    format: dict[str, Any] | None = None


class CountRequest(AgentRequest):
    """The body of `/v1/messages/count_tokens`."""

    ignored: ClassVar[Mapping[str, Ignored]] = {
        **dict.fromkeys(("metadata", "cache_control", "context_management", "diagnostics"), HINT),
        **dict.fromkeys(("user_profile_id", "workspace_id", "inference_geo"), HINT),
        "service_tier": ONE_TIER,
        "speed": Ignored(("standard",), is_hint=True),
        **dict.fromkeys(
            ("container", "mcp_servers"), Ignored(reason="is for tools that run on the server, and this one has none")
        ),
    }

    messages: Annotated[list[Any], annotated_types.MinLen(1), annotated_types.MaxLen(MAX_MESSAGES)]
    """The conversation. If the last message is the assistant's, the model continues it."""

    system: str | list[Any] | None = None
    """The system message: text, or blocks of text."""

    tools: Annotated[list[Any], annotated_types.MaxLen(MAX_TOOLS)] | None = None
    """Functions that the model may call, with an `input_schema`."""

    tool_choice: dict[str, Any] | None = None
    """Its type is `auto`, `any`, `tool` with a `name`, or `none`; `disable_parallel_tool_use` may stand beside it."""

    output_config: dict[str, Any] | None = None
    """`format`: a JSON schema that the answer follows."""

    output_format: dict[str, Any] | None = None
    """Former name of `output_config.format`."""

    thinking: dict[str, Any] | None = None
    """`enabled` with `budget_tokens`, after which thinking ends; or `disabled`, for no thinking."""

    def chat_fields(self, conversation: Conversation) -> dict[str, object]:
        choice, parallel = _read_choice(self.tool_choice)
        output = parse_at(_OutputConfig, "output_config", self.output_config or {})
        places = {f"tools[{index}]": tool for index, tool in enumerate(self.tools or ())}
        tools = {place: read.chat_tool() for place, tool in places.items() if (read := read_tool(TOOLS, place, tool))}
        conversation.tool_places = list(tools)
        return {
            "tools": list(tools.values()) or None,
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "response_format": _read_format(self._format_place, output.format or self.output_format),
            "thinking": self.thinking,
            "continue_final_message": conversation.ends_with_text or None,
        }

    @property
    def _format_place(self) -> str:
        """What the client calls the format."""
        return "output_format" if self.output_format and not (self.output_config or {}).get("format") else FORMAT

    def names(self) -> Mapping[str, str]:
        """The client's names of the chat's fields and of ours."""
        return {**NAMES, "response_format": self._format_place}


class MessagesRequest(CountRequest):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[int, annotated_types.Ge(1)]
    """Maximum number of tokens to generate, thinking included."""

    stop_sequences: StopStrings | None = None
    """Up to 16 strings; generation stops before the first of them."""

    def chat_fields(self, conversation: Conversation) -> dict[str, object]:
        return {**super().chat_fields(conversation), "max_tokens": self.max_tokens, "stop": self.stop_sequences or None}


def _read_choice(choice: dict[str, Any] | None) -> tuple[object, bool | None]:
    """The chat's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    checked = parse_at(_Choice, "tool_choice", choice)
    parallel = None if checked.disable_parallel_tool_use is None else not checked.disable_parallel_tool_use
    if checked.type in CHOICES:
        return CHOICES[checked.type], parallel
    if checked.type != "tool" or not checked.name:
        allowed = '"auto", "any", "none", or "tool" with a name'
        raise ApiError(400, f"tool_choice must be of type {allowed}; got {clip(choice)}", param="tool_choice")
    return {"type": "function", "function": {"name": checked.name}}, parallel


def _read_format(place: str, form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        message = f'{place} must be {{"type": "json_schema", "schema": {{...}}}}, got {clip(form)}'
        raise ApiError(400, message, param=place)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}


@router.post("/v1/messages", responses={**RESPONSES, **ANTHROPIC_RESPONSES})
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, in Anthropic's form."""
    gateway = gateway_of(request)
    conversation = await beside_loop(request, read_messages, body.messages, body.system)
    chat = await beside_loop(request, body.chat_fields, conversation)
    generation = await _generation(request, body, conversation, chat)
    if body.stream:
        return EventStream(request, _stream(gateway, generation), name_errors=True)
    outputs = await run_while_connected(request.receive, gateway.models.generate(generation))
    return await json_response(size_of(outputs), _message, generation, outputs)


async def _generation(
    request: Request, body: CountRequest, conversation: Conversation, chat: Mapping[str, object]
) -> Generation:
    made = await beside_loop(request, body.generation, request_id_of(request), conversation, body.names(), **chat)
    return dataclasses.replace(made, num_bytes=len(await request.body()))


def _message(generation: Generation, outputs: Outputs) -> dict[str, Any]:
    blocks = blocks_of(message_of(outputs, 0))
    ending = {**_ending(outputs, calls_tools=has_calls(blocks)), "usage": _usage(outputs)}
    return _head(generation, outputs) | {"content": [content_block(block) for block in blocks]} | ending


@router.post("/v1/messages/count_tokens", responses=ANTHROPIC_RESPONSES)
async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
    """Count the tokens of a conversation as the model's chat template writes it."""
    conversation = await beside_loop(request, read_messages, body.messages, body.system)
    chat = await beside_loop(request, body.chat_fields, conversation)
    generation = await _generation(request, body, conversation, chat)
    options = {**generation.options, "tokenize_only": True}
    asked = dataclasses.replace(generation, sampling={}, options=options, returns=("num_input_tokens",))
    outputs = await run_while_connected(request.receive, gateway_of(request).models.generate(asked))
    return {"input_tokens": outputs["num_input_tokens"][0]}


def _head(generation: Generation, outputs: Outputs) -> dict[str, Any]:
    """Anthropic's `message` before its first block."""
    return {
        "id": f"msg_{generation.request_id}",
        "type": "message",
        "role": "assistant",
        "model": generation.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage({**outputs, "num_output_tokens": [0]}),
    }


def _ending(outputs: Outputs, *, calls_tools: bool) -> dict[str, Any]:
    if finish_reason_of(outputs, 0) == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if stop := stop_reason_of(outputs, 0):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "tool_use" if calls_tools else "end_turn", "stop_sequence": None}


def _usage(outputs: Outputs) -> dict[str, int]:
    """Anthropic's counts, in which `input_tokens` are those that were not cached."""
    [num_input_tokens], [num_cached_tokens], [num_output_tokens] = (outputs.get(name, [0]) for name in COUNTS)
    return {
        "input_tokens": num_input_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


async def _stream(gateway: Gateway, generation: Generation) -> AsyncGenerator[bytes]:
    """The events of a message, from `message_start` to `message_stop`."""
    blocks, has_started = Blocks(), False
    async with aclosing(steps_of(gateway.models.stream(generation), blocks)) as responses:
        async for steps, outputs in responses:
            if not has_started:
                has_started = True
                yield named_event("message_start", {"message": _head(generation, outputs)})
            if steps:
                yield b"".join(map(_event, steps))
            if "finish_reason" in outputs:
                ending = {"delta": _ending(outputs, calls_tools=has_calls(blocks.blocks)), "usage": _usage(outputs)}
                yield b"".join(map(_event, blocks.end()))
                yield named_event("message_delta", ending) + named_event("message_stop", {})


def _event(step: Step) -> bytes:
    action, block, piece = step
    if action == "start":
        return named_event("content_block_start", {"index": block.index, "content_block": content_block(block, "")})
    if action == "delta":
        return named_event("content_block_delta", {"index": block.index, "delta": block_delta(block, piece)})
    return named_event("content_block_stop", {"index": block.index})
