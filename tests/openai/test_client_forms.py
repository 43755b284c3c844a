# SPDX-License-Identifier: Apache-2.0
"""What clients of other servers write: defaults written out, others' names and forms, requests without a model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hf_triton.tasks.tokenizer_answers import CONFIG
from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello!"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HELLO, "max_tokens": 3},
    COMPLETIONS: {"model": "tiny", "prompt": "Hello", "max_tokens": 3},
    RESPONSES: {"model": "tiny", "input": "Hello", "max_output_tokens": 16},
    MESSAGES: {"model": "tiny", "messages": HELLO, "max_tokens": 3},
}
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
BY_ID = {
    **SCHEMA,
    "$id": "https://example.org/a.json",
    "$defs": {"b": {"type": "boolean"}},
    "properties": {"a": {"$ref": "https://example.org/a.json#/$defs/b"}},
}
ANNOTATED = {**SCHEMA, "properties": {"a": {"type": "string", "maxLength": 3, "format": "password"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

AS_IF_ABSENT: dict[str, tuple[str, dict[str, Any]]] = {
    "LMDeploy's client": (CHAT, {"logprobs": False, "top_logprobs": 0}),
    "a seed of none": (CHAT, {"seed": -1}),
    "a seed of none, of a completion": (COMPLETIONS, {"seed": -1}),
    "SGLang's defaults": (CHAT, {"separate_reasoning": True, "return_hidden_states": False, "no_stop_trim": False}),
    "whole numbers": (CHAT, {"max_tokens": 3.0, "top_k": 40.0, "n": 1.0}),
    "limits of none": (CHAT, {"max_tokens": -1.0, "num_predict": 2}),
    "whole token ids": (COMPLETIONS, {"prompt": [5.0, 6]}),
    "Ollama's settings": (CHAT, {"num_ctx": 4096, "keep_alive": "5m", "repeat_last_n": 64, "repeat_penalty": 1.0}),
    "sampling that is off": (CHAT, {"mirostat": 0, "tfs_z": 1.0, "xtc_probability": 0.0}),
    "no thinking": (CHAT, {"think": False}),
    "a new field of Anthropic's": (MESSAGES, {"thread": {"type": "create"}}),
    "ids of messages": (CHAT, {"messages": [{**HELLO[0], "id": "m1", "cache_control": {"type": "ephemeral"}}]}),
    "OpenRouter's usage": (CHAT, {"usage": {"include": True}}),
    "OpenAI's defaults": (
        CHAT,
        {"parallel_tool_calls": True, "metadata": {"a": "b"}, "skip_special_tokens": True, "guided_json": None},
    ),
    "an agent's defaults": (
        RESPONSES,
        {
            "background": False,
            "include": ["reasoning.encrypted_content"],
            "truncation": "disabled",
            "tool_choice": "auto",
        },
    ),
    "Anthropic's defaults": (MESSAGES, {"thinking": {"type": "disabled"}, "metadata": {"user_id": "a"}, "tools": []}),
    "transformers chat": (CHAT, {"generation_config": json.dumps({"temperature": 0.0, "pad_token_id": 1})}),
}


def post(gateway: GatewayThread, path: str, **fields: object) -> httpx.Response:
    return httpx.post(gateway.url + path, json={**LEAST.get(path, {}), **fields}, timeout=60)


@pytest.mark.parametrize("name", AS_IF_ABSENT)
def test_what_asks_for_nothing_changes_nothing(gateway: GatewayThread, name: str) -> None:
    path, fields = AS_IF_ABSENT[name]
    assert post(gateway, path, **fields).status_code == 200


@pytest.mark.parametrize("name", ["mirostat", "tfs_z", "structural_tag", "options", "random_seed", "TEMPERATURE"])
def test_what_would_change_the_answer_is_refused(gateway: GatewayThread, name: str) -> None:
    answer = post(gateway, CHAT, **{name: 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


TWICE: dict[str, dict[str, Any]] = {
    "num_predict": {"n_predict": 2, "num_predict": 5},
    "guided_regex": {"regex": "a", "guided_regex": "b"},
    "format": {"response_format": {"type": "json_object"}, "format": SCHEMA},
}


@pytest.mark.parametrize("name", TWICE)
def test_a_field_under_two_names_is_refused(gateway: GatewayThread, name: str) -> None:
    body = {name: value for name, value in LEAST[CHAT].items() if name != "max_tokens"}
    answer = httpx.post(gateway.url + CHAT, json={**body, **TWICE[name]}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert "are one field" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_generation_config_counts_where_a_field_is_null(gateway: GatewayThread, path: str) -> None:
    limit = "max_tokens" if path == CHAT else "max_output_tokens"
    config = {"max_new_tokens": 2, "num_beams": 4}
    answer = post(gateway, path, generation_config=config, **{limit: None})
    usage = answer.json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 2
    assert "generation_config.num_beams" in answer.headers["x-hf-triton-ignored"]


def test_an_unknown_field_is_named(gateway: GatewayThread) -> None:
    past = {"role": "assistant", "content": "Hi", "finish_reason": "stop", "refusal": None, "annotations": []}
    answer = post(gateway, CHAT, num_ctx=512, messages=[{**HELLO[0], "id": "m1"}, past, HELLO[0]])
    assert answer.headers["x-hf-triton-ignored"] == "num_ctx, messages.id, messages.finish_reason"


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_prefix_is_continued(gateway: GatewayThread, name: str) -> None:
    start = {"role": "assistant", "content": "The harbour is"}
    wanted = post(gateway, CHAT, model="demo", messages=[*HELLO, start], continue_final_message=True)
    found = post(gateway, CHAT, model="demo", messages=[*HELLO, {**start, name: True}])
    assert found.json()["choices"][0]["message"] == wanted.json()["choices"][0]["message"]
    assert found.json()["usage"]["prompt_tokens"] == wanted.json()["usage"]["prompt_tokens"]
    assert "x-hf-triton-ignored" not in found.headers
    earlier = post(gateway, CHAT, model="demo", messages=[*HELLO, {**start, name: True}, *HELLO])
    assert earlier.headers["x-hf-triton-ignored"] == f"messages.{name}"
    plain = post(gateway, CHAT, model="demo", messages=[*HELLO, {**start, name: False}])
    assert plain.json()["usage"]["prompt_tokens"] > wanted.json()["usage"]["prompt_tokens"]
    for marked, answer in ((True, wanted), (False, plain)):
        counted = post(gateway, "/tokenize", model="demo", messages=[*HELLO, {**start, name: marked}])
        assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_prefix_that_cannot_be_continued_is_named(gateway: GatewayThread, path: str) -> None:
    last = {"role": "assistant", "content": "The", "prefix": True}
    error = post(gateway, path, model="demo", messages=[*HELLO, last], add_generation_prompt=True).json()["error"]
    assert error["message"].startswith("add_generation_prompt starts a new message, messages[1].prefix continues")


WRONG_FORMATS: dict[str, tuple[object, str]] = {
    "text": ("json", 'response_format must be an object: {"type": "text"}, {"type": "json_object"} or {"type": '),
    "no type": ({"typ": "text"}, "response_format must be of type `text`, `json_object` or `json_schema`, got none"),
    "no schema": (
        {"type": "json_object", "schema": 5},
        "response_format.schema must be a JSON schema, an object, got 5",
    ),
    "a field": ({"type": "text", "foo": 1}, "response_format has no field of this name, got 'foo'; it has type"),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", WRONG_FORMATS)
def test_a_wrong_format_is_told_the_right_ones(gateway: GatewayThread, path: str, name: str) -> None:
    value, sentence = WRONG_FORMATS[name]
    error = post(gateway, path, response_format=value).json()["error"]
    assert (error["param"], error["message"][: len(sentence)]) == ("response_format", sentence)


FORMATS: dict[str, dict[str, Any]] = {
    "huggingface_hub": {"response_format": {"type": "json_object", "value": SCHEMA}},
    "TGI's later form": {"response_format": {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}}},
    "TGI": {"response_format": {"type": "json", "value": SCHEMA}},
    "llama.cpp": {"response_format": {"type": "json_object", "schema": SCHEMA}},
    "the flat form": {"response_format": {"type": "json_schema", "schema": SCHEMA, "name": "a", "strict": True}},
    "LiteLLM": {"response_format": {"type": "json_object", "response_schema": SCHEMA}},
    "Ollama": {"format": SCHEMA},
    "an identity": {"response_format": {"type": "json_schema", "json_schema": {"schema": BY_ID}}},
    "an annotation": {"response_format": {"type": "json_schema", "json_schema": {"schema": ANNOTATED}}},
    "llama.cpp's grammar": {"grammar": 'root ::= "{\\"a\\":true}"'},
    "SGLang": {"regex": r'\{"a":(true|false)\}'},
}


@pytest.mark.parametrize("name", FORMATS)
def test_schemas_in_every_form_constrain(gateway: GatewayThread, name: str) -> None:
    answer = post(gateway, CHAT, max_tokens=40, **FORMATS[name]).json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"a"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("schema", [BY_ID, ANNOTATED], ids=["an identity", "an annotation"])
def test_tools_parameters_are_schemas_too(gateway: GatewayThread, schema: object, choice: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = post(gateway, CHAT, tools=[tool], tool_choice=choice, max_tokens=60).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"a"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_format_beside_a_forced_call_is_for_text(gateway: GatewayThread, choice: object) -> None:
    format_of = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "object", "required": ["b"]}}}
    answer = post(gateway, CHAT, tools=[TOOL], tool_choice=choice, response_format=format_of, max_tokens=60).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"a"}


@pytest.fixture(scope="module")
def with_default(triton: TritonServer) -> Iterator[GatewayThread]:
    config = GatewayConfig(triton=triton.grpc_url, port=0, default_model="tiny")
    with GatewayThread(config) as running:
        yield running


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("name", [None, "", "dummy", "tgi"])
def test_a_request_without_a_model_means_the_default(with_default: GatewayThread, path: str, name: str | None) -> None:
    answer = post(with_default, path, model=name)
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")


@pytest.mark.parametrize("path", ["/chat/completions", "/openai/v1/chat/completions"])
def test_paths_of_other_servers(gateway: GatewayThread, path: str) -> None:
    assert httpx.post(gateway.url + path, json=LEAST[CHAT], timeout=60).status_code == 200
    assert httpx.get(f"{gateway.url}/models").json()["data"]
    assert httpx.get(f"{gateway.url}/models/tiny").json()["id"] == "tiny"


def test_transformers_chat_asks_whether_a_model_is_served(gateway: GatewayThread) -> None:
    served = httpx.post(f"{gateway.url}/load_model", json={"model": "tiny"})
    assert served.headers["content-type"].startswith("text/event-stream")
    assert json.loads(served.text.removeprefix("data: ")) == {"status": "ready", "model": "tiny", "cached": True}
    unknown = httpx.post(f"{gateway.url}/load_model", json={"model": "nobody"})
    assert json.loads(unknown.text.removeprefix("data: "))["status"] == "error"


def test_tokens_without_a_model_are_the_defaults(with_default: GatewayThread, gateway: GatewayThread) -> None:
    told = httpx.post(f"{with_default.url}/tokenize", json={"prompt": "Hello", "model": "dummy"}, timeout=60).json()
    named = httpx.post(f"{gateway.url}/tokenize", json={"prompt": "Hello", "model": "tiny"}, timeout=60).json()
    assert told == named
    text = httpx.post(f"{with_default.url}/detokenize", json={"tokens": told["tokens"]}, timeout=60).json()
    assert text["prompt"].endswith("Hello")


@pytest.mark.parametrize("name", ["tiny", "decoupled", "batching", "demo"])
def test_a_tokenizer_says_what_it_is(gateway: GatewayThread, name: str) -> None:
    answer = httpx.get(f"{gateway.url}/tokenizer_info", params={"model": name}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "content" in answer.json()["chat_template"]
    assert answer.json()["tokenizer_class"]
    assert answer.json().keys() <= {*CONFIG, *SPECIAL, "tokenizer_class", "chat_template"}  # nothing of the host


def test_cached_tokens_are_told_everywhere(gateway: GatewayThread) -> None:
    text = "A prompt that is longer than one block of the prefix cache. " * 3
    for _ in range(2):
        usage = post(gateway, CHAT, messages=[{"role": "user", "content": text}]).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    counts = post(gateway, MESSAGES, messages=[{"role": "user", "content": text}]).json()["usage"]
    assert counts["cache_read_input_tokens"] == cached
    assert counts["input_tokens"] == usage["prompt_tokens"] - cached
    assert post(gateway, CHAT, messages=HELLO).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_role_of_a_stream_counts_nothing(gateway: GatewayThread) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    lines = post(gateway, CHAT, model="demo", stream=True, stream_options=options).text.split("\n\n")
    first = json.loads(lines[0].removeprefix("data: "))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["usage"]["completion_tokens"] == 0
    assert first["usage"]["prompt_tokens"] > 0


def test_metadata_comes_back(gateway: GatewayThread) -> None:
    assert post(gateway, RESPONSES, metadata={"a": "b"}).json()["metadata"] == {"a": "b"}


def test_responses_take_parts_and_tools_as_chats_have_them(gateway: GatewayThread) -> None:
    parts = [{"type": "input_text", "text": "Hello"}]
    answer = post(gateway, RESPONSES, input=parts, tools=[TOOL], tool_choice="required", stop="x")
    assert answer.status_code == 200, answer.text
