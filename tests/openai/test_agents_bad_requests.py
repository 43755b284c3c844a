# SPDX-License-Identifier: Apache-2.0
"""Invalid requests of agents' APIs: each gets its API's error object, with a sentence that names the place."""

import json
import re
from typing import Any

import httpx
import pytest

from hf_triton.testing import TritonServer
from tests.support.gateway import GatewayThread, has_field, num_running, wait_until

pytestmark = pytest.mark.full

HELLO = [{"role": "user", "content": "Hello!"}]
TOOL = {"type": "function", "name": "f", "parameters": {}}
CUSTOM = {"type": "custom", "name": "c"}
NO_TYPE = {"type": "object", "properties": {"a": {"type": "thing"}}}
OURS = r"Traceback|/site-packages|\.py|pydantic|max_new_tokens|num_return|messages\[|stop_strings|response_format"


def asks(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "input": "Hello!", **fields}


def item(**fields: object) -> dict[str, object]:
    return asks(instructions="Be brief.", input=[*HELLO, fields])


RESPONSES: dict[str, tuple[dict[str, object], str | None, str]] = {
    "no input": ({"model": "tiny"}, "input", "input is required"),
    "no model": ({"input": "Hello!"}, "model", "model is required"),
    "input is a number": (asks(input=1), "input", "input must be"),
    "input is empty": (asks(input=[]), "input", "input"),
    "item is text": (asks(input=["Hello!"]), "input[0]", "input[0] must be a JSON object"),
    "item without content": (item(role="user"), "input[1].content", "input[1].content is required"),
    "item of no role": (item(role="robot", content="a"), "input[1].role", "input[1].role must be"),
    "item with an unknown field": (item(role="user", content="a", colour=1), "input[1].colour", "'colour'"),
    "output of a hosted tool": (item(type="shell_call_output", output=[]), "input[1]", "'shell_call_output'"),
    "item of another response": (item(type="item_reference", id="1"), "input[1]", "'item_reference'"),
    "image": (
        item(role="user", content=[{"type": "input_image", "image_url": "data:,"}]),
        "input[1].content[0]",
        "input[1].content[0] is an image, and this model reads text alone",
    ),
    "file": (item(role="user", content=[{"type": "input_file", "file_id": "1"}]), "input[1].content[0]", "input_file"),
    "part without text": (item(role="user", content=[{"type": "input_text"}]), "input[1].content[0]", "must be"),
    "content is an empty array": (item(role="user", content=[]), "input[1].content", "empty"),
    "call without a name": (item(type="function_call", call_id="1", arguments="{}"), "input[1].name", "is required"),
    "output without a call": (item(type="function_call_output", output="a"), "input[1].call_id", "is required"),
    "field of the chat": (asks(max_tokens=3), "max_tokens", "there is no field 'max_tokens'"),
    "conversation": (asks(conversation="conv_1"), "conversation", "keeps responses alone"),
    "background": (asks(background=True, store=False), "store", "background needs a response that is kept"),
    "stored prompt": (asks(prompt={"id": "pmpt_1"}), "prompt", "stored prompt"),
    "truncation": (asks(truncation="auto"), "truncation", "'disabled'"),
    "included field of no kind": (asks(include=["a"]), "include", "include"),
    "two tools of one name": (asks(tools=[TOOL, {"type": "custom", "name": TOOL["name"]}]), "tools", "several"),
    "custom tool without a name": (asks(tools=[{"type": "custom"}]), "tools[0].name", "is required"),
    "custom format of no kind": (asks(tools=[CUSTOM | {"format": {"type": "json"}}]), "tools[0].format", "grammar"),
    "custom grammar of no syntax": (
        asks(tools=[CUSTOM | {"format": {"type": "grammar", "syntax": "ebnf", "definition": "a"}}]),
        "tools[0].format.syntax",
        "lark",
    ),
    "custom grammar that is wrong": (
        asks(
            tools=[CUSTOM | {"format": {"type": "grammar", "syntax": "lark", "definition": "a"}}],
            tool_choice="required",
        ),
        "tools",
        "cannot be read",
    ),
    "namespace without tools": (asks(tools=[{"type": "namespace", "name": "a"}]), "tools[0].tools", "is required"),
    "allowed_tools of no mode": (
        asks(tools=[TOOL], tool_choice={"type": "allowed_tools", "tools": []}),
        "tool_choice.mode",
        "is required",
    ),
    "allowed tool that there is not": (
        asks(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [CUSTOM]}),
        "tool_choice",
        "'c'",
    ),
    "tool_choice of no kind": (asks(tools=[TOOL], tool_choice="some"), "tool_choice", "required"),
    "tool_choice of a hosted tool": (
        asks(tools=[TOOL], tool_choice={"type": "file_search"}),
        "tool_choice",
        "function",
    ),
    "tool_choice of an unknown tool": (
        asks(tools=[TOOL], tool_choice={"type": "function", "name": "g"}),
        "tool_choice",
        "'g'",
    ),
    "tool_choice without tools": (asks(tool_choice="required"), "tool_choice", "without tools"),
    "max_output_tokens is 0": (asks(max_output_tokens=0), "max_output_tokens", "an integer >= 1, got 0"),
    "format of no kind": (asks(text={"format": {"type": "xml"}}), "text.format", "`json_object`"),
    "schema with an unknown type": (
        asks(text={"format": {"type": "json_schema", "name": "a", "schema": NO_TYPE}}),
        "text.format",
        "thing",
    ),
    "stream without a door": (asks(stream=True), "stream", "copy the folder `stream_door/`"),
    "NaN that is repeated": (asks(tools=[{**TOOL, "defer_loading": float("nan")}]), None, "NaN"),
    "surrogate that is repeated": (
        asks(text={"format": {"type": "json_schema", "description": "\ud800", "schema": {"type": "object"}}}),
        None,
        "surrogate",
    ),
    "half of a surrogate pair": (asks(input="\ud800"), None, "surrogate"),
}
"""Request, `param` and a piece of the sentence; the status is 400."""


