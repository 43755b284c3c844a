# SPDX-License-Identifier: Apache-2.0
"""No message, text or call is lost in a chat template: it is written in some form, or refused by name.

The templates are like those of well-known models, each with the habit that loses something.
"""

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from hf_triton.errors import RequestError
from hf_triton.protocol.chat_request import parse_chat
from hf_triton.tasks.text_generation.chat_template import ChatTemplate
from hf_triton.tasks.text_generation.conversation_form import shape
from hf_triton.tasks.text_generation.form_finder import MAX_SHAPES
from tests.unit.test_chat_template import build_tokenizer

MAX_BYTES = 1_000_000
LOOP = "{%- for m in messages %}BODY{% endfor %}"
TURN = "<{{ m.role }}>{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
ALTERNATE = """{%- set ns = namespace(expects='user') %}
{%- for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
  {%- if m.role != ns.expects %}{{ raise_exception('user and assistant must alternate') }}{% endif %}
  {%- set ns.expects = 'assistant' if m.role == 'user' else 'user' %}
{%- endfor %}"""


def loop(body: str) -> str:
    return LOOP.replace("BODY", body)


TEMPLATES = {
    "adds to content": loop("{{ '<' + m.role + '>' + m.content }}" + CALLS),
    "names developer": loop("{% if m.role in ['system', 'developer'] or true %}" + TURN + CALLS + "{% endif %}"),
    "known roles": loop("{% if m.role in ('system', 'user', 'assistant', 'tool') %}" + TURN + CALLS + "{% endif %}"),
    "refuses others": loop(
        "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('no such role') }}{% endif %}"
        + TURN
        + CALLS
    ),
    "system first": "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    + loop("{% if m.role != 'system' %}" + TURN + CALLS + "{% endif %}"),
    "refuses a late system": loop(
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}"
        + TURN
        + CALLS
    ),
    "refuses any system": loop(
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURN + CALLS
    ),
    "the last system": "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endfor %}{{ ns.s }}"
    + loop("{% if m.role != 'system' %}" + TURN + CALLS + "{% endif %}"),
    "text arguments": loop(
        TURN + "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}"
    ),
    "arguments as Python writes them": loop(
        TURN + "{% for c in m.tool_calls or [] %}<call>{{ c.function.name ~ c.function.arguments }}{% endfor %}"
    ),
    "the first call": loop(
        TURN + "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
    ),
    "one call": loop(
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        "<assistant>" + CALLS + "{% else %}" + TURN + "{% endif %}"
    ),
    "text or calls": loop("{% if m.content %}" + TURN + "{% else %}<{{ m.role }}>" + CALLS + "{% endif %}"),
    "no calls": loop(TURN),
    "no tools": loop("{% if m.role in ('system', 'user', 'assistant') %}" + TURN + "{% endif %}"),
    "alternates": ALTERNATE
    + loop(
        "{% if m.tool_calls %}" + CALLS + "{% elif m.role == 'tool' %}<tool>{{ m.content }}"
        "{% elif m.role == 'user' %}<user>{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}"
        "{% endif %}{{ m.content }}{% elif m.role == 'assistant' %}" + TURN + "{% endif %}"
    ),
    "texts before calls of the last turn": loop(
        "{% set ns = namespace(later=false) %}{% for n in messages[loop.index:] %}"
        "{% if n.role == 'assistant' and not n.tool_calls %}{% set ns.later = true %}{% endif %}{% endfor %}"
        "{% if m.tool_calls %}{% if m.content and not ns.later %}<thought>{{ m.content }}{% endif %}"
        "<assistant>" + CALLS + "{% else %}" + TURN + "{% endif %}"
    ),
    "parts": loop("<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}" + CALLS),
    "reasoning of the last turn": loop(
        TURN + "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}" + CALLS
    ),
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def developer(text: str) -> dict[str, Any]:
    return {"role": "developer", "content": text}


def answer(text: str | None, *calls: str, **fields: object) -> dict[str, Any]:
    made = [
        {"id": f"id{call}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": call})}}
        for call in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {}), **fields}


