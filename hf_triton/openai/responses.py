# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/responses`: OpenAI's Responses API, of which nothing is stored."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Final

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hf_triton.errors import clip
from hf_triton.openai.agents import ANY, AgentRequest, function_tool, stream_steps
from hf_triton.openai.answers import finish_reason_of, message_of, now_s, usage_of
from hf_triton.openai.blocks import Block, Blocks, blocks_of
from hf_triton.openai.bodies import JsonRoute, beside_loop
from hf_triton.openai.conversation import parse_at
from hf_triton.openai.disconnect import run_while_connected
from hf_triton.openai.errors import ApiError
from hf_triton.openai.fields import HINT, ONE_TIER, Fields, Ignored
from hf_triton.openai.gateway import Gateway, gateway_of, request_id_of
from hf_triton.openai.response_events import ResponseEvents
from hf_triton.openai.response_items import output_item, read_input
from hf_triton.openai.sse import RESPONSES, EventStream
from hf_triton.openai.triton_messages import Generation, Outputs
from hf_triton.protocol.chat import MAX_MESSAGES, MAX_TOOLS

router = APIRouter(route_class=JsonRoute)
NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_output_tokens"),
    **dict.fromkeys(("messages", "text_input", "prompt"), "input"),
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The client's names of the chat's fields and of ours."""
MAX_INPUT_ITEMS: Final = 4 * MAX_MESSAGES
"""Of one request; an assistant's message may be several items: reasoning, text, calls."""
STATELESS: Final = "is for stored responses, and this server keeps none"
UNREADABLE: Final = "reasoning.encrypted_content"
"""What agents ask to include, beside the reasoning that is there to read."""


