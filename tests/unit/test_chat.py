# SPDX-License-Identifier: Apache-2.0
"""Messages and their options: every form that clients can send, and a sentence for whatever is wrong with them."""

import json
import logging
from typing import Any

import pytest

from hf_triton.errors import RequestError
from hf_triton.protocol.chat_request import MAX_ARGUMENT, MAX_DEPTH, MAX_MESSAGES, MAX_TOOLS, RESERVED, Chat, parse_chat

MAX_BYTES = 100_000
HI = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CALL = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Riga"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": {"type": "object"}}}
WEIRD = "ß ☕ \u0000 \ud83e\udd9c {{ 7 * 7 }} {% raw %} <|im_end|> </s>".encode("utf-16", "surrogatepass").decode(
    "utf-16"
)


def parse(*messages: object, **options: object) -> Chat:
    return parse_chat(json.dumps(messages), options, MAX_BYTES)


def rejection(*messages: object, **options: object) -> str:
    with pytest.raises(RequestError) as caught:
        parse(*messages, **options)
    return str(caught.value)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        json.dumps([HI, ANSWER]),
        [json.dumps([HI, ANSWER])],
        [json.dumps(HI), json.dumps(ANSWER)],
        (json.dumps(HI), json.dumps(ANSWER)),
        json.dumps([HI, ANSWER], indent=2, ensure_ascii=True),
    ],
    ids=["one text", "a tensor of one text", "a text a message", "as a tuple", "indented"],
)
def test_messages_are_one_json_string_or_one_each(given: Any) -> None:
    chat = parse_chat(given, {}, MAX_BYTES)
    assert chat == Chat((HI, ANSWER), None, {}, add_generation_prompt=True, continue_final_message=False)


@pytest.mark.parametrize("given", [json.dumps(HI), [json.dumps(HI)], json.dumps([HI])], ids=["text", "list", "array"])
def test_one_message_needs_no_array(given: Any) -> None:
    assert parse_chat(given, {}, MAX_BYTES).messages == (HI,)


def test_content_is_kept_verbatim() -> None:
    assert parse({"role": "user", "content": WEIRD}).messages[0]["content"] == WEIRD


def test_null_fields_are_dropped() -> None:
    replayed = ANSWER | {"tool_calls": None, "refusal": None, "function_call": None, "reasoning_content": None}
    assert parse(HI, replayed).messages == (HI, ANSWER)


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "ipython", "gebruiker"])
def test_roles_are_up_to_the_template(role: str) -> None:
    assert parse({"role": role, "content": "x"}).messages[0]["role"] == role


def test_every_field_reaches_the_template_in_its_order() -> None:
    message = {"tool_call_id": "a1", "name": "weather", "reasoning_content": "hm", "content": "x", "role": "tool"}
    assert list(parse(message).messages[0].items()) == list(message.items())


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parse({"role": "user", "content": parts}).messages == ({"role": "user", "content": "one\ntwo"},)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"city": "Riga"}', {"city": "Riga"}), ({"city": "Riga"}, {"city": "Riga"}), ("{}", {}), ("", {})],
    ids=["text", "object", "none", "empty"],
)
def test_arguments_of_a_call_become_an_object(arguments: object, read: object) -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": arguments}, "index": 0}
    message = parse(HI, {"role": "assistant", "tool_calls": [call]}).messages[1]
    assert message["tool_calls"] == [call | {"function": {"name": "weather", "arguments": read}}]
    assert message["content"] == ""


@pytest.mark.parametrize(
    "given",
    [[TOOL], json.dumps([TOOL]), json.dumps(TOOL), [json.dumps(TOOL)]],
    ids=["array", "text", "text of one", "a text a tool"],
)
def test_tools_are_kept_verbatim(given: object) -> None:
    chat = parse(HI, tools=given)
    assert chat.tools is not None
    assert [json.dumps(tool) for tool in chat.tools] == [json.dumps(TOOL)]


def test_extra_fields_of_a_tool_are_kept_in_order() -> None:
    tool = {"function": {"more": True, "parameters": {"b": 1, "a": None}, "name": "f"}, "type": "function"}
    chat = parse(HI, tools=[tool])
    assert chat.tools is not None
    assert json.dumps(chat.tools[0]) == json.dumps(tool)


def test_a_strict_tool_says_so_to_the_server_and_not_to_the_template() -> None:
    tools = [{"type": "function", "function": {"name": name, "strict": name == "f"}} for name in "fg"]
    chat = parse(HI, tools=tools)
    assert chat.strict == {"f": True, "g": False}
    assert "strict" not in json.dumps(chat.tools)


