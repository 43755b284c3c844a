# SPDX-License-Identifier: Apache-2.0
"""The output `message` on a real server: tool calls and reasoning, whole and in deltas, chosen and forced."""

import http.client
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import Reply, post, read_events
from tests.support.paths import ROOT
from tests.support.slow_model import DECOUPLED
from tests.support.standard import StandardServer
from tests.support.writing_model import CHATML, WRITING_MODEL

pytestmark = pytest.mark.full

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2]}},
                "required": ["city", "days"],
                "additionalProperties": False,
                "$defs": {"city": {"type": "string", "maxLength": 6}},
            },
        },
    }
    for name in ("weather", "forecast")
]
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path], standard: StandardServer
) -> Iterator[TritonServer]:
    """`writes` writes what the prompt says, `free` whatever its random weights give; each has a stream door."""
    root = tmp_path_factory.mktemp("messages")
    checkpoint = build_tiny_checkpoint(root / "checkpoint", chat_template=CHATML, max_position_embeddings=1024)
    repository = root / "repository"
    shared = {"huggingface_model": checkpoint, "max_output_length": 400}
    folders: dict[str, dict[str, Any]] = {
        "writes": {},
        "unparsed": {"response_template": "none"},
        "processed": {"config": DECOUPLED},
        "free": {"generation_defaults": json.dumps({"thinking_budget": 0})},
    }
    for name, settings in folders.items():
        folder = make_folder(repository, name, **shared, **settings)
        own = "\n    def postprocess(self, text):\n        return text.upper()\n" if name == "processed" else ""
        if name != "free":
            (folder / "1" / "model.py").write_text(WRITING_MODEL + own)
    for name in ("writes", "free"):
        shutil.copytree(ROOT / "stream_door", repository / f"{name}_stream", symlinks=False)
    with standard.beside(repository) as running:
        for name in (*folders, "writes_stream", "free_stream"):
            assert running.is_model_ready(name), running.log_tail()
        yield running


def body_of(text: str | None, **fields: object) -> dict[str, object]:
    chat = HI if text is None else [{"role": "user", "content": f"say:{text}"}]
    packed = {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in fields.items()}
    return {"messages": json.dumps(chat), "return_message": True, **packed}


def ask(server: TritonServer, text: str | None, name: str = "writes", **fields: object) -> Reply:
    return post(server, f"/v2/models/{name}/generate", body_of(text, **fields))


def message(server: TritonServer, text: str | None, name: str = "writes", **fields: object) -> Any:
    reply = ask(server, text, name, **fields)
    assert reply.status == 200, reply.body
    return json.loads(reply.json()["message"])


def deltas(server: TritonServer, text: str | None, name: str, **fields: object) -> list[Any]:
    connection = http.client.HTTPConnection(server.host, server.http_port, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{name}/generate_stream", json.dumps(body_of(text, **fields)))
        return [json.loads(event.data["message"]) for event in read_events(connection.getresponse())]
    finally:
        connection.close()


def joined(pieces: list[Any]) -> dict[str, Any]:
    """The message that a client makes of the deltas."""
    pieces = json.loads(json.dumps(pieces))
    made: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, Any] = {}
    for piece in pieces:
        for name in ("content", "reasoning_content"):
            if name in piece:
                made[name] = (made.get(name) or "") + piece[name]
        for call in piece.get("tool_calls", ()):
            if call["index"] in calls:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            else:
                calls[call["index"]] = {name: value for name, value in call.items() if name != "index"}
    return made | ({"tool_calls": list(calls.values())} if calls else {})


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    for call in answer.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return answer


def test_reasoning_and_calls_are_told_from_content(server: TritonServer) -> None:
    text = f"Hm, Köln.\n</think>\n\nI look.\n{CALL}\n{CALL}"
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}}
    wanted = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm, Köln.", "tool_calls": [call, call]}
    assert without_ids(message(server, text, tools=TOOLS)) == wanted
    assert without_ids(joined(deltas(server, text, "writes_stream", tools=TOOLS))) == wanted
    only = message(server, text, tools=TOOLS, parallel_tool_calls=False)
    assert without_ids(only) == wanted | {"tool_calls": [call]}


