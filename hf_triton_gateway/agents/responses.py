# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/responses`: OpenAI's Responses API."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton.errors import clip
from hf_triton.protocol.chat_request import MAX_MESSAGES, MAX_TOOLS
from hf_triton_gateway.agents.agents import ANY, AgentRequest
from hf_triton_gateway.agents.answer_blocks import TEXT, blocks_of
from hf_triton_gateway.agents.background import BackgroundResponse
from hf_triton_gateway.agents.event_log import EventLog
from hf_triton_gateway.agents.response_events import last_event
from hf_triton_gateway.agents.response_input import items_of, read_input, read_part, served_items
from hf_triton_gateway.agents.response_items import ResponseItems
from hf_triton_gateway.agents.response_run import ResponseRun, ending_of
from hf_triton_gateway.agents.response_store import RUNNING, Keeper, ResponseStore, StoredResponse
from hf_triton_gateway.agents.response_tools import ResponseTools
from hf_triton_gateway.agents.stored_responses import store_of
from hf_triton_gateway.app_state import Gateway, gateway_of, request_id_of
from hf_triton_gateway.chat.answers import message_of, now_s
from hf_triton_gateway.chat.conversation import Conversation, parse_at
from hf_triton_gateway.chat.fields import HINT, MAX_TOP_LOGPROBS, ONE_TIER, Fields, Ignored, StopStrings
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import MAX_JSON_BYTES, ChatRoute, beside, json_limit, json_response, write_json
from hf_triton_gateway.http.client_names import ELSEWHERE
from hf_triton_gateway.http.disconnect import run_while_connected
from hf_triton_gateway.http.hints import pass_over
from hf_triton_gateway.http.sse import RESPONSES, EventStream
from hf_triton_gateway.keys.security import key_of
from hf_triton_gateway.triton.triton_messages import Generation, Outputs, size_of