def test_null_in_a_tool_is_a_field_left_out() -> None:
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    assert parse(HI, tools=[{"type": "function", "function": function}]).tools == (
        {"type": "function", "function": {"name": "f"}},
    )


@pytest.mark.parametrize("given", [{"enable_thinking": False}, '{"enable_thinking": false}'], ids=["object", "text"])
def test_template_arguments_may_be_a_json_string(given: object) -> None:
    assert parse(HI, chat_template_kwargs=given).template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("options", "begins", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"add_generation_prompt": True}, True, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": False}, True, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
        ({"continue_final_message": False, "add_generation_prompt": True}, True, False),
    ],
    ids=str,
)
def test_a_new_message_starts_or_the_last_one_continues(
    options: dict[str, object], begins: bool, continues: bool
) -> None:
    chat = parse(HI, ANSWER, **options)
    assert (chat.add_generation_prompt, chat.continue_final_message) == (begins, continues)


def test_chats_at_the_limits_are_accepted() -> None:
    assert len(parse(*[HI] * MAX_MESSAGES).messages) == MAX_MESSAGES
    assert len(parse(HI, tools=[TOOL] * MAX_TOOLS).tools or ()) == MAX_TOOLS
    kwargs = '{"deep": ' + nested(MAX_DEPTH - 1) + "}"
    assert parse(HI, chat_template_kwargs=kwargs).template_kwargs == json.loads(kwargs)
    text = json.dumps([HI])
    assert parse_chat(text, {}, len(text)).messages == (HI,)


@pytest.mark.parametrize("given", [[], "[]"], ids=str)
def test_an_empty_list_of_tools_is_none(given: object) -> None:
    assert parse(HI, tools=given).tools is None
    with pytest.raises(RequestError, match="tool_choice makes the model call a tool, and there is none"):
        parse(HI, tools=given, tool_choice="required")


def test_tools_that_this_server_has_not_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    hosted = {"type": "web_search_of_this_test", "user_location": None}
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            chat = parse(HI, tools=[hosted, TOOL, hosted])
    assert chat.tools == (TOOL,)
    assert caplog.messages == ["passed over: tools of type 'web_search_of_this_test', which this server has not"]
    assert parse(HI, tools=[hosted], tool_choice="auto").tools is None


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED_TEXTS = {
    "nothing": ([], f"invalid_input: messages must hold 1 to {MAX_MESSAGES} messages, got 0"),
    "an empty array": ("[]", "messages must hold 1 to"),
    "too many": (json.dumps([HI] * (MAX_MESSAGES + 1)), f"got {MAX_MESSAGES + 1}"),
    "too many texts": (["{}"] * (MAX_MESSAGES + 1), f"got {MAX_MESSAGES + 1}"),
    "a bare text": (
        "hi",
        "messages is not JSON: expected value at line 1 column 1; "
        'messages must be like [{"role": "user", "content": "..."}]',
    ),
    "an empty text": ("", "messages is not JSON: EOF"),
    "half an array": ('[{"role": "user"', "messages is not JSON: EOF"),
    "half a message among others": ([json.dumps(HI), "{"], "messages[1] is not JSON: EOF"),
    "two arrays": ([json.dumps([HI])] * 2, "messages[0] must be like"),
    "a number": ("5", 'messages[0] must be like {"role": "user", "content": "..."}, got 5'),
    "half a character": ('[{"role": "user", "content": "\\ud83e"}]', "messages is not JSON: unexpected end of hex"),
    "NaN": ('[{"role": "user", "content": NaN}]', "messages is not JSON: expected value"),
    "a number of thousands of digits": (f"[{'9' * 9000}]", "messages is not JSON: number out of range"),
    "thousands of brackets": (nested(10_000), "messages is not JSON: recursion limit exceeded"),
    "too deep": (nested(MAX_DEPTH + 1), f"messages is nested more than {MAX_DEPTH} levels deep"),
}


