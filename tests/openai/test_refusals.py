# SPDX-License-Identifier: Apache-2.0
"""Refusals of a model's process as each API tells them: in its names, its places and its words."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpcclient

from hf_triton.protocol.request_options import PARAMETERS
from hf_triton.testing import TritonServer
from hf_triton_gateway.agents.anthropic_messages import CountRequest, MessagesRequest
from hf_triton_gateway.agents.responses import ResponsesRequest
from hf_triton_gateway.chat.chat_completions import ChatRequest
from hf_triton_gateway.chat.completions import CompletionRequest
from hf_triton_gateway.chat.fields import ALIASES, SAMPLING
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread, add_demo

pytestmark = pytest.mark.full

CONTEXT, CACHE = 512, 256
CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"n": 2, "temperature": 0},
    {"n": 3, "best_of": 2},
    {"min_tokens": 9, "max_tokens": 3},
    {"temperature": 0, "do_sample": True},
    {"top_k": 5, "do_sample": False},
    {"use_beam_search": True},
    {"use_beam_search": True, "n": 2},
    {"use_beam_search": True, "n": 2, "top_p": 0.5},
    {"use_beam_search": True, "n": 2, "stop_token_ids": [5], "guided_regex": "a"},
    {"length_penalty": 2.0},
    {"guided_regex": "a", "guided_choice": ["b"]},
    {"guided_regex": "a(", "ignore_eos": False},
    {"guided_regex": "a", "ignore_eos": True},
    {"response_format": {"type": "json_object"}, "stop_token_ids": [5]},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"regex": "a("}},
    {"stop_token_ids": [999_999]},
    {"logit_bias": {"999999": 1}},
    {"bad_words": [""]},
    {"lora_name": "none"},
    {"truncate_prompt_tokens": 0},
    {"tool_choice": "required"},
    {"parallel_tool_calls": True, "tool_choice": "none", "tools": []},
    {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
    {"continue_final_message": True},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"text": {"format": {"type": "xml"}}},
    {"output_config": {"format": {"type": "xml"}}},
)
APIS: dict[str, tuple[Any, str, str]] = {
    "/v1/chat/completions": (ChatRequest, "messages", "max_tokens"),
    "/v1/completions": (CompletionRequest, "prompt", "max_tokens"),
    "/v1/responses": (ResponsesRequest, "input", "max_output_tokens"),
    "/v1/messages": (MessagesRequest, "messages", "max_tokens"),
}
"""Each API's fields, its prompt and its limit."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    """The demo model with a context of 512 tokens and half as many of cache."""
    repository = tmp_path_factory.mktemp("refusals")
    add_demo(repository)
    config = repository / "demo" / "config.pbtxt"
    more = f'parameters {{ key: "max_cache_tokens" value {{ string_value: "{CACHE}" }} }}\n'
    config.write_text(config.read_text() + more)
    with (
        TritonServer(repository, ready_timeout_s=280) as server,
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as running,
    ):
        running.triton_url = server.grpc_url  # type: ignore[attr-defined]
        yield running


