# SPDX-License-Identifier: Apache-2.0
"""Hints change no answer: they are passed over, named in a header, and logged once."""

import logging
from typing import Any

import httpx
import pytest

from hf_triton.testing import TritonServer
from hf_triton_gateway.agents.message_blocks import read_messages
from hf_triton_gateway.chat.chat_completions import ChatRequest
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http import hints
from hf_triton_gateway.http.bodies import LARGE_BYTES
from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOKENIZE = "/tokenize"
HELLO = [{"role": "user", "content": "Hello!"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HELLO, "max_tokens": 4},
    COMPLETIONS: {"model": "tiny", "prompt": "Hello", "max_tokens": 4},
    RESPONSES: {"model": "tiny", "input": "Hello!", "max_output_tokens": 4},
    MESSAGES: {"model": "tiny", "messages": HELLO, "max_tokens": 4},
    TOKENIZE: {"model": "tiny", "messages": HELLO},
}
"""The smallest request to each endpoint."""
TOOL = {"name": "f", "parameters": {"type": "object"}}

HINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a cache's key": (CHAT, {"prompt_cache_key": "a", "user": "b"}, "prompt_cache_key, user"),
    "verbosity": (CHAT, {"verbosity": "low"}, "verbosity"),
    "a tier": (CHAT, {"service_tier": "flex"}, "service_tier"),
    "a prediction": (CHAT, {"prediction": {"type": "content", "content": "a"}}, "prediction"),
    "a budget of a chat": (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 8}}, "thinking"),
    "a search": (CHAT, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    "llama.cpp's cache": (COMPLETIONS, {"cache_prompt": True}, "cache_prompt"),
    "an unknown null": (
        COMPLETIONS,
        {"prompt_logprobs": None, "use_activation": None},
        "prompt_logprobs, use_activation",
    ),
    "an unknown list of nothing": (CHAT, {"plugins": []}, "plugins"),
    "verbosity of a text": (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    "a summary": (RESPONSES, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    "a hosted tool": (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "auto"}, "tools.web_search"),
    "Anthropic's tool": (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.web_search_20250305",
    ),
    "a deferred tool": (
        RESPONSES,
        {"tools": [{"type": "function", "defer_loading": True, **TOOL}] * 2, "tool_choice": "none"},
        "tools.defer_loading",
    ),
    "a budget": (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    "an effort": (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
    "a cached block": (
        MESSAGES,
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        "system.cache_control",
    ),
    "a tool of OpenAI": (RESPONSES, {"tools": [{"type": "mcp", "server_label": "a"}]}, "tools.mcp"),
    "a tool that is counted": (TOKENIZE, {"tools": [{"type": "web_search"}]}, "tools.web_search"),
    "a name of many words": (CHAT, {"a secret\r\nx-evil: 1": None}, hints.OTHER),
}
"""Path, fields, and the header of the response."""
NOTHING: dict[str, tuple[str, dict[str, Any]]] = {
    "nulls": (CHAT, {"user": None, "temperature": None, "tools": None, "store": None}),
    "empty containers": (
        CHAT,
        {"mm_processor_kwargs": {}, "tools": [], "stop": [], "functions": [], "logit_bias": {}, "stream_options": {}},
    ),
    "empty words": (CHAT, {"stop": ["", ""], "bad_words": [""]}),
    "an empty stop sequence": (MESSAGES, {"stop_sequences": [""]}),
    "defaults": (CHAT, {"store": False, "verbosity": "medium", "service_tier": "auto", "modalities": ["text"]}),
    "an agent's defaults": (RESPONSES, {"text": {"verbosity": "medium"}, "include": [], "context_management": []}),
    "Anthropic's defaults": (MESSAGES, {"service_tier": "auto", "mcp_servers": [], "stop_sequences": []}),
}


def post(gateway: GatewayThread, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(gateway.url + path, json={**BODIES[path], **fields}, timeout=60)


@pytest.mark.parametrize("case", HINTS)
def test_a_hint_changes_no_answer_and_is_named(gateway: GatewayThread, case: str) -> None:
    path, fields, named = HINTS[case]
    answer, plain = post(gateway, path, **fields), post(gateway, path)
    assert answer.status_code == 200, answer.text
    assert answer.headers[hints.HEADER] == named
    assert answer.json().keys() == plain.json().keys()


def test_an_image_that_a_tool_answered_is_named() -> None:
    parts = [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    for role, content, hidden in (("tool", parts, 1), ("user", parts, 0), ("tool", "See:", 0)):
        asked = {"model": "tiny", "messages": [{"role": role, "content": content}]}
        assert ChatRequest.model_validate(asked).generation("1").hidden == ["messages.content.image_url"] * hidden
    used = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]}
    turns = [*HELLO, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    assert read_messages(turns, None).hidden == ["messages[2].content[0].content[0].image"]


@pytest.mark.parametrize("case", NOTHING)
def test_what_asks_for_nothing_is_not_named(gateway: GatewayThread, case: str) -> None:
    path, fields = NOTHING[case]
    answer = post(gateway, path, **fields)
    assert answer.status_code == 200, answer.text
    assert hints.HEADER not in answer.headers


def test_a_stream_and_a_refusal_name_hints_too(gateway: GatewayThread) -> None:
    stream = post(gateway, CHAT, model="demo", stream=True, user="me")
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers[hints.HEADER] == "user"
    refused = post(gateway, CHAT, user="me", top_p=0)
    assert (refused.status_code, refused.headers[hints.HEADER]) == (400, "user")


def test_a_body_that_a_thread_reads_names_hints_too(gateway: GatewayThread) -> None:
    answer = post(gateway, CHAT, user="x" * 2 * LARGE_BYTES, reasoning_effort="low")
    assert (answer.status_code, answer.headers[hints.HEADER]) == (200, "user, reasoning_effort")


def test_a_header_is_short_whatever_a_client_sends(gateway: GatewayThread) -> None:
    answer = post(gateway, CHAT, **{f"field_{number}": None for number in range(1000)})
    assert answer.status_code == 200
    assert len(answer.headers[hints.HEADER].split(", ")) == hints.MAX_NAMES


def test_a_hint_is_logged_once(gateway: GatewayThread, caplog: pytest.LogCaptureFixture) -> None:
    hints._logged.discard("tools.defer_loading")
    with caplog.at_level(logging.INFO, "hf_triton_gateway"):
        for _ in range(2):
            post(gateway, *HINTS["a deferred tool"][:1], **HINTS["a deferred tool"][1])
            post(gateway, CHAT, **{"a secret": None})
    lines = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert [line for line in lines if "tools.defer_loading" in line] == [
        "passed over: tools.defer_loading, which changes no answer here; responses name it in x-hf-triton-ignored"
    ]
    assert "a secret" not in caplog.text


def test_pages_of_other_origins_may_read_the_header(triton: TritonServer) -> None:
    origin = "https://example.org"
    config = GatewayConfig(triton=triton.grpc_url, port=0, allowed_origins=(origin,))
    with GatewayThread(config) as gateway:
        body = {**BODIES[CHAT], "user": "me"}
        answer = httpx.post(gateway.url + CHAT, json=body, headers={"origin": origin}, timeout=60)
    assert hints.HEADER in answer.headers["access-control-expose-headers"]
