# SPDX-License-Identifier: Apache-2.0
"""Custom tools: what the template sees of them, what a forced call follows, and how calls are read."""

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from hf_triton.errors import RequestError
from hf_triton.grammar.matcher import build_matcher
from hf_triton.protocol.chat_request import Chat, parse_chat
from hf_triton.protocol.structured_output import Grammar
from hf_triton.tasks.text_generation.message import MessageReader, NamedCallReader, RequiredCallReader
from hf_triton.tasks.text_generation.response_template import MessageFormat, shipped_template

HI = '[{"role": "user", "content": "Hi"}]'
LARK = 'start: "*** Begin" LF line+ "*** End"\nline: "+" /[a-z]*/ LF\n%import common.LF\n'
PATCH = "*** Begin\n+a\n+b\n*** End"


def custom(name: str, syntax: str | None = None, definition: str = "") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, "format": form if syntax else {"type": "text"}}}


PARAMETERS = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
TOOLS = [FUNCTION, custom("patch", "lark", LARK), custom("date", "regex", r"[0-9]{4}"), custom("note")]


def named(name: str, kind: str = "custom") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def parse(choice: object = None, tools: object = TOOLS, messages: str = HI) -> Chat:
    given = {"tools": tools, "tool_choice": choice}
    return parse_chat(messages, {name: value for name, value in given.items() if value is not None}, 100_000)


def allows(grammar: Grammar, text: str) -> bool:
    matcher = build_matcher(LLTokenizer("byte"), grammar)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(choice: object, tools: object = TOOLS) -> Grammar:
    call = parse(choice, tools).forced_call
    assert call is not None
    return call.grammar


def read(reader: MessageReader, text: str, step: int) -> list[dict[str, Any]]:
    """The calls of a stream, put together as clients do."""
    calls: dict[int, Any] = {}
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    for piece in [*pieces, None]:
        reader.finish() if piece is None else reader.feed(piece)
        for call in reader.take().get("tool_calls", ()):
            known = calls.setdefault(call["index"], call)
            if known is not call:
                known["custom"]["input"] += call["custom"]["input"]
    return [{name: value for name, value in call.items() if name not in ("index", "id")} for call in calls.values()]


def call_of(name: str, text: str) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, "input": text}}


def test_template_sees_a_function_of_one_string() -> None:
    chat = parse()
    assert chat.tools is not None
    assert chat.tools[0] == FUNCTION
    functions = [tool["function"] for tool in chat.tools]
    assert [function["name"] for function in functions] == ["look", "patch", "date", "note"]
    assert functions[1]["parameters"]["required"] == ["input"]
    assert LARK in functions[1]["parameters"]["properties"]["input"]["description"]
    assert chat.custom_names == {"patch", "date", "note"}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("patch", PATCH, '{"input": "*** Begin"}'), ("date", "2026", "20x6"), ("note", '{"input":"a"}', "a")],
)
def test_named_call_follows_the_format(name: str, right: str, wrong: str) -> None:
    grammar = grammar_of(named(name))
    assert allows(grammar, right)
    assert not allows(grammar, wrong)


def test_required_call_follows_the_format_of_its_tool() -> None:
    grammar = grammar_of("required")
    for right in (f"patch\n{PATCH}", "date\n2026", '[{"name":"look","arguments":{"a":true}}]'):
        assert allows(grammar, right), right
    assert allows(grammar, '[{"name":"note","arguments":{"input":"a"}}]')
    for wrong in (PATCH, "patch\n2026", "date\n2", '[{"name":"patch","arguments":{"input":"a"}}]', "[]"):
        assert not allows(grammar, wrong), wrong
    assert allows(grammar_of("required", TOOLS[1:2]), f"patch\n{PATCH}")


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_forced_calls_are_read(step: int) -> None:
    names = parse().custom_names
    plan = MessageFormat(None, {}).plan
    for choice, text, expected in [
        (named("patch"), PATCH, call_of("patch", PATCH)),
        (named("note"), '{"input": "a\\n\\"b\\""}', call_of("note", 'a\n"b"')),
        ("required", f"patch\n{PATCH}", call_of("patch", PATCH)),
        ("required", '[{"name":"note","arguments":{"input":"a"}}]', call_of("note", "a")),
    ]:
        reader = plan(parse(choice), "", is_constrained=False).build_reader()
        assert read(reader, text, step) == [expected], choice
    cut = RequiredCallReader(frozenset({"patch"}), custom_names=names)
    cut.feed("pat")
    cut.finish()
    assert cut.take() == {"content": "pat"}