def says(*messages: object, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "max_tokens": 3, "messages": [*HELLO, *messages], **fields}


def block(**fields: object) -> dict[str, object]:
    return says({"role": "assistant", "content": "Yes?"}, {"role": "user", "content": [fields]}, system="Be brief.")


MESSAGES: dict[str, tuple[dict[str, object], str]] = {
    "no max_tokens": ({"model": "tiny", "messages": HELLO}, "max_tokens is required"),
    "no messages": ({"model": "tiny", "max_tokens": 3}, "messages is required"),
    "no model": ({"max_tokens": 3, "messages": HELLO}, "model is required"),
    "messages are empty": ({"model": "tiny", "max_tokens": 3, "messages": []}, "messages must have at least one"),
    "message is text": (says("Hello!"), "messages[1] must be a JSON object"),
    "message without content": (says({"role": "user"}), "messages[1].content is required"),
    "message of a tool": (says({"role": "tool", "content": "a"}), "messages[1].role must be"),
    "message with an unknown field": (says({"role": "user", "content": "a", "name": "b"}), "'name'"),
    "content is empty": (says({"role": "user", "content": []}), "messages[1].content is empty"),
    "block is text": (says({"role": "user", "content": ["a"]}), "messages[1].content[0] must be like"),
    "block without a type": (block(text="a"), "messages[2].content[0] must be like"),
    "text without text": (block(type="text"), "messages[2].content[0].text is required"),
    "image": (block(type="image", source={"type": "url", "url": "a"}), "messages[2].content[0] is an image"),
    "hosted tool's result": (block(type="web_search_tool_result", tool_use_id="1", content=[]), "'web_search_tool_"),
    "tool use of the user": (block(type="tool_use", id="1", name="f", input={}), "of role 'user'"),
    "tool use without a name": (
        says({"role": "assistant", "content": [{"type": "tool_use", "id": "1", "input": {}}]}),
        "messages[1].content[0].name is required",
    ),
    "tool result without a use": (block(type="tool_result", content="a"), "content[0].tool_use_id is required"),
    "system is a number": (says(system=1), "system must be"),
    "system has an image": (says(system=[{"type": "image", "source": {}}]), "system[0] is of type 'image'"),
    "field of the chat": (says(stop=["a"]), "did you mean"),
    "max_tokens is 0": (says(max_tokens=0), "max_tokens must be an integer >= 1, got 0"),
    "tool without a schema": (says(tools=[{"name": "f"}]), "tools[0].input_schema is required"),
    "tool without a name": (says(tools=[{"input_schema": {}}]), "tools[0].name is required"),
    "tool_choice of no kind": (says(tools=[], tool_choice={"type": "some"}), "tool_choice must be of type"),
    "tool_choice of an unknown tool": (
        says(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "tool", "name": "g"}),
        "'g'",
    ),
    "format without a schema": (says(output_config={"format": {"type": "json_schema"}}), "output_config.format must"),
    "schema with an unknown type": (
        says(output_config={"format": {"type": "json_schema", "schema": NO_TYPE}}),
        "thing",
    ),
    "container": (says(container="c"), "container is for tools that run on the server"),
    "half of a surrogate pair": (says({"role": "user", "content": "\ud800"}), "surrogate"),
}
"""Request and a piece of the sentence; the status is 400."""


def post(gateway: GatewayThread, path: str, body: Any) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(gateway.url + path, content=json.dumps(body), headers=headers, timeout=60)


@pytest.mark.parametrize("name", RESPONSES)
def test_bad_response_is_refused(gateway: GatewayThread, name: str) -> None:
    body, param, piece = RESPONSES[name]
    answer = post(gateway, "/v1/responses", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert piece in error["message"], error
    assert not re.search(OURS, answer.text), error
    assert error["param"] == param, error
    assert param is None or has_field(body, param) or piece.endswith("is required")


@pytest.mark.parametrize("name", MESSAGES)
def test_bad_message_is_refused(gateway: GatewayThread, name: str) -> None:
    body, piece = MESSAGES[name]
    answer = post(gateway, "/v1/messages", body)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"type", "error"}
    error = answer.json()["error"]
    assert set(error) == {"type", "message"}
    assert error["type"] == "invalid_request_error"
    assert piece in error["message"], error
    assert not re.search(OURS.replace(r"messages\[|", ""), answer.text), error


@pytest.mark.parametrize(("content", "status"), [("{", 400), ("[]", 400), ("", 400)])
def test_body_that_is_no_object_is_refused(gateway: GatewayThread, content: str, status: int) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        headers = {"content-type": "application/json"}
        answer = httpx.post(gateway.url + path, content=content, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")


def test_gateway_is_healthy_afterwards(gateway: GatewayThread, triton: TritonServer) -> None:
    assert post(gateway, "/v1/responses", asks()).status_code == 200
    assert post(gateway, "/v1/messages", says()).status_code == 200
    wait_until(lambda: num_running(triton) == 0)