router = APIRouter(route_class=ChatRoute)
NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_output_tokens"),
    "messages": "input",
    "text_input": ELSEWHERE,
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The client's names of the chat's fields and of ours."""
MAX_INPUT_ITEMS: Final = 4 * MAX_MESSAGES
"""An assistant's message may be several items: reasoning, text, calls."""
STATELESS: Final = "is for what a server keeps, and this one keeps responses alone"
LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
"""What agents ask to include, beside the reasoning that is there to read."""
UNINCLUDED: Final = (
    *("web_search_call.action.sources", "web_search_call.results", "file_search_call.results"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
)
"""What comes from tools that this server has not, and from images."""


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
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), HINT),
        **dict.fromkeys(("prompt_cache_options", "client_metadata", "max_tool_calls", "stream_options"), HINT),
        "conversation": Ignored(reason=f"{STATELESS} (previous_response_id)"),
        "prompt": Ignored(reason="names a stored prompt, and this server keeps none"),
        "truncation": Ignored(("disabled",)),
        "service_tier": ONE_TIER,
        **dict.fromkeys(("context_management", "moderation"), Ignored(([],))),
    }

    input: str | Annotated[list[Any], annotated_types.MaxLen(MAX_INPUT_ITEMS)]
    """The conversation: text, or items."""

    previous_response_id: str | None = None
    """The response that `input` goes on behind; its instructions are not carried over."""

    store: bool | None = None
    """Whether the response is kept, for `previous_response_id` and `GET /v1/responses/ID`. By default it is, unless the
    gateway keeps none."""

    background: bool | None = None
    """Whether to answer at once, and go on without the client: `GET /v1/responses/ID` has the response then, and `POST
    /v1/responses/ID/cancel` ends it."""

    metadata: dict[str, Any] | None = None
    """Comes back with the response."""

    stop: str | StopStrings | None = None
    """Up to 16 strings; generation stops before the first of them."""

    instructions: str | None = None
    """The system message, in front of `input`."""

    tools: Annotated[list[Any], annotated_types.MaxLen(MAX_TOOLS)] | None = None
    """Functions and custom tools that the model may call, also those of namespaces."""

    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required`, one tool: `{"type": "function", "name": "..."}`, or `allowed_tools`."""

    parallel_tool_calls: bool | None = None
    """Whether one answer may call several functions."""

    max_output_tokens: Annotated[int, annotated_types.Ge(1)] | None = None
    """Maximum number of tokens to generate, reasoning included."""

    text: dict[str, Any] | None = None
    """`format`: text, JSON, or JSON that a schema allows."""

    reasoning: dict[str, Any] | None = None
    """`effort`: a variable for the chat template of models that reason; `none` asks for no reasoning."""

    include: list[str] | None = None
    """`message.output_text.logprobs` adds the log probability of each token of a text."""

    top_logprobs: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_TOP_LOGPROBS)] | None = None
    """Number of most likely tokens to list at each position, with log probabilities."""

    def chat_fields(self, tools: ResponseTools) -> dict[str, object]:
        """The chat's fields; `tools` has those of the input too."""
        for name in self.include or ():
            if name in UNINCLUDED:
                pass_over(f"include.{name}")
            else:
                Ignored((LOGPROBS, ENCRYPTED)).check("include", name)
        has_logprobs = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        text = parse_at(_Text, "text", self.text or {})
        reasoning = parse_at(_Reasoning, "reasoning", self.reasoning or {})
        return {
            "tools": tools.tools or None,
            "tool_choice": tools.choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_tokens": self.max_output_tokens,
            "stop": self.stop or None,
            "response_format": _read_format(text.format),
            "reasoning_effort": reasoning.effort,
            "logprobs": has_logprobs or None,
            "top_logprobs": self.top_logprobs if has_logprobs else None,
        }

    def read_tools(self) -> ResponseTools:
        tools = ResponseTools()
        for index, tool in enumerate(self.tools or ()):
            tools.add(f"tools[{index}]", tool)
        return tools


def _read_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """The chat's `response_format`, which has name and schema one level deeper."""
    if form is None or form.get("type") != "json_schema":
        return form
    checked = parse_at(_Format, "text.format", {key: value for key, value in form.items() if key != "schema"})
    if not isinstance(schema := form.get("schema"), dict):
        message = f"text.format: schema must be a JSON object, got {clip(schema)}"
        raise ApiError(400, message, param="text.format", code="invalid_parameter")
    return {"type": "json_schema", "json_schema": {"name": checked.name or "answer", "schema": schema}}


@router.post("/v1/responses", responses=RESPONSES)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, in the form that agents read."""
    gateway, num_bytes, key = gateway_of(request), len(await request.body()), key_of(request.scope)
    stored, previous = _stores(gateway, body, key)
    num_bytes += 0 if previous is None else previous.num_bytes
    read = await beside(num_bytes, _Read.of, body, request_id_of(request), previous, num_bytes, is_kept=bool(stored))
    events = EventLog() if body.background and body.stream else None
    keeper = Keeper(stored, key, read.past, read.input, events)
    run = ResponseRun(keeper, read.head, read.items, num_bytes)
    if body.background and stored is not None:
        made = dict(read.head)
        await run_while_connected(request.receive, _start(gateway, read, run, keeper, stored))
        if events is not None:
            return EventStream(request, events.follow())
        return await json_response(num_bytes, dict, made)
    if body.stream:
        return EventStream(request, _stream(run, gateway.models.stream(read.generation)))
    outputs = await run_while_connected(request.receive, gateway.models.generate(read.generation))
    num_bytes += size_of(outputs)
    response = await beside(num_bytes, _response, read, outputs)
    await keeper.keep(response, num_bytes)
    return await json_response(num_bytes, dict, response)


async def _stream(run: ResponseRun, responses: AsyncGenerator[Outputs]) -> AsyncGenerator[bytes]:
    async with aclosing(run.events(responses)) as events:
        async for data in events:
            yield data
    yield await beside(run.num_bytes, last_event, run.response, run.num_events)


async def _start(gateway: Gateway, read: _Read, run: ResponseRun, keeper: Keeper, store: ResponseStore) -> None:
    """Have a response made in the background; a model that does not stream makes it whole."""
    responses = gateway.models.stream(read.generation)
    try:
        await gateway.models.folder(read.generation.model, is_stream=True)
    except ApiError as error:
        if error.code != "stream_not_available":
            raise
        responses = _whole(gateway, read.generation)
    stored = keeper.stored(read.head)
    await beside(run.num_bytes, stored.count_bytes)
    store.check_room(stored)
    store.begin(stored, BackgroundResponse(run, responses, keeper.events), keeper.key)


async def _whole(gateway: Gateway, generation: Generation) -> AsyncGenerator[Outputs]:
    yield await gateway.models.generate(generation)


def _stores(gateway: Gateway, body: ResponsesRequest, key: bytes) -> tuple[ResponseStore | None, StoredResponse | None]:
    """The store that keeps a request's response, and the response that the request goes on behind."""
    previous, param = None, "previous_response_id"
    if body.previous_response_id is not None:
        previous = store_of(gateway, param).get(body.previous_response_id, key, param)
        if previous.response["status"] in RUNNING:
            message = f"{param} names a response that is {previous.response['status']}: wait until it has ended"
            raise ApiError(400, message, param=param, code="invalid_parameter")
    for name in ("store", "background"):
        if getattr(body, name):
            store_of(gateway, name)
    if body.background and body.store is False:
        message = "background needs a response that is kept: leave store out, or set it to true"
        raise ApiError(400, message, param="store", code="invalid_parameter")
    return gateway.stored if gateway.stored.keeps_any and body.store is not False else None, previous


@dataclass(frozen=True)
class _Read:
    """A request, read."""

    past: tuple[Any, ...]
    """The items that it goes on behind, as far as a model reads them."""
    input: tuple[Any, ...]
    conversation: Conversation
    generation: Generation
    head: dict[str, Any]
    items: ResponseItems

    @classmethod
    def of(
        cls, body: ResponsesRequest, request_id: str, previous: StoredResponse | None, num_bytes: int, *, is_kept: bool
    ) -> _Read:
        """Read a request; it and the `previous` response, behind which it goes on, have `num_bytes` of JSON at most."""
        tools, own = body.read_tools(), served_items(items_of(body.input))
        past = () if previous is None else tuple(map(read_part, served_items(previous.items)))
        _check_length(past, own, num_bytes)
        conversation = read_input(body.input, body.instructions, tools, past)
        conversation.tool_places = tools.places
        generation = body.generation(request_id, conversation, NAMES, **body.chat_fields(tools))
        generation = replace(generation, num_bytes=num_bytes)
        identity = uuid.uuid4().hex  # a client may send one request id with all its requests
        head = _head(body, generation, own, identity, is_kept=is_kept)
        return cls(past, own, conversation, generation, head, ResponseItems(identity, tools))


def _check_length(past: Sequence[Any], own: Sequence[Any], num_bytes: int) -> None:
    """Refuse a conversation that no request could hold; a new one begins without `previous_response_id`."""
    if not past:
        return
    found = f"{len(past)} items, and {len(own)} with the request: {MAX_INPUT_ITEMS} at most"
    if len(past) + len(own) <= MAX_INPUT_ITEMS:
        if num_bytes <= MAX_JSON_BYTES:
            return
        text = write_json([past, own])
        if len(text) <= (limit := json_limit(text)):
            return
        found = f"{len(text)} bytes of JSON with the request: {limit} at most"
    message = f"previous_response_id ends a conversation of {found}; send what is left of it as input"
    raise ApiError(400, message, param="previous_response_id", code="invalid_parameter")


def _response(read: _Read, outputs: Outputs) -> dict[str, Any]:
    """OpenAI's `response`, whole."""
    blocks, items = blocks_of(message_of(outputs, 0)), read.items
    items.read_logprobs(outputs)
    for block in blocks:
        if block.kind == TEXT:
            items.take_logprobs(block, block.text)
    return read.head | ending_of(items, blocks, outputs)


def _head(
    body: ResponsesRequest, generation: Generation, own: Sequence[Any], identity: str, *, is_kept: bool
) -> dict[str, Any]:
    """OpenAI's `response` in progress, which repeats the request."""
    text, reasoning = body.text or {}, body.reasoning or {}
    head = {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": now_s(),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": is_kept,
        "temperature": body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {"strict": None, "parameters": None, **tool} if tool.get("type", "function") == "function" else tool
            for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.metadata or {},
    }
    try:
        json.dumps([head, own if is_kept else ()], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise ApiError(400, "the request holds NaN, Infinity, or half of a surrogate pair: JSON has none") from None
    return head