@pytest.mark.parametrize("case", REFUSED_TEXTS)
def test_malformed_messages_are_rejected(case: str) -> None:
    texts, words = REFUSED_TEXTS[case]
    with pytest.raises(RequestError) as caught:
        parse_chat(texts, {}, MAX_BYTES)
    assert caught.value.code == "invalid_input"
    assert words in str(caught.value)


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
REFUSED_MESSAGES: dict[str, tuple[object, str]] = {
    "no object": (["user", "hi"], "messages[1] must be like"),
    "no role": ({"content": "x"}, "messages[1]: role is required"),
    "an empty role": ({"role": "", "content": "x"}, "messages[1]: role must be a non-empty string, got ''"),
    "a role that is no text": ({"role": 5, "content": "x"}, "messages[1]: role must be a non-empty string, got 5"),
    "no content": ({"role": "user"}, "messages[1]: content is required without tool_calls"),
    "null content": ({"role": "user", "content": None}, "messages[1]: content is required"),
    "a tool's message without content": ({"role": "tool", "tool_call_id": "a1"}, "messages[1]: content is required"),
    "a number as content": ({"role": "user", "content": 5}, "messages[1]: content must be a string, got 5"),
    "an object as content": ({"role": "user", "content": {}}, "messages[1]: content must be a string, got {}"),
    "a typo": (HI | {"contnet": "x"}, "messages[1] has no field 'contnet', did you mean 'content'?"),
    "no parts": ({"role": "user", "content": []}, "messages[1]: content is an empty array: give a string"),
    "an image": (
        {"role": "user", "content": [{"type": "text", "text": "See:"}, IMAGE]},
        "messages[1].content[1] is an image, and this model reads text alone: leave it out",
    ),
    "a part that is no object": (
        {"role": "user", "content": ["x"]},
        'content[0] must be {"type": "text", "text": "...',
    ),
    "a part of no type": ({"role": "user", "content": [{"text": "x"}]}, "content[0] must be"),
    "a part without text": ({"role": "user", "content": [{"type": "text"}]}, "content[0] must be"),
    "a part whose text is none": ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content[0] must be"),
    "a name that is none": (HI | {"name": 5}, "messages[1]: name must be a string, got 5"),
    "reasoning that is none": (ANSWER | {"reasoning_content": []}, "reasoning_content must be a string, got []"),
    "calls that are none": (ANSWER | {"tool_calls": 5}, "messages[1]: tool_calls must be a JSON array, got 5"),
    "a call that is none": (ANSWER | {"tool_calls": [5]}, 'tool_calls[0] must be {"type": "function", "function": {'),
    "a call of another kind": (ANSWER | {"tool_calls": [CALL | {"type": "mcp"}]}, "tool_calls[0] must be"),
    "a call of nothing": (ANSWER | {"tool_calls": [{"type": "function"}]}, "tool_calls[0] must be"),
    "a call of a text": (
        ANSWER | {"tool_calls": [CALL, {"function": "weather"}]},
        "messages[1]: tool_calls[1].function must be a JSON object, got 'weather'",
    ),
    "a call without a name": (
        ANSWER | {"tool_calls": [{"function": {"arguments": "{}"}}]},
        "messages[1]: tool_calls[0].function: name is required",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MESSAGES)
def test_an_error_names_the_message_and_field(case: str) -> None:
    message, words = REFUSED_MESSAGES[case]
    sentence = rejection(HI, message)
    assert sentence.startswith("invalid_input: messages[1]")
    assert words in sentence


REFUSED_OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "both": (
        {"add_generation_prompt": True, "continue_final_message": True},
        "invalid_parameter: add_generation_prompt starts a new message, continue_final_message continues",
    ),
    "a prompt of no kind": ({"add_generation_prompt": "yes"}, "add_generation_prompt must be true or false, got 'yes'"),
    "too many tools": ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools must be a JSON object or a JSON array of up to "),
    "tools that are no JSON": ({"tools": "weather"}, "invalid_parameter: tools is not JSON: expected value"),
    "a tool that is no JSON": ({"tools": ["weather"]}, "invalid_parameter: tools[0] is not JSON: expected value"),
    "a tool that is none": ({"tools": [5]}, 'tools[0] must be {"type": "function", "function": {...}}'),
    "a tool without a name": ({"tools": [TOOL, {"function": {}}]}, "tools[1].function: name is required"),
    "parameters of no kind": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function: parameters must be a JSON object, got []",
    ),
    "tools that are too deep": ({"tools": nested(MAX_DEPTH + 1)}, "tools is nested more than"),
    "kwargs that are no JSON": ({"chat_template_kwargs": "{"}, "chat_template_kwargs is not JSON: EOF"),
    "kwargs that are no object": ({"chat_template_kwargs": "[]"}, "chat_template_kwargs must be a JSON object, got []"),
    "kwargs that are too deep": ({"chat_template_kwargs": nested(MAX_DEPTH + 1)}, "is nested more than"),
    "an endless indent": (
        {"chat_template_kwargs": {"indent": MAX_ARGUMENT + 1}},
        f"chat_template_kwargs: 'indent' must be >= -{MAX_ARGUMENT} and <= {MAX_ARGUMENT}, got {MAX_ARGUMENT + 1}",
    ),
    "infinity": ({"chat_template_kwargs": '{"indent": 1e999}'}, "chat_template_kwargs: 'indent' must be"),
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_an_impossible_option_is_rejected(case: str) -> None:
    options, words = REFUSED_OPTIONS[case]
    assert words in rejection(HI, **options)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_template_arguments_cannot_set_reserved_names(name: str) -> None:
    expected = f"invalid_parameter: chat_template_kwargs cannot set {name}: take it out"
    assert rejection(HI, chat_template_kwargs={name: "x"}) == expected


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (HI, "but messages[1] is of role 'user'"),
        ({"role": "tool", "content": "x"}, "but messages[1] is of role 'tool'"),
        ({"role": "assistant", "reasoning_content": "hm"}, "messages[1] does not end with content"),
        (ANSWER | {"tool_calls": [CALL]}, "messages[1] does not end with content"),
    ],
    ids=["user", "tool", "reasoning", "calls"],
)
def test_only_content_of_the_assistant_can_be_continued(last: dict[str, object], words: str) -> None:
    sentence = rejection(HI, last, continue_final_message=True)
    assert sentence.startswith("invalid_input: continue_final_message continues ")
    assert words in sentence