def result(call: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id{call}", "content": text}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a turn": [user("ONE")],
    "turns": [system("ONE"), user("TWO"), answer("THREE"), user("FOUR")],
    "developer": [developer("ONE"), user("TWO")],
    "system and developer": [system("ONE"), developer("TWO"), user("THREE")],
    "developer and system": [developer("ONE"), system("TWO"), user("THREE")],
    "a late system": [system("ONE"), user("TWO"), answer("THREE"), system("FOUR"), user("FIVE")],
    "a late developer": [user("ONE"), answer("TWO"), developer("THREE"), user("FOUR")],
    "a system at the end": [user("ONE"), answer("TWO"), user("THREE"), system("FOUR")],
    "system alone": [system("ONE")],
    "a call": [system("ONE"), user("TWO"), answer(None, "THREE"), result("THREE", "FOUR")],
    "text and calls": [
        *(user("ONE"), answer("TWO", "THREE", "FOUR"), result("THREE", "FIVE"), result("FOUR", "SIX")),
        *(answer("SEVEN"), user("EIGHT")),
    ],
    "a function": [
        user("ONE"),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": "TWO"}'}},
        {"role": "function", "name": "f", "content": "THREE"},
    ],
    "a result of no call": [user("ONE"), result("x", "TWO")],
    "thinking that was cut": [user("ONE"), answer(None, reasoning_content="TWO"), user("THREE")],
    "blank texts": [system(""), user("ONE"), answer(" "), user("TWO")],
}


def template_of(text: str) -> ChatTemplate:
    return ChatTemplate(build_tokenizer(text), None, MAX_BYTES)


def render(template: str, conversation: list[dict[str, Any]], **options: object) -> str:
    return template_of(template).render(parse_chat(json.dumps(conversation), options, MAX_BYTES))


def outcome_of(template: str, conversation: list[dict[str, Any]]) -> str:
    try:
        return render(template, conversation)
    except RequestError as error:
        return error.sentence


def texts_of(conversation: list[dict[str, Any]]) -> list[str]:
    return [word for message in conversation for word in re.findall(r"\b[A-Z]{3,}\b", json.dumps(_said(message)))]


def _said(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"content": message["content"], "calls": calls, "call": message.get("function_call")}


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_and_call_is_written_or_its_place_is_named(name: str, kind: str) -> None:
    conversation = CONVERSATIONS[kind]
    words = texts_of(conversation)
    if (name, kind) == ("alternates", "text and calls"):  # what test_a_text_that_cannot_be_written... is about
        words.remove("TWO")
    outcome = outcome_of(TEMPLATES[name], conversation)
    if refused := re.search(r"messages\[(\d)\] of role '(\w+)' would be lost", outcome):
        assert name == "no tools"
        assert conversation[int(refused[1])]["role"] == refused[2] in ("tool", "function")
    else:
        assert [word for word in words if word not in outcome] == []
        assert "'x'" not in outcome  # Python's form of arguments


@pytest.mark.parametrize("name", TEMPLATES)
def test_null_is_as_good_as_a_field_left_out_and_as_an_empty_text(name: str) -> None:
    nulls = {"name": None, "reasoning_content": None, "refusal": None, "audio": None, "function_call": None}
    past = answer("", "A"), answer(""), answer("", reasoning_content="hm")
    behind: tuple[list[dict[str, Any]], ...] = ([result("A", "x")], [user("y")], [user("z")])
    for said, rest in zip(past, behind, strict=True):
        forms = [said, said | {"content": None}, said | {"content": None} | nulls]
        if "reasoning_content" in said:
            del forms[-1]
        forms.append({field: value for field, value in said.items() if field != "content"})
        written = {outcome_of(TEMPLATES[name], [user("hi"), form, *rest]) for form in forms}
        assert len(written) == 1


