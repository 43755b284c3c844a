# SPDX-License-Identifier: Apache-2.0
"""Every invalid request gets OpenAI's error object: status, type, param and a sentence; the gateway stays healthy."""

import json
import re
from typing import Any

import httpx
import pytest

from hf_triton.testing import TritonServer
from tests.support.gateway import GatewayThread, has_field, num_running, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello!"}]
CANARY = "canary-4711"
SELF = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**fields: object) -> tuple[str, object]:
    return CHAT, {"model": "tiny", "messages": HELLO, **fields}


def completion(**fields: object) -> tuple[str, object]:
    return COMPLETIONS, {"model": "tiny", "prompt": "Hello", **fields}


def message(**fields: object) -> tuple[str, object]:
    return chat(messages=[fields])


FIELDS: dict[str, tuple[tuple[str, object], str | None, str]] = {
    "misspelt field": (chat(temprature=1), "temprature", "did you mean 'temperature'?"),
    "field of the other endpoint": (chat(prompt="a"), "prompt", "there is no field 'prompt'"),
    "no model": ((CHAT, {"messages": HELLO}), "model", "model is required, as there are "),
    "empty model": (chat(model=""), "model", "model is required, as there are "),
    "model is a number": (chat(model=1), "model", "model must be a non-empty string, got 1"),
    "no messages": ((CHAT, {"model": "tiny"}), "messages", "messages is required"),
    "no prompt": ((COMPLETIONS, {"model": "tiny"}), "prompt", "prompt is required"),
    "messages are empty": (chat(messages=[]), "messages", "messages must have at least one message"),
    "role that nobody knows": (message(role="usr", content="a"), "messages[0].role", "function or one"),
    "image": (
        message(role="user", content=[{"type": "image_url", "image_url": {"url": "data:,"}}]),
        "messages[0].content[0]",
        "is an image, and this model reads text alone",
    ),
    "max_tokens is 0 without echo": (completion(max_tokens=0), "max_tokens", "0 with echo true"),
    "top_logprobs alone": (chat(top_logprobs=3), "top_logprobs", "logprobs true"),
    "stream without a door": (chat(stream=True), "stream", "copy the folder `stream_door/`"),
    "stream_options without stream": (chat(stream_options={"include_usage": True}), "stream_options", "stream true"),
    "stream_options with more": (
        chat(model="decoupled", stream=True, stream_options={"x": 1}),
        "stream_options.x",
        "there is no field 'stream_options.x'",
    ),
    "parameters without an end": (
        chat(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {**SELF, "$defs": {"a": SELF}}}}],
            tool_choice="required",
        ),
        "tool_choice",
        "the schema of the tool 'f' cannot be read: $ref",
    ),
    "echo of a chat": (chat(echo=True), "echo", "/v1/completions"),
    "store": (chat(store=True), "store", "store keeps completions"),
    "audio": (chat(modalities=["text", "audio"]), "modalities", "modalities"),
    "functions": (chat(functions=[TOOL]), "functions", "tools"),
    "suffix": (completion(suffix="end"), "suffix", "suffix"),
    "documents": (chat(documents=[{"title": "a", "text": "b"}]), "documents", "documents"),
    "beam search": (completion(use_beam_search=True, n=2), "use_beam_search", "needs the batch engine"),
    "special tokens": (completion(skip_special_tokens=False), "skip_special_tokens", "always true"),
    "tool choice of no tool": (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        "'g'",
    ),
    "tool choice without tools": (chat(tool_choice="required"), "tool_choice", "tools"),
    "tool without a function": (chat(tools=[{"type": "web_search"}, {"type": "function"}]), "tools[1]", "function"),
    "prompt is empty": (completion(prompt=[]), "prompt", "prompt holds no prompt"),
    "prompt of no token ids": (completion(prompt=[[]]), "prompt", "prompt holds no prompt"),
    "prompt mixes texts and ids": (completion(prompt=["a", 1]), "prompt", "prompt[1] must be a string, got 1"),
    "half of a surrogate pair": (message(role="user", content="\ud800"), None, "surrogate"),
    "chat of a model without a template": (
        chat(model="bare"),
        "messages",
        "send a prompt to /v1/completions, or name a Jinja file",
    ),
    "tokenize nothing": (("/tokenize", {"model": "tiny"}), None, "either prompt or messages"),
    "tokenize both": (
        ("/tokenize", {"model": "tiny", "prompt": "a", "messages": HELLO}),
        "prompt",
        "either prompt or messages",
    ),
    "detokenize a token of no model": (
        ("/detokenize", {"model": "tiny", "tokens": [1, 2**70]}),
        "tokens",
        "tokens holds a token id that no model has",
    ),
}
"""Request, `param` and a piece of the sentence; the status is 400."""

