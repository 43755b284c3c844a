# SPDX-License-Identifier: Apache-2.0
"""What the APIs of coding agents share: each request becomes one of `/v1/chat/completions`, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeVar

import annotated_types
from pydantic import BaseModel

from hf_triton.protocol.custom_tools import NamedTool
from hf_triton_gateway.agents.answer_blocks import Block, Blocks, Step
from hf_triton_gateway.chat.answers import delta_of
from hf_triton_gateway.chat.chat_completions import ChatRequest
from hf_triton_gateway.chat.conversation import Conversation, parse_at
from hf_triton_gateway.chat.fields import Fields, Ignored, sampling_fields
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import beside, write_json
from hf_triton_gateway.http.hints import pass_over
from hf_triton_gateway.triton.triton_messages import TEXT_GENERATION, Generation, Outputs, size_of

SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "thinking_budget"),
    "cache_salt",
)
SHARED: Final = ("model", "stream", "chat_template_kwargs", *SAMPLING)
"""Fields that mean what the chat's field of this name means."""
ANY: Final = Ignored(None)
"""The rule of a field that asks for nothing, whatever its value."""
Form = TypeVar("Form", bound=Fields)

if TYPE_CHECKING:

    class AgentSampling(BaseModel):
        """The fields of SAMPLING."""

        temperature: float | None
        top_p: float | None
else:
    AgentSampling = sampling_fields("AgentSampling", SAMPLING)


class AgentRequest(Fields, AgentSampling):
    """The fields that agents' APIs have in common; some are this server's own."""

    is_open: ClassVar[bool] = True
    task_of_model: ClassVar[str | None] = TEXT_GENERATION

    model: Annotated[str, annotated_types.MinLen(1)]
    """One of `/v1/models`; by default the only one of its task, or `--default-model`."""

    stream: bool | None = None
    """Whether to send the response in pieces, as server-sent events."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""

    def generation(
        self, request_id: str, conversation: Conversation, names: Mapping[str, str | None], **chat: object
    ) -> Generation:
        """What to ask of Triton for a conversation and more fields of the chat; `names` are the client's."""
        shared = {name: getattr(self, name) for name in SHARED}
        own = self.names_of({**names, **conversation.part_places}, places=conversation.places)
        try:
            request = ChatRequest.model_validate({**shared, "messages": conversation.messages(), **chat})
            generation = request.generation(request_id)
        except ApiError as error:
            raise error.in_names(own) from None
        return dataclasses.replace(generation, names=generation.names.under(own), hidden=tuple(conversation.hidden))


class ToolFields(Fields, NamedTool):
    """A tool of an agent's API."""

    kind: ClassVar[str] = "function"
    """The chat's type of it."""
    chat_names: ClassVar[Mapping[str, str]] = {}
    """What the chat calls fields that have another name there."""

    def chat_tool(self) -> dict[str, Any]:
        fields = {self.chat_names.get(name, name): value for name, value in self if value is not None}
        return {"type": self.kind, self.kind: fields}


def read_tool(forms: Mapping[str, type[Form]], place: str, tool: object) -> Form | None:
    """A tool in the form of its type, or the first; None: one that the client expects the server to have."""
    default = next(iter(forms))
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in forms:
        pass_over(f"{place}.{kind}")
        return None
    return parse_at(forms[kind if isinstance(kind, str) else default], place, tool)


async def steps_of(responses: AsyncGenerator[Outputs], blocks: Blocks) -> AsyncGenerator[tuple[list[Step], Outputs]]:
    """The steps of each response of a stream, and its outputs; those of the last have a finish reason."""
    async with aclosing(responses):
        outputs: Outputs
        async for outputs in responses:
            yield await beside(size_of(outputs), _steps, outputs, blocks), outputs


def _steps(outputs: Outputs, blocks: Blocks) -> list[Step]:
    delta = delta_of(outputs, 0)
    return list(blocks.feed(json.loads(delta))) if delta else []


def has_calls(blocks: list[Block]) -> bool:
    return any(block.kind == "tool_call" for block in blocks)


def named_event(kind: str, data: Mapping[str, Any]) -> bytes:
    """One event with its type on a line of its own."""
    event = {"type": kind, **data}
    is_small = kind.endswith("delta")
    text = json.dumps(event, ensure_ascii=False).encode() if is_small else write_json(event)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), text)
