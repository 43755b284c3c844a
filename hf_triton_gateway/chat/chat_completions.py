# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Final

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton.errors import clip
from hf_triton.protocol.chat_request import ASSISTANT, TOOL, hidden_type, unknown_fields
from hf_triton.protocol.custom_tools import hosted_type
from hf_triton.protocol.image_files import is_image
from hf_triton.protocol.thinking_switches import SWITCHES
from hf_triton_gateway.app_state import Gateway, gateway_of, request_id_of
from hf_triton_gateway.chat.answers import (
    COUNTS,
    StreamedTokens,
    chat_finish_reason,
    delta_of,
    finish_reason_of,
    json_output,
    message_of,
    response_head,
    stop_reason_of,
    usage_of,
)
from hf_triton_gateway.chat.fields import MAX_TOP_LOGPROBS, GenerationFields, Messages, Tools
from hf_triton_gateway.chat.openai_logprobs import chat_logprobs, chat_positions
from hf_triton_gateway.chat.thinking_fields import read_thinking
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import ChatRoute, beside, beside_loop, json_response
from hf_triton_gateway.http.client_names import ELSEWHERE
from hf_triton_gateway.http.disconnect import run_while_connected
from hf_triton_gateway.http.hints import pass_over
from hf_triton_gateway.http.sse import DONE, RESPONSES, EventStream, chunk, chunk_start, event
from hf_triton_gateway.triton.triton_messages import THINKING_BUDGET, Generation, Outputs, StreamSize, size_of

