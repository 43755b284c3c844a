# SPDX-License-Identifier: Apache-2.0
"""Builds the messages of a chat from the items and content blocks of other APIs. Knows none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hf_triton.errors import clip
from hf_triton.protocol import chat_request
from hf_triton.protocol.image_files import image_source, is_address
from hf_triton.sentence import begins_with_field, renamed
from hf_triton_gateway.chat.fields import Fields
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.hints import inside, pass_over

Part = TypeVar("Part", bound=Fields)


def parse_at(model: type[Part], place: str, value: object) -> Part:
    """Check an object inside a request; null is as good as leaving a field out.

    Args:
        model: Its fields.
        place: Where it is: `input[2]`.
        value: The object.

    Raises:
        ApiError: It is invalid; message and `param` begin with `place`.
    """
    if not isinstance(value, dict):
        raise ApiError(400, f"{place} must be a JSON object, got {clip(value)}", param=place, code="invalid_parameter")
    try:
        with inside(place):
            return model.model_validate(value)
    except ApiError as error:
        param = f"{place}.{error.param}" if error.param else place
        inner = renamed(error.open_message, lambda path: f"{place}.{path}")
        message = inner if begins_with_field(inner) else f"{place}: {error.message}"
        raise ApiError(error.status_code, message, param=param, code=error.code) from None


def parse_past(model: type[Part], place: str, value: object) -> Part:
    """Check what a server has answered earlier, as `parse_at` does; fields that are not the model's are left out."""
    if isinstance(value, dict):
        value = {name: field for name, field in value.items() if name in model.model_fields}
    return parse_at(model, place, value)


def unseen(place: str, kind: str) -> str:
    """What the model reads in place of a part of a tool's output that is no text: the client cannot leave it out."""
    pass_over(f"{place}.{kind}")
    return chat_request.unseen(kind)


def only_image(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part that is an image, as a chat has it: its type, and what holds the image."""
    return {"type": part["type"], "image_url": image_source(part) or {}}


def read_image(place: str, part: Mapping[str, Any], form: str) -> dict[str, Any]:
    """The same; one that holds no image is refused, and told the `form` of one."""
    source = image_source(part)
    if isinstance(source, str) and source and not is_address(source):
        return only_image(part)
    why = "is an address, and nothing is fetched: send base64 of the file, as" if is_address(source) else "must be like"
    raise ApiError(400, f"{place} {why} {form}", param=place, code="invalid_parameter")


class Conversation:
    """The messages of a chat; neighbours of one role become one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._places: list[str] = []
        self.tool_places: list[str] = []
        """The places of the chat's tools, for error messages; empty: they are the client's, one by one."""
        self.part_places: dict[str, str] = {}
        """The places of images in the client's request, by those in the chat."""
        self.hidden: list[str] = []
        """Images that tools answered, as the client calls them: a model that reads text alone does not see them."""

    def add_text(self, role: str, text: str, place: str) -> None:
        """Add a part to the content of a message."""
        self._message(role, place, "tool_calls").setdefault("content", []).append({"type": "text", "text": text})

    def add_image(self, role: str, part: dict[str, Any], place: str, part_place: str) -> None:
        """Add an image to the content of a message; `part_place` is its own place."""
        content = self._message(role, place, "tool_calls").setdefault("content", [])
        self.part_places[f"messages[{len(self._messages) - 1}].content[{len(content)}]"] = part_place
        content.append(part)

    def add_reasoning(self, text: str, place: str) -> None:
        """Add the reasoning before an assistant's content."""
        message = self._message("assistant", place, "content", "tool_calls")
        message.setdefault("reasoning_content", []).append(text)

    def add_call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Add a tool call of the assistant; its arguments are JSON text."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._message("assistant", place).setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, content: str | Mapping[str, dict[str, Any]], place: str) -> None:
        """Add what a tool answered: a text, or parts, texts and images, by their places."""
        parts = {} if isinstance(content, str) else content
        for index, (part_place, part) in enumerate(parts.items()):
            if "image_url" in part:
                self.part_places[f"messages[{len(self._messages)}].content[{index}]"] = part_place
                self.hidden.append(f"{part_place}.{part['type']}")
        shown = [*parts.values()] if parts else content or ""
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": shown})
        self._places.append(place)

    @property
    def ends_with_text(self) -> bool:
        """Whether the last message is the assistant's, with content and no tool calls."""
        last = self._messages[-1] if self._messages else {}
        return last.get("role") == "assistant" and "content" in last and "tool_calls" not in last

    def messages(self) -> list[dict[str, Any]]:
        """The messages as OpenAI's chats have them."""
        return [_joined(message) for message in self._messages]

    @property
    def places(self) -> Mapping[str, Sequence[str]]:
        """The places that the elements of the chat's fields come from."""
        return {"messages": self._places, "tools": self.tool_places}

    def _message(self, role: str, place: str, *after: str) -> dict[str, Any]:
        """The last message if it is of this role and has none of the fields `after`, or else a new one."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != role or any(name in last for name in after):
            last = {"role": role}
            self._messages.append(last)
            self._places.append(place)
        return last


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning in one piece, and its content as a string if that has one part."""
    content, pieces = message.get("content"), message.get("reasoning_content")
    reasoning = {} if pieces is None else {"reasoning_content": "".join(pieces)}
    is_text = isinstance(content, list) and len(content) == 1 and "text" in content[0]
    text = {"content": message["content"][0]["text"]} if is_text else {}
    return {**message, **reasoning, **text}