def body_of(path: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {APIS[path][1]: text}
    if APIS[path][1] == "messages":
        prompt = {"messages": [{"role": "user", "content": text}]}
    limit = {"max_tokens": 8} if path == "/v1/messages" else {}
    return {"model": "demo", **limit, **prompt, **more}


def refused(gateway: GatewayThread, path: str, body: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
    answer = httpx.post(gateway.url + path, json=body | ({"stream": True} if stream else {}), timeout=60)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "\\ufdd" not in answer.text
    assert not re.search("[\ufdd0-\ufdd5]", error["message"])
    return error


# --- a conversation that does not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_a_prompt_that_is_too_long(gateway: GatewayThread, path: str, stream: bool) -> None:
    error = refused(gateway, path, body_of(path, "abc def " * 600), stream=stream)
    if path == "/v1/messages":
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found
        assert int(found[1]) > int(found[2]) == CONTEXT - 1
        return
    assert (error["code"], error["param"]) == ("context_length_exceeded", APIS[path][1])
    assert ("truncate_prompt_tokens" in error["message"]) == ("truncate_prompt_tokens" in APIS[path][0].model_fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_a_prompt_with_its_completion_that_is_too_long(gateway: GatewayThread, path: str, stream: bool) -> None:
    error = refused(gateway, path, body_of(path, **{APIS[path][2]: CONTEXT}), stream=stream)
    if path == "/v1/messages":
        words = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
        found = re.search(words, error["message"])
        assert found
        assert int(found[2]) == CONTEXT == int(found[3])
        return
    assert (error["code"], error["param"]) == ("context_length_exceeded", APIS[path][2])


@pytest.mark.parametrize("path", [*APIS, "/v1/messages/count_tokens"])
def test_a_prompt_of_too_many_bytes(gateway: GatewayThread, path: str) -> None:
    own = path.removesuffix("/count_tokens")
    body = body_of(own, "abc def " * 4000)
    if path != own:
        del body["max_tokens"]
    error = refused(gateway, path, body)
    if own == "/v1/messages":
        found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found
        assert int(found[1]) > int(found[2]) == CONTEXT
        return
    assert error["code"] == "context_length_exceeded"
    assert "bytes" in error["message"]


@pytest.mark.parametrize("path", APIS)
def test_a_cache_that_is_too_small_is_told_by_the_prompt_and_the_limit(gateway: GatewayThread, path: str) -> None:
    error = refused(gateway, path, body_of(path, **{APIS[path][2]: 400}))
    limit = APIS[path][2]
    assert re.match(rf"a prompt of \d+ tokens and {limit} 400 need ", error["message"]), error
    if path == "/v1/messages":
        assert re.search(r"input length and `max_tokens` exceed context limit: \d+ \+ 400 > 256$", error["message"])
    else:
        assert error["param"] == limit


# --- a client's own words --------------------------------------------------------------------------------------------


def test_the_words_of_a_clients_schema_stay(gateway: GatewayThread) -> None:
    schema = {"type": "json_schema", "schema": {"type": "stop"}}
    error = refused(gateway, "/v1/messages", body_of("/v1/messages", output_config={"format": schema}))
    assert "Invalid type: stop" in error["message"]
    assert error["message"].startswith("output_config.format ")


@pytest.mark.parametrize("word", ["stop_strings", "prompt", "text_input", "max_new_tokens", "input", "row 3"])
@pytest.mark.parametrize("path", [path for path in APIS if path != "/v1/completions"])
def test_the_words_of_a_clients_variable_stay(gateway: GatewayThread, path: str, word: str) -> None:
    error = refused(gateway, path, body_of(path, chat_template_kwargs={word: 1e30}))
    assert error["message"].startswith(f"chat_template_kwargs: '{word}' must be ")
    if path != "/v1/messages":
        assert error["param"] == "chat_template_kwargs"


CHAT, COMPLETIONS, RESPONSES, MESSAGES = APIS
OTHER_NAMES: dict[str, Any] = {
    "repeat_penalty": -1,
    "num_predict": 100_000,
    "n_predict": -5,
    "regex": "(",
    "ebnf": "start: (",
    "grammar": "x",
    "json_schema": {"type": "thing"},
}
"""Each of ALIASES with a value that is refused: at the gateway, or at the model."""
SPELLINGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    *((path, {name: value}, name) for path in (CHAT, COMPLETIONS) for name, value in OTHER_NAMES.items()),
    (COMPLETIONS, {"num_predict": 0}, "num_predict"),
    (CHAT, {"regex": "a", "guided_choice": ["b"]}, "regex"),
    (CHAT, {"generation_config": {"max_new_tokens": 100_000}}, "generation_config.max_new_tokens"),
    (CHAT, {"generation_config": {"best_of": 2, "num_return_sequences": 3}}, "generation_config.best_of"),
    (CHAT, {"generation_config": {"stop_strings": [5]}}, "generation_config.stop_strings"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (CHAT, {"guided_decoding": {"json": {"type": "thing"}}}, "guided_decoding.json"),
    (CHAT, {"format": {"type": "thing"}}, "format"),
    (CHAT, {"format": "xml"}, "format"),
    (CHAT, {"think": "x" * 200}, "think"),
    (RESPONSES, {"repeat_penalty": -1}, "repeat_penalty"),
    (RESPONSES, {"generation_config": {"max_new_tokens": 100_000}}, "generation_config.max_new_tokens"),
    (MESSAGES, {"repeat_penalty": -1}, "repeat_penalty"),
    (MESSAGES, {"max_tokens": None, "num_predict": 100_000}, "num_predict"),
    (MESSAGES, {"output_format": {"type": "xml"}}, "output_format"),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": {"type": "thing"}}}, "output_format"),
)
"""Requests that give a field by one of its names, and that name."""


def test_each_alias_has_a_wrong_value() -> None:
    assert {*OTHER_NAMES, "truncation_direction"} == ALIASES.keys(), "the last one is of encoders"


@pytest.mark.parametrize(("path", "fields", "word"), SPELLINGS)
def test_a_field_is_told_by_the_name_that_the_client_gave_it(
    gateway: GatewayThread, path: str, fields: dict[str, Any], word: str
) -> None:
    error = refused(gateway, path, body_of(path, **fields))
    names = {ALIASES.get(word, word), *SAMPLING.values(), "response_format", "reasoning_effort"} - {word, *fields}
    found = set(re.findall(r"[a-z_.]{3,}", error["message"].partition(": input length")[0]))
    assert (word in found, found & {name for name in names if "_" in name}) == (True, set()), error
    assert path == MESSAGES or error["param"] == word


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
@pytest.mark.parametrize("schema", [{"type": "thing"}, {"enum": ["x" * 70_000]}])
def test_the_schema_of_a_tool_is_no_field_of_another_api(
    gateway: GatewayThread, schema: dict[str, Any], choice: dict[str, str]
) -> None:
    tools = [{"name": "f", "input_schema": schema}]
    error = refused(gateway, MESSAGES, body_of(MESSAGES, tools=tools, tool_choice=choice))
    assert "parameters" not in error["message"]


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        (MESSAGES, "stop", "stop_sequences"),
        (MESSAGES, "max_output_tokens", "max_tokens"),
        (MESSAGES, "instructions", "system"),
        (RESPONSES, "max_completion_tokens", "max_output_tokens"),
        (RESPONSES, "num_predict", "max_output_tokens"),
        (RESPONSES, "messages", "input"),
        (CHAT, "stop_sequences", "stop"),
        (CHAT, "input", "messages"),
    ],
)
def test_another_api_s_field_is_answered_with_this_one_s(
    gateway: GatewayThread, path: str, name: str, meant: str
) -> None:
    error = refused(gateway, path, body_of(path) | {name: ["a"]})
    assert error["message"] == f"there is no field '{name}', did you mean '{meant}'?"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(("name", "value"), [("functions", [{}]), ("mirostat", 2), ("logits_processors", ["a"])])
def test_what_chats_refuse_is_not_passed_over_elsewhere(
    gateway: GatewayThread, path: str, name: str, value: Any
) -> None:
    assert refused(gateway, path, body_of(path, **{name: value}))["message"].startswith(f"{name} is ")


@pytest.mark.parametrize("path", APIS)
def test_no_refusal_names_a_field_that_the_api_lacks(gateway: GatewayThread, path: str) -> None:
    """Each field of an API that is a parameter of ours, with values that are none."""
    fields = set(APIS[path][0].model_fields)
    unsent = {*PARAMETERS, "text_input", "prompt_token_ids", "messages", "prompt"} - fields
    # words of English, or of the folder's settings, are no names
    unsent -= {"prompt", "stop", "n", "stream", "tools", "messages"} | {"engine"}
    given: dict[str, list[Any]] = {
        name: [-7, "words", [[]], {"type": "frobnicate"}] for name in fields - {"model", "stream"}
    }
    given["tools"] = [
        [{"type": "function", "function": {"name": "f", "parameters": 5}, "name": "f", "input_schema": 5}]
    ]
    pairs = list(CONTRADICTIONS)
    for name, values in given.items():
        pairs += [{name: value} for value in values]
    num_refused = 0
    for pair in pairs:
        if not pair.keys() <= fields:
            continue
        answer = httpx.post(gateway.url + path, json=body_of(path) | pair, timeout=60)
        if answer.status_code != 400:
            continue
        num_refused += 1
        error = answer.json()["error"]
        found = set(re.findall(r"[a-z_]{2,}", error["message"])) & unsent
        assert not found, (pair, error)
        param = error.get("param")
        root = None if param is None else re.split(r"[.\[]", param)[0]
        assert root is None or root in (fields if len(pair) > 1 else pair), (pair, error)
    assert num_refused > 10


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_prompt_of_a_list_is_told_by_its_number(gateway: GatewayThread) -> None:
    path, long = "/v1/completions", "abc def " * 600
    for more in ({}, {"max_tokens": 100_000}):
        error = refused(gateway, path, {"model": "demo", "prompt": long if not more else "a", **more})
        assert (error["message"].startswith("prompt has "), "row" in error["message"]) == (True, False)
    error = refused(gateway, path, {"model": "demo", "prompt": ["a", "b", long]})
    assert error["message"].startswith("prompt row 2 has ")
    error = refused(gateway, path, {"model": "demo", "prompt": [[5], [6] * 600]})
    assert error["message"].startswith("prompt[1] has 600 tokens")
    assert error["param"] == "prompt[1]"


# --- what crosses Triton ---------------------------------------------------------------------------------------------


def test_triton_s_own_clients_read_sentences(gateway: GatewayThread) -> None:
    client = grpcclient.InferenceServerClient(gateway.triton_url)  # type: ignore[attr-defined]
    for parameters, begins in (
        ({}, "invalid_parameter: temperature"),
        ({"error_form": 1}, 'invalid_parameter: {"sent'),
    ):
        prompt = grpcclient.InferInput("text_input", [1], "BYTES")
        prompt.set_data_from_numpy(__import__("numpy").array([b"a"], dtype=object))
        with pytest.raises(grpcclient.InferenceServerException) as caught:
            client.infer("demo", [prompt], parameters={"temperature": "hot", **parameters})
        assert str(caught.value.message()).partition("] ")[2].startswith(begins) or begins in str(caught.value)
    client.close()


def test_count_tokens_has_the_names_of_messages() -> None:
    assert set(CountRequest.model_fields) <= set(MessagesRequest.model_fields)