@pytest.mark.parametrize("where", ["messages", "tools", "a text a tool", "chat_template_kwargs"])
def test_bytes_of_messages_and_options_are_summed(where: str) -> None:
    messages = [HI | {"content": "ß" * 400}] if where == "messages" else [HI]
    cases: dict[str, dict[str, Any]] = {
        "tools": {"tools": json.dumps([{"function": {"name": "ß" * 400}}], ensure_ascii=False)},
        "a text a tool": {"tools": [json.dumps({"function": {"name": "ß" * 200}}, ensure_ascii=False)] * 2},
        "chat_template_kwargs": {"chat_template_kwargs": json.dumps({"x": "ß" * 400}, ensure_ascii=False)},
    }
    options = cases.get(where, {})
    text = json.dumps(messages, ensure_ascii=False)
    size = len(text.encode()) + sum(len("".join(each).encode()) for each in options.values())
    assert size > 800
    assert parse_chat(text, options, size)
    with pytest.raises(RequestError, match=f"context_exceeded: .* have {size} bytes, more than the {size - 1} "):
        parse_chat(text, options, size - 1)


def test_errors_are_short_for_any_value() -> None:
    long = "x" * 50_000
    for message in ({"role": "user", "content": [long]}, {"role": [long], "content": ""}, long):
        assert len(rejection(message)) < 300


# --- documentation ---------------------------------------------------------------------------------------------------


# --- the past --------------------------------------------------------------------------------------------------------


def said(**fields: object) -> dict[str, Any]:
    """An assistant's message as the template gets it."""
    return parse(HI, {"role": "assistant", **fields}, HI).messages[1]


def called(arguments: object) -> dict[str, Any]:
    message = said(content=None, tool_calls=[{"id": "a1", "type": "function", "function": arguments}])
    function: dict[str, Any] = message["tool_calls"][0]["function"]
    return function