router = APIRouter(route_class=ChatRoute)
TEXT_OPTIONS: Final = ("tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
PREFIXES: Final = ("prefix", "partial")
"""What Mistral, DeepSeek and Moonshot call a last message that the model continues, in that message."""
BOOLEAN_OPTIONS: Final = ("parallel_tool_calls", "add_generation_prompt", "continue_final_message")
RETURNS: Final = (*("message", "finish_reason", "stop_string", "num_reasoning_tokens"), *COUNTS)


class ChatRequest(GenerationFields):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    """The conversation; content is text, or parts: text and images."""

    tools: Tools | None = None
    """Functions and custom tools that the model may call."""

    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required`, one tool: `{"type": "function", "function": {"name": "..."}}`, or `allowed_tools`."""

    parallel_tool_calls: bool | None = None
    """Whether one answer may call several functions."""

    logprobs: bool | None = None
    """Whether to add the log probability of each token."""

    top_logprobs: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_TOP_LOGPROBS)] | None = None
    """Number of most likely tokens to list at each position; needs `logprobs`."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""

    reasoning_effort: str | None = None
    """A variable for the chat template of models that reason; `none` asks for no reasoning."""

    thinking: dict[str, Any] | None = None
    """Anthropic's form of `thinking_budget`: `{"type": "enabled", "budget_tokens": 512}`, or `disabled`."""

    think: bool | str | None = None
    """Ollama's form of `reasoning_effort`: false asks for no reasoning."""

    format: str | dict[str, Any] | None = None
    """Ollama's form of `response_format`: `json`, or a schema."""

    include_reasoning: bool | None = None
    """Whether the answer has the reasoning; by default true."""

    nvext: dict[str, Any] | None = None
    """NIM's form of `thinking_budget`: `{"max_thinking_tokens": 512}`."""

    add_generation_prompt: bool | None = None
    """Whether to append the start of an assistant message; by default true."""

    continue_final_message: bool | None = None
    """Whether the model continues the last message instead of starting a new one."""

    echo: bool | None = None
    """Accepted if false."""

    @property
    def names_function(self) -> bool:
        """Whether `tool_choice` names the function to call, which is not told as a finish reason."""
        return isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "function"

    def generation(self, request_id: str) -> Generation:
        sampling = self.sampling_parameters()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is for logprobs true: set it", param="top_logprobs")
        if self.echo:
            raise ApiError(400, "echo is for /v1/completions: leave it out", param="echo")
        is_off, budget = read_thinking(self.thinking, self.nvext)
        is_off = is_off or self.think is False
        if self.format and "response_format" in sampling:
            raise ApiError(400, "format and response_format are one field: leave one of them out", param="format")
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise ApiError(400, f"format must be `json` or a schema, got {clip(self.format)}", param="format")
        if self.format:
            as_schema = {"type": "json_schema", "json_schema": {"schema": self.format}}
            sampling["response_format"] = {"type": "json_object"} if self.format == "json" else as_schema
        if budget is not None:
            sampling.setdefault(THINKING_BUDGET, budget)
        options = self._options(is_thinking_off=is_off)
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
            options["return_logprobs"] = True
        return Generation(
            self.model,
            request_id,
            sampling,
            options,
            messages=self.messages,
            returns=(*RETURNS, *self.token_outputs),
            names=self.client_names(**self._other_names(), logprobs="top_logprobs", text_input=ELSEWHERE),
            hidden=[
                f"messages.content.{part['type']}"
                for message in self.messages
                for part in _tool_parts(message)
                if is_image(part)
            ],
        )

    def _other_names(self) -> dict[str, str]:
        """Our parameters that are given by other APIs' fields."""
        names = {"response_format": "format"} if self.format else {}
        if self.continue_final_message is None and (place := prefix_of(self.messages)):
            names["continue_final_message"] = place
        if isinstance(self.think, str) and self.reasoning_effort is None:
            names["reasoning_effort"] = "think"
        elif self.think is False:
            names[SWITCHES[0]] = "think"
        if self.thinking is not None:
            return {**names, THINKING_BUDGET: "thinking", SWITCHES[0]: "thinking"}
        return names if self.nvext is None else {**names, THINKING_BUDGET: "nvext.max_thinking_tokens"}

    def _options(self, *, is_thinking_off: bool) -> dict[str, bool | int | str]:
        options: dict[str, bool | int | str] = {
            name: value for name in BOOLEAN_OPTIONS if (value := getattr(self, name)) is not None
        }
        last = self.messages[-1]
        if prefix_of(self.messages):
            options.setdefault("continue_final_message", True)
        for message in self.messages:
            for name in unknown_fields(message):
                if not (message is last and name in PREFIXES and options.get("continue_final_message")):
                    pass_over(f"messages.{name}")
            for part in _tool_parts(message):
                if (part_type := hidden_type(part)) and not is_image(part):
                    pass_over(f"messages.content.{part_type}")
        values = {name: value for name in TEXT_OPTIONS if (value := getattr(self, name)) is not None}
        if isinstance(self.think, str):
            values.setdefault("reasoning_effort", self.think)
        if is_thinking_off:
            values["chat_template_kwargs"] = {SWITCHES[0]: False, **(self.chat_template_kwargs or {})}
        hosted = [kind for tool in self.tools or () if (kind := hosted_type(tool)) is not None]
        for kind in hosted:
            pass_over(f"tools.{kind}")
        if self.tools is not None and len(hosted) == len(self.tools):  # agents without tools send an empty list
            del values["tools"]
        if "tools" not in values and values.get("tool_choice") in ("auto", "none"):
            del values["tool_choice"]
        if "tools" not in values:
            options.pop("parallel_tool_calls", None)
        return options | {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in values.items()
        }


def _tool_parts(message: Mapping[str, Any]) -> Sequence[Any]:
    """The parts that a tool has answered."""
    parts = message.get("content") if message.get("role") == TOOL else None
    return parts if isinstance(parts, list) else ()


def prefix_of(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The place of the field by which the last message is to be continued: `messages[2].prefix`; None: it is not."""
    last = messages[-1]
    name = next((name for name in PREFIXES if last.get(name) is True and last.get("role") == ASSISTANT), None)
    return name and f"messages[{len(messages) - 1}].{name}"


@router.post("/v1/chat/completions", responses=RESPONSES)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    gateway = gateway_of(request)
    generation = await beside_loop(request, body.generation, request_id_of(request))
    generation = replace(generation, num_bytes=len(await request.body()))
    if body.stream:
        return EventStream(request, stream_chat(gateway, body, generation))
    outputs = await run_while_connected(request.receive, gateway.models.generate(generation))
    return await json_response(size_of(outputs), chat_completion, body, generation, outputs)


def chat_completion(body: ChatRequest, generation: Generation, outputs: Outputs) -> dict[str, Any]:
    answer = {
        **response_head(f"chatcmpl-{generation.request_id}", "chat.completion", generation.model),
        "choices": [_choice(body, outputs, index) for index in range(body.num_choices)],
        "usage": usage_of(outputs, body.num_choices),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = json_output(outputs, "prompt_token_ids", 0)
    return answer


def _choice(body: ChatRequest, outputs: Outputs, index: int) -> dict[str, Any]:
    message = _with_reasoning(body, message_of(outputs, index))
    has_calls = bool(message.get("tool_calls")) and not body.names_function
    choice = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(outputs, index),
        "finish_reason": chat_finish_reason(finish_reason_of(outputs, index), has_calls),
        "stop_reason": stop_reason_of(outputs, index),
    }
    if "token_ids" in outputs:
        choice["token_ids"] = json_output(outputs, "token_ids", index)
    return choice


def _with_reasoning(body: ChatRequest, message: dict[str, Any]) -> dict[str, Any]:
    """A message or a delta with its reasoning under both names that clients read, or without it."""
    if "reasoning_content" not in message:
        return message
    if body.include_reasoning is False:
        return {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**message, "reasoning": message["reasoning_content"]}


async def stream_chat(gateway: Gateway, body: ChatRequest, generation: Generation) -> AsyncGenerator[bytes]:
    """The events of OpenAI's `chat.completion.chunk`: a role, deltas, a finish reason, usage if asked for."""
    head = response_head(f"chatcmpl-{generation.request_id}", "chat.completion.chunk", generation.model)
    choices = [_ChatStream(body, head, index) for index in range(body.num_choices)]
    is_first, size = True, StreamSize()
    async with aclosing(gateway.models.stream(generation)) as responses:
        outputs: Outputs
        async for outputs in responses:
            if data := await beside(size.of(outputs), _chunks, choices, outputs, is_first=is_first):
                yield data
                size.sent()
            is_first = False
            if "finish_reason" in outputs and body.includes_usage:
                yield event(head | {"choices": [], "usage": usage_of(outputs, body.num_choices)})
    yield DONE


def _chunks(choices: Sequence[_ChatStream], outputs: Outputs, *, is_first: bool) -> bytes:
    return b"".join(choice.chunks(outputs, is_first=is_first) for choice in choices)


class _ChatStream:
    """The chunks of one choice of a streamed chat; they all begin with `head`."""

    def __init__(self, body: ChatRequest, head: dict[str, Any], index: int) -> None:
        self._body = body
        self._head = body.chunk_head(head)
        self._start = chunk_start(self._head)
        self._index = index
        self._tokens = StreamedTokens(index)
        self._has_calls = False

    def chunks(self, outputs: Outputs, *, is_first: bool) -> bytes:
        """The chunks of a response: the role, if it is the first one, new text, and the end, if it is the last one."""
        roles = self._role(outputs) if is_first else b""
        self._tokens.read(outputs)
        delta = delta_of(outputs, self._index)
        if '"reasoning_content"' in delta:
            rest = _with_reasoning(self._body, json.loads(delta))
            delta = json.dumps(rest, ensure_ascii=False) if rest else ""
        data = self._chunk(delta) if delta else b""
        return roles + data + (self._end(outputs) if "finish_reason" in outputs else b"")

    def _role(self, outputs: Outputs) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": self._index, "delta": delta, "finish_reason": None}
        self._tokens.read_prompt(outputs)
        begins = self._body.return_token_ids and "prompt_token_ids" in outputs and self._index == 0
        prompt_ids = {"prompt_token_ids": json_output(outputs, "prompt_token_ids", 0)} if begins else {}
        return self._event(choice, **prompt_ids)

    def _chunk(self, delta: str) -> bytes:
        self._has_calls |= '"tool_calls"' in delta
        if not (more := self._more()) and not self._body.counts_continuously:
            return chunk(self._start, self._index, b"delta", delta)
        rest = json.dumps({"logprobs": None, **more}, ensure_ascii=False)[1:-1]
        start = chunk_start(self._head | self._usage())
        return chunk(start, self._index, b"delta", delta, rest)

    def _end(self, outputs: Outputs) -> bytes:
        calls_tools = self._has_calls and not self._body.names_function
        reason = chat_finish_reason(finish_reason_of(outputs, self._index), calls_tools)
        stop_reason = stop_reason_of(outputs, self._index)
        choice = {"index": self._index, "delta": {}, "finish_reason": reason, "stop_reason": stop_reason}
        return self._event(choice | self._more())

    def _more(self) -> dict[str, Any]:
        """What the choice's next chunk has of its tokens."""
        more: dict[str, Any] = {}
        if self._body.logprobs and (positions := self._tokens.take_positions()):
            more["logprobs"] = chat_positions(positions)
        if self._body.return_token_ids:
            more["token_ids"] = self._tokens.take_ids()
        return more

    def _usage(self) -> dict[str, Any]:
        return {"usage": self._tokens.usage()} if self._body.counts_continuously else {}

    def _event(self, choice: dict[str, Any], **more: object) -> bytes:
        return event({**self._head, **self._usage(), "choices": [choice], **more})