RAW: dict[str, tuple[str, str, bytes, dict[str, str], int, str]] = {
    "no body": ("POST", CHAT, b"", {}, 400, "body"),
    "no JSON": ("POST", CHAT, b"{'a': 1}", {}, 400, "not JSON"),
    "an array": ("POST", CHAT, b"[]", {}, 400, "object"),
    "no UTF-8": ("POST", CHAT, b'{"model": "\xff"}', {}, 400, "not JSON that can be read"),
    "NaN": (
        "POST",
        CHAT,
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "top_p": NaN}',
        {},
        400,
        "",
    ),
    "nested deeply": ("POST", CHAT, b'{"a":' * 50_000, {}, 400, "not JSON that can be read"),
    "number of 10,000 digits": ("POST", COMPLETIONS, b'{"seed": ' + b"9" * 10_000 + b"}", {}, 400, ""),
    "form": ("POST", CHAT, b"{}", {"content-type": "application/x-www-form-urlencoded"}, 415, "Content-Type"),
    "unknown endpoint": ("POST", "/v1/chat", b"{}", {}, 404, "no endpoint POST /v1/chat"),
    "GET a chat": ("GET", CHAT, b"", {}, 405, "no endpoint GET /v1/chat/completions: use POST"),
    "unknown model": ("GET", "/v1/models/nobody", b"", {}, 404, "the model 'nobody' does not exist"),
    "stream door as a model": ("GET", "/v1/models/slow_stream", b"", {}, 404, "does not exist"),
    "chat with an unknown model": (
        "POST",
        CHAT,
        json.dumps({"model": "../x", "messages": HELLO}).encode(),
        {},
        404,
        "does not exist",
    ),
    "chat with an empty adapter": (
        "POST",
        CHAT,
        json.dumps({"model": "tiny:", "messages": HELLO}).encode(),
        {},
        404,
        "the model 'tiny:' does not exist",
    ),
    "huge body": ("POST", CHAT, b" " * (17 << 20), {}, 413, "more bytes than"),
}


def check(answer: httpx.Response, status: int, piece: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert piece in error["message"], error
    assert not re.search(r"Traceback|/site-packages|\.py|pydantic|max_new_tokens|num_return", answer.text), error
    assert CANARY not in error["message"]
    return error


@pytest.mark.parametrize("name", FIELDS)
def test_bad_field_is_refused_by_its_name(gateway: GatewayThread, name: str) -> None:
    (path, body), param, piece = FIELDS[name]
    answer = httpx.post(
        gateway.url + path,
        content=json.dumps(body),
        headers={"content-type": "application/json", "authorization": CANARY},
        timeout=60,
    )
    assert check(answer, 400, piece)["param"] == param
    assert param is None or has_field(body, param) or "is required" in piece


@pytest.mark.parametrize("name", RAW)
def test_bad_request_is_refused(gateway: GatewayThread, name: str) -> None:
    method, path, content, headers, status, piece = RAW[name]
    headers = {"content-type": "application/json", **headers}
    answer = httpx.request(method, gateway.url + path, content=content, headers=headers, timeout=60)
    check(answer, status, piece)


def test_body_of_unknown_length_is_bounded(gateway: GatewayThread) -> None:
    chunks = (b" " * (1 << 20) for _ in range(20))
    headers = {"content-type": "application/json"}
    with httpx.Client() as client:
        try:
            answer = client.post(gateway.url + CHAT, content=chunks, headers=headers, timeout=60)
        except httpx.WriteError:
            return  # the gateway has answered and does not read on
    check(answer, 413, "more bytes than")


def test_gateway_is_healthy_afterwards(gateway: GatewayThread, triton: TritonServer) -> None:
    answer = httpx.post(f"{gateway.url}{CHAT}", json={"model": "tiny", "messages": HELLO}, timeout=60)
    assert answer.status_code == 200
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    wait_until(lambda: num_running(triton) == 0)