def test_deltas_come_while_tokens_are_decided(server: TritonServer) -> None:
    pieces = deltas(server, "a b c d e f g h</think>One two three four", "writes_stream")
    assert joined(pieces) == {
        "role": "assistant",
        "content": "One two three four",
        "reasoning_content": "a b c d e f g h",
    }
    assert len([piece for piece in pieces if piece]) > 2


def test_a_message_equals_the_text_without_a_response_template(server: TritonServer) -> None:
    reply = ask(server, f"a</think>{CALL} ", "unparsed", tools=TOOLS).json()
    assert json.loads(reply["message"]) == {"role": "assistant", "content": reply["text_output"]}
    assert reply["text_output"] == f"a</think>{CALL} "


def test_structured_output_is_content(server: TritonServer) -> None:
    reply = ask(server, None, "free", tools=TOOLS, guided_choice=["a</think>b"]).json()
    assert json.loads(reply["message"]) == {"role": "assistant", "content": "a</think>b"}


def test_stop_strings_end_the_message(server: TritonServer) -> None:
    fields = {"stop_strings": ["STOP"], "chat_template_kwargs": {"enable_thinking": False}}
    assert message(server, "one STOP two", **fields) == {"role": "assistant", "content": "one "}
    assert joined(deltas(server, "one STOP two", "writes_stream", **fields))["content"] == "one "


def test_postprocess_changes_the_content(server: TritonServer) -> None:
    [*_, last] = deltas(server, f"hm</think>yes {CALL}", "processed", tools=TOOLS, stream=True)
    assert (last["content"], last["reasoning_content"]) == ("YES", "hm")
    assert last["tool_calls"][0]["function"]["name"] == "weather"


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert arguments.keys() == {"city", "days"}
    assert len(arguments["city"]) <= 6
    assert arguments["days"] in (1, 2)


@pytest.mark.parametrize("name", ["weather", "forecast"])
def test_a_named_function_is_called(server: TritonServer, name: str) -> None:
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": name}}}
    whole = message(server, None, "free", **fields)
    pieces = deltas(server, None, "free_stream", **fields)
    for answer in (whole, joined(pieces)):
        [call] = answer["tool_calls"]
        assert (answer["content"], call["type"], call["function"]["name"]) == (None, "function", name)
        check_arguments(call["function"]["arguments"])
    assert without_ids(joined(pieces)) == without_ids(whole)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_required_call_is_made(server: TritonServer, is_parallel: bool) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": is_parallel}
    whole = message(server, None, "free", **fields)
    for call in whole["tool_calls"]:
        assert call["function"]["name"] in ("weather", "forecast")
        check_arguments(call["function"]["arguments"])
    assert is_parallel or len(whole["tool_calls"]) == 1
    assert without_ids(joined(deltas(server, None, "free_stream", **fields))) == without_ids(whole)


SCHEMA = {"type": "json_schema", "json_schema": {"schema": TOOLS[0]["function"]["parameters"]}}


@pytest.mark.parametrize("budget", [0, 1, 9])
@pytest.mark.parametrize("choice", [None, "required", {"type": "function", "function": {"name": "weather"}}])
def test_an_answer_follows_thinking_of_a_budget(server: TritonServer, budget: int, choice: object) -> None:
    fields = {"response_format": SCHEMA} if choice is None else {"tools": TOOLS, "tool_choice": choice}
    whole = message(server, None, "free", thinking_budget=budget, **fields)
    assert ("reasoning_content" in whole) == (budget > 0)
    pieces = deltas(server, None, "free_stream", thinking_budget=budget, **fields)
    assert without_ids(joined(pieces)) == without_ids(whole)
    check_arguments(whole["content"] if choice is None else whole["tool_calls"][0]["function"]["arguments"])
    tools = {} if choice is None else {"tools": TOOLS}
    free = message(server, None, "free", thinking_budget=400, max_new_tokens=budget or 1, **tools)
    assert budget == 0 or free["reasoning_content"] == whole["reasoning_content"]