def test_streamed_text_is_told_in_pieces() -> None:
    reader = NamedCallReader("patch", is_input=True, custom_names=frozenset({"patch"}))
    reader.feed("*** ")
    [first] = reader.take()["tool_calls"]
    assert first.keys() == {"index", "id", "type", "custom"}
    reader.feed("Begin")
    assert reader.take() == {"tool_calls": [{"index": 0, "custom": {"input": "Begin"}}]}


@pytest.mark.parametrize(
    ("arguments", "text"), [({"input": "a"}, "a"), ({"patch": "a"}, '{"patch": "a"}'), ("plain", "plain")]
)
def test_chosen_call_is_a_custom_one(arguments: object, text: str) -> None:
    reader = MessageFormat(shipped_template("hermes"), {}).plan(parse(), "", is_constrained=False).build_reader()
    written = json.dumps({"name": "note", "arguments": arguments})
    assert read(reader, f"<tool_call>\n{written}\n</tool_call>", 1000) == [call_of("note", text)]


def test_earlier_call_is_a_function_call_for_the_template() -> None:
    call = {"id": "call_1", **call_of("note", "a")}
    messages = json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}])
    made = parse(messages=messages).messages[1]["tool_calls"]
    assert made == [{"id": "call_1", "type": "function", "function": {"name": "note", "arguments": {"input": "a"}}}]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_all_that_the_model_has(mode: str) -> None:
    allowed = {"mode": mode, "tools": [named("look", "function"), named("note")]}
    chat = parse({"type": "allowed_tools", "allowed_tools": allowed})
    assert chat.tools is not None
    assert [tool["function"]["name"] for tool in chat.tools] == ["look", "note"]
    assert (chat.forced_call is None) == (mode == "auto")
    if chat.forced_call is not None:
        assert allows(chat.forced_call.grammar, '[{"name":"look","arguments":{"a":true}}]')
        assert not allows(chat.forced_call.grammar, "date\n2026")


def test_tools_of_a_server_are_passed_over() -> None:
    chat = parse(tools=[{"type": "web_search"}, FUNCTION])
    assert chat.tools == (FUNCTION,)
    allowed = {"mode": "auto", "tools": [{"type": "web_search"}, named("look", "function")]}
    chat = parse({"type": "allowed_tools", "allowed_tools": allowed}, [{"type": "web_search"}, *TOOLS])
    assert chat.tools == (FUNCTION,)
    with pytest.raises(RequestError, match=r"tools\[1\]"):
        parse(tools=[{"type": "web_search"}, {"type": "function", "function": {}}])


def test_no_allowed_tool_is_none() -> None:
    assert parse({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}).tools is None


@pytest.mark.parametrize(
    ("choice", "tools", "words"),
    [
        (None, [{"type": "custom"}], ["tools[0].custom", "JSON object"]),
        (None, [{"type": "custom", "custom": {}}], ["tools[0].custom", "name"]),
        (None, [custom("a", "ebnf", "x")], ["tools[0].custom", "'a'", "lark"]),
        (None, [custom("a", "lark", "")], ["tools[0].custom", "'a'"]),
        (None, [custom("look"), FUNCTION], ["several", "'look'"]),
        (named("gone"), TOOLS, ["tool_choice", "'gone'", "'patch'"]),
        (named("patch", "mcp"), TOOLS, ["tool_choice", "auto, none, required"]),
        ({"type": "allowed_tools", "mode": "none", "tools": []}, TOOLS, ["tool_choice", "allowed_tools", "mode"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named("gone")]}, TOOLS, ["tool_choice", "'gone'"]),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, TOOLS, ["tool_choice", "no tools"]),
    ],
)
def test_wrong_tools_are_refused(choice: object, tools: object, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        parse(choice, tools)
    for word in words:
        assert word in str(caught.value)