READ_FUNCTION = {"name": "weather", "arguments": {"city": "Riga"}}
THOUGHT = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
PAST: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "OpenAI's fields": (
        {"content": "Hello", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        ANSWER,
    ),
    "annotations that say something": ({"content": "Hello", "annotations": [{"type": "url_citation"}]}, ANSWER),
    "fields of a gateway": ({"content": "Hello", "provider_specific_fields": {"a": 1}, "thinking_blocks": []}, ANSWER),
    "what was parsed of it": ({"content": "Hello", "parsed": {"a": 1}, "tool_calls": []}, ANSWER),
    "an answer spoken": ({"content": "Hello", "audio": {"id": "audio_1"}}, ANSWER),
    "reasoning as vLLM names it": ({"content": "Hello", "reasoning": "hm"}, THOUGHT),
    "reasoning under both names": ({"content": "Hello", "reasoning": "hm", "reasoning_content": "hm"}, THOUGHT),
    "reasoning among the parts": (
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "Hello"},
            ]
        },
        THOUGHT,
    ),
    "a call of a tool of the server's": (
        {"content": "Hello", "tool_calls": [{"id": "w1", "type": "web_search", "web_search": {"query": "x"}}]},
        ANSWER,
    ),
    "such a call alone": (
        {"content": None, "tool_calls": [{"id": "w1", "type": "web_search"}]},
        {"role": "assistant", "content": ""},
    ),
    "a refusal": ({"content": None, "refusal": "Hello"}, ANSWER),
    "a refusal as a part": ({"content": [{"type": "refusal", "refusal": "Hello"}]}, ANSWER),
    "parts of no text": ({"content": [{"type": "text", "text": "Hello"}, {"type": "image_url"}]}, ANSWER),
    "no parts": ({"content": []}, {"role": "assistant", "content": ""}),
    "nothing": ({"content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
    "reasoning that was cut": (
        {"content": None, "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ),
    "nulls wherever they may be": (
        {
            "content": None,
            "name": None,
            "reasoning_content": None,
            "tool_calls": [CALL | {"index": None, "type": None}],
        },
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": READ_FUNCTION}]},
    ),
}


def test_an_image_that_a_tool_answered_is_a_note() -> None:
    result = {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "See:"}, IMAGE]}
    [message] = parse_chat(json.dumps([result]), {}, 1000).messages
    assert message["content"] == "See:\n[image_url: not shown, as this model reads text alone]"
    for part in ({"type": "input_text", "text": "x"}, {"type": 5}, 5):
        with pytest.raises(RequestError, match=r"messages\[0\]: content\[0\]"):
            parse_chat(json.dumps([result | {"content": [part]}]), {}, 1000)


@pytest.mark.parametrize("case", PAST)
def test_an_answer_of_any_server_is_taken_back(case: str) -> None:
    fields, expected = PAST[case]
    assert said(**fields) == expected


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Riga"}', {"city": "Riga"}),
        ("{bad", {"INVALID_JSON": "{bad"}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("null", {}),
        (nested(MAX_DEPTH + 1), {"INVALID_JSON": nested(MAX_DEPTH + 1)}),
        (None, {}),
    ],
    ids=["an object", "cut", "an array", "null in text", "too deep", "null"],
)
def test_arguments_of_an_earlier_call_are_always_an_object(arguments: object, read: object) -> None:
    assert called({"name": "f", "arguments": arguments}) == {"name": "f", "arguments": read}


def test_what_was_parsed_of_a_call_does_not_reach_the_template() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    assert called(function) == {"name": "f", "arguments": {}}


def test_a_call_in_the_former_form_is_one_of_today() -> None:
    message = said(content=None, function_call={"name": "f", "arguments": "{}"})
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_the_new_turn_is_checked(role: str) -> None:
    assert "has no field 'contents'" in rejection({"role": role, "content": "x", "contents": "y"})


def test_an_empty_list_of_tool_calls_is_none() -> None:
    said = {"role": "assistant", "content": "Well", "tool_calls": []}
    chat = parse_chat(json.dumps([HI, said]), {"continue_final_message": True}, 10_000)
    assert chat.messages[1] == {"role": "assistant", "content": "Well"}


def results(*ids: str | None) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "content": f"result of {call_id}"} | ({"tool_call_id": call_id} if call_id else {})
        for call_id in ids
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("c", "a", "b"), ("a", "b", "c")),
        (("b", "x", "a"), ("a", "b", "x")),
        ((None, "b", None), ("b", None, None)),
        ((None, None), (None, None)),
        (("c",), ("c",)),
    ],
    ids=["all", "one of no call", "some without ids", "without ids", "one"],
)
def test_results_come_in_the_order_of_their_calls(
    given: tuple[str | None, ...], expected: tuple[str | None, ...]
) -> None:
    said = {"role": "assistant", "tool_calls": [CALL | {"id": call_id} for call_id in "abc"]}
    chat = parse(HI, said, *results(*given), ANSWER, said, *results(*given), HI)
    one = [message for message in chat.messages if message["role"] == "tool"]
    assert one == 2 * results(*expected)
    assert [message["role"] for message in chat.messages[2 : 3 + len(given)]] == [*(len(given) * ["tool"]), "assistant"]


@pytest.mark.parametrize("call_id", [7, ["a"], {"a": 1}], ids=["number", "list", "object"])
def test_an_id_that_is_no_text_becomes_one(call_id: object) -> None:
    chat = parse(HI, {"role": "assistant", "tool_calls": [CALL | {"id": call_id}]}, *results("b"))
    assert chat.messages[1]["tool_calls"][0]["id"] == str(call_id)