class _Tool(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {
        "type": ANY,
        "strict": Ignored((False,), is_hint=True),
        "defer_loading": Ignored((False,)),
    }
    name: Annotated[str, annotated_types.MinLen(1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Choice(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {"type": ANY}
    name: Annotated[str, annotated_types.MinLen(1)]


class _Text(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {"verbosity": Ignored(("medium",), is_hint=True)}
    format: dict[str, Any] | None = None


class _Format(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {"type": ANY, "description": ANY}
    name: str | None = None
    strict: bool | None = None


class _Reasoning(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {
        **dict.fromkeys(("summary", "generate_summary"), HINT),
        "context": Ignored(("auto",), is_hint=True),
    }
    effort: str | None = None


class ResponsesRequest(AgentRequest):
    """The body of `/v1/responses`."""

    ignored: ClassVar[Mapping[str, Ignored]] = {
        **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), HINT),
        **dict.fromkeys(("prompt_cache_options", "client_metadata", "max_tool_calls", "stream_options"), HINT),
        "store": Ignored((False,), STATELESS),
        **dict.fromkeys(("previous_response_id", "conversation"), Ignored(reason=STATELESS)),
        "prompt": Ignored(reason="names a stored prompt, and this server keeps none"),
        "background": Ignored((False,), STATELESS),
        "truncation": Ignored(("disabled",)),
        "service_tier": ONE_TIER,
        "top_logprobs": Ignored((0,), "is for /v1/chat/completions"),
        **dict.fromkeys(("context_management", "moderation"), Ignored(([],))),
    }

    input: str | Annotated[list[Any], annotated_types.MaxLen(MAX_INPUT_ITEMS)]
    """The conversation: text, or items."""

    instructions: str | None = None
    """The system message, in front of `input`."""

    tools: Annotated[list[Any], annotated_types.MaxLen(MAX_TOOLS)] | None = None
    """Functions that the model may call."""

    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required`, or one function: `{"type": "function", "name": "..."}`."""

    parallel_tool_calls: bool | None = None
    """Whether one answer may call several functions."""

    max_output_tokens: Annotated[int, annotated_types.Ge(1)] | None = None
    """Maximum number of tokens to generate, reasoning included."""

    text: dict[str, Any] | None = None
    """`format`: text, JSON, or JSON that a schema allows."""

    reasoning: dict[str, Any] | None = None
    """`effort`: a variable for the chat template of models that reason."""

    include: list[str] | None = None
    """Accepted if it is empty, or names `reasoning.encrypted_content`: reasoning is not encrypted."""

    def chat_fields(self) -> dict[str, object]:
        """The chat's fields.

        Raises:
            ApiError: A field asks for what is not served.
        """
        for name in self.include or ():
            Ignored((UNREADABLE,)).check("include", name)
        text = parse_at(_Text, "text", self.text or {})
        reasoning = parse_at(_Reasoning, "reasoning", self.reasoning or {})
        return {
            "tools": [_read_tool(f"tools[{index}]", tool) for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _read_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_tokens": self.max_output_tokens,
            "response_format": _read_format(text.format),
            "reasoning_effort": reasoning.effort,
        }


def _read_tool(place: str, tool: object) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        message = f"{place} is of type {clip(kind)}; this server has no tools of its own: give tools of type 'function'"
        raise ApiError(400, message, param=place, code="unsupported_parameter")
    checked = parse_at(_Tool, place, tool)
    return function_tool(checked.name, checked.description, checked.parameters)


def _read_choice(choice: str | dict[str, Any] | None) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        message = f'tool_choice must be {{"type": "function", "name": "..."}}, got {clip(choice)}'
        raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    return {"type": "function", "function": {"name": parse_at(_Choice, "tool_choice", choice).name}}


def _read_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """The chat's `response_format`, which has name and schema one level deeper."""
    if form is None or form.get("type") != "json_schema":
        return form
    checked = parse_at(_Format, "text.format", {key: value for key, value in form.items() if key != "schema"})
    if not isinstance(schema := form.get("schema"), dict):
        message = f"text.format.schema must be a JSON object, got {clip(schema)}"
        raise ApiError(400, message, param="text.format.schema", code="invalid_parameter")
    return {"type": "json_schema", "json_schema": {"name": checked.name or "answer", "schema": schema}}


@router.post("/v1/responses", responses=RESPONSES)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, in the form that agents read."""
    gateway = gateway_of(request)
    conversation = await beside_loop(request, read_input, body.input, body.instructions)
    chat = body.chat_fields()
    with conversation.placed_errors("input"):
        generation = body.generation(request_id_of(request), conversation, NAMES, **chat)
        head = _head(body, generation)
        if body.stream:
            events = _stream(gateway, head, generation)
            return EventStream(request, conversation.placed_stream("input", events))
        outputs = await run_while_connected(request.receive, gateway.models.generate(generation))
    blocks = blocks_of(message_of(outputs, 0))
    return JSONResponse(head | _ending(generation, blocks, outputs))


def _head(body: ResponsesRequest, generation: Generation) -> dict[str, Any]:
    """OpenAI's `response` in progress, which repeats the request.

    Raises:
        ApiError: The request holds what JSON cannot.
    """
    text, reasoning = body.text or {}, body.reasoning or {}
    head = {
        "id": f"resp_{generation.request_id}",
        "object": "response",
        "created_at": now_s(),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": {},
    }
    try:
        json.dumps(head, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise ApiError(400, "the request holds NaN, Infinity, or half of a surrogate pair: JSON has none") from None
    return head


def _status(outputs: Outputs) -> str:
    return "incomplete" if finish_reason_of(outputs, 0) == "length" else "completed"


def _items(generation: Generation, blocks: Sequence[Block], last_status: str) -> list[dict[str, Any]]:
    statuses = ["completed"] * (len(blocks) - 1) + [last_status]
    pairs = zip(blocks, statuses, strict=False)
    return [output_item(generation.request_id, block, status) for block, status in pairs]


def _ending(generation: Generation, blocks: Sequence[Block], outputs: Outputs) -> dict[str, Any]:
    """What changes in a response when it ends."""
    status, usage = _status(outputs), usage_of(outputs)
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": _items(generation, blocks, status),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


async def _stream(gateway: Gateway, head: dict[str, Any], generation: Generation) -> AsyncGenerator[bytes]:
    """The typed events of a response, from `response.created` to its end."""
    blocks, events = Blocks(), ResponseEvents(generation.request_id)
    try:
        async with aclosing(stream_steps(gateway, generation, blocks)) as responses:
            async for steps, outputs in responses:
                if not events.number:
                    for kind in ("response.created", "response.in_progress"):
                        yield events.event(kind, {"response": head})
                if data := b"".join(events.of(step) for step in steps):
                    yield data
                if "finish_reason" in outputs:
                    status = _status(outputs)
                    yield b"".join(events.of(step, status) for step in blocks.end())
                    ending = _ending(generation, blocks.blocks, outputs)
                    yield events.event(f"response.{status}", {"response": head | ending})
    except ApiError as error:
        if not events.number:
            raise
        failure = {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
            "output": _items(generation, blocks.blocks, "incomplete"),
        }
        yield events.event("response.failed", {"response": head | failure})