@pytest.mark.parametrize(
    ("name", "conversation", "prompt"),
    [
        ("known roles", [developer("a"), user("b")], "<system>a<user>b"),
        ("names developer", [developer("a"), user("b")], "<developer>a<user>b"),
        ("system first", [system("a"), developer("b"), user("c")], "<system>a\n\nb<user>c"),
        ("system first", [system("a"), user("b"), system("c"), user("d")], "<system>a<user>b\n\nc\n\nd"),
        ("refuses any system", [system("a"), user("b")], "<user>a\n\nb"),
        ("known roles", [user("a"), {"role": "function", "name": "f", "content": "b"}], "<user>a<tool>b"),
        ("text arguments", [user("a"), answer("", "b")], '<user>a<assistant><call>f{"x": "b"}'),
        ("arguments as Python writes them", [user("a"), answer("", "b")], '<user>a<assistant><call>f{"x": "b"}'),
        (
            "the first call",
            [user("a"), answer("t", "b", "c"), result("c", "C"), result("b", "B"), result("?", "D")],
            '<user>a<assistant>t<call>f{"x": "b"}<tool>B<assistant><call>f{"x": "c"}<tool>C<tool>D',
        ),
        (
            "texts before calls of the last turn",
            [user("a"), answer("t", "b"), result("b", "c")],
            '<user>a<thought>t<assistant><call>f{"x": "b"}<tool>c',
        ),
        (
            "texts before calls of the last turn",
            [user("a"), answer("t", "b"), result("b", "c"), answer("d"), user("e")],
            '<user>a<assistant>t<assistant><call>f{"x": "b"}<tool>c<assistant>d<user>e',
        ),
        ("one call", [user("a"), answer("t", "b")], '<user>a<assistant>t<assistant><call>f{"x": "b"}'),
        ("no calls", [user("a"), answer("t", "b")], '<user>a<assistant>t\n{"name": "f", "arguments": {"x": "b"}}'),
        (
            "adds to content",
            [user("a"), answer(None, "b", "c")],
            '<user>a<assistant><call>f{"x": "b"}<call>f{"x": "c"}',
        ),
    ],
)
def test_what_a_template_drops_takes_the_form_that_it_writes(
    name: str, conversation: list[dict[str, Any]], prompt: str
) -> None:
    assert render(TEMPLATES[name], conversation) == prompt


def test_a_tool_without_its_optional_fields_reaches_a_template_that_insists_on_them() -> None:
    template = (
        "{% for t in tools %}{{ '[' + t.function.description + ']' }}{{ t.function.parameters.properties | length }}"
        "{% endfor %}" + loop(TURN)
    )
    for function in (
        {"name": "f"},
        {"name": "f", "description": None, "parameters": None},
        {"name": "f", "parameters": {}},
    ):
        assert render(template, [user("a")], tools=[{"type": "function", "function": function}]) == "[]0<user>a"
    given = {"name": "f", "description": "It.", "parameters": {"properties": {"x": {}}}}
    assert render(template, [user("a")], tools=[{"type": "function", "function": given}]) == "[It.]1<user>a"


def test_a_text_that_cannot_be_written_beside_calls_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    template = template_of(TEMPLATES["alternates"])
    with caplog.at_level(logging.WARNING):
        for words in ("secret", "other"):
            conversation = [user("a"), answer(words, "b"), result("b", "c"), answer("d"), user(words)]
            template.render(parse_chat(json.dumps(conversation), {}, MAX_BYTES))
    assert caplog.messages == ["the chat template writes no text beside an assistant's tool calls: it is left out"]


# --- cost ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], int]:
    """Renders a conversation, and tells how often the template has run for it."""
    tokenizer, runs = build_tokenizer(TEMPLATES["one call"]), []
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *args, **kwargs: runs.append(1) or apply(*args, **kwargs)
    )
    template = ChatTemplate(tokenizer, None, MAX_BYTES)

    def count(conversation: list[dict[str, Any]]) -> int:
        runs.clear()
        template.render(parse_chat(json.dumps(conversation), {}, MAX_BYTES))
        return len(runs)

    return count


def test_a_form_is_looked_for_once_for_each_shape_of_conversation(
    counted: Callable[[list[dict[str, Any]]], int],
) -> None:
    assert counted([user("a")]) > 1
    assert counted([user("another")]) == 1
    work = [answer("t", "b"), result("b", "c")]
    assert counted([user("a"), *work * 3]) > 1
    for number in range(4, 8):
        assert counted([user("a"), *work * number]) == 1


def test_shapes_that_clients_make_do_not_fill_the_memory(counted: Callable[[list[dict[str, Any]]], int]) -> None:
    roles = ("user", "assistant")
    for number in range(MAX_SHAPES + 10):
        counted([{"role": roles[number >> bit & 1], "content": "x"} for bit in range(10)])


def test_a_shape_tells_apart_what_templates_may() -> None:
    plain = [user("a"), answer("b"), user("c")]
    others = [
        *([user("a"), answer("b")], [system("s"), *plain], [user("a"), answer(""), user("c")]),
        *([user("a"), answer("b", reasoning_content="r"), user("c")], [user("a"), answer("b", "x"), user("c")]),
        [user("a"), answer("b", "x", "y"), user("c")],
        [user("a"), answer("b", "x"), result("x", "c")],
        [user("a"), answer("b", "x"), result("y", "c")],
    ]
    assert len({shape(conversation) for conversation in (plain, *others)}) == 1 + len(others)
    assert shape([user("a" * 99), answer("d"), user("e")]) == shape(plain)
