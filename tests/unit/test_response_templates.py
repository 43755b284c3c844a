# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 (DeepSeek's own vertical lines)
"""Messages by response templates: each shipped one, in pieces as at once, malformed calls, and which one is used."""

import json
import logging
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from hf_triton.errors import RequestError, SettingsError
from hf_triton.protocol.chat_request import parse_chat
from hf_triton.protocol.thinking_switches import Thinking
from hf_triton.tasks.text_generation.message import CallArrayReader, MessageReader, NamedCallReader
from hf_triton.tasks.text_generation.response_parser import MAX_SPACE
from hf_triton.tasks.text_generation.response_template import (
    FOLDER,
    MessageFormat,
    build_message_format,
    detect,
    load_response_template,
    shipped_markers,
    shipped_names,
    shipped_template,
)
from tests.support.paths import ROOT

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
LARGEST = sys.float_info.max
CITY = '{"city": "Köln", "days": 2}'
R1_CALL = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{CITY}\n```<｜tool▁call▁end｜>"
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
D = "｜DSML｜"
DSML_CALL = (
    f'<{D}invoke name="weather">\n<{D}parameter name="city" string="true">Köln</{D}parameter>\n'
    f'<{D}parameter name="days" string="false">2</{D}parameter>\n</{D}invoke>'
)
DSML_RESULT = "<｜Assistant｜><think>Hm</think>\n<function_results>\n</function_results>\n\n<think>"
KIMI = "<|im_assistant|>assistant<|im_middle|>"
KIMI_CALL = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{CITY}<|tool_call_end|>"
GRANITE = "<|start_of_role|>assistant<|end_of_role|>"
IM, R1, GLM, HARMONY = "<|im_start|>assistant\n", "<｜Assistant｜>", "<|assistant|>", "<|start|>assistant"
# template, prompt, completion, content, reasoning, arguments of the calls
EXAMPLES: list[tuple[str, str, str, str | None, str | None, list[str]]] = [
    ("hermes", "", f"I look.\n{CALL}\n{CALL}", "I look.", None, [CITY, CITY]),
    ("hermes", "", " A plain <answer> \n", " A plain <answer> \n", None, []),
    ("qwen3", "<|im_start|>assistant\n", f"<think>\nHm.\n\nSo.\n</think>\n\n{CALL}", None, "Hm.\n\nSo.", [CITY]),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Yes.", "Hm.", []),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "\n\nYes.", "Yes.", None, []),
    (
        "qwen3-coder",
        "",
        "Ok.\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "Ok.",
        None,
        [CITY],
    ),
    (
        "glm-4.5",
        "<|assistant|>",
        "<think>Hm.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        None,
        "Hm.",
        [CITY],
    ),
    ("think", "<｜User｜>Hi\n<think>\n", "Hm.</think>\nYes.", "Yes.", "Hm.", []),
    (
        "deepseek-r1",
        "<｜Assistant｜><think>\n",
        f"Hm.\n</think>\n\n<｜tool▁calls▁begin｜>{R1_CALL}\n{R1_CALL}<｜tool▁calls▁end｜>",
        None,
        "Hm.",
        [CITY, CITY],
    ),
    (
        "deepseek-r1",
        "<｜Assistant｜></think>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
        None,
        [CITY],
    ),
    (
        "glm-4.5",
        "<|assistant|><think>",
        "Hm.</think>I look.<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>weather</tool_call>",
        "I look.",
        "Hm.",
        [CITY, "{}"],
    ),
    (
        "deepseek-dsml",
        "<｜Assistant｜><think>",
        f"Hm.</think>I look.\n\n<{D}function_calls>\n{DSML_CALL}\n{DSML_CALL}\n</{D}function_calls>",
        "I look.",
        "Hm.",
        [CITY, CITY],
    ),
    ("deepseek-dsml", "<｜Assistant｜></think>", f"<{D}tool_calls>{DSML_CALL}</{D}tool_calls>", None, None, [CITY]),
    ("deepseek-dsml", DSML_RESULT, f"Hm.\n\n<{D}tool_calls>\n{DSML_CALL}\n</{D}tool_calls>", None, "Hm.", [CITY]),
    (
        "gemma4",
        "<|turn>model\n",
        '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:weather{}<tool_call|><|tool_response>",
        "I look.",
        "Hm.",
        [CITY, "{}"],
    ),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes.<channel|>", "Yes.", None, []),
    ("gemma4", "<|turn>model\n", "<|channel><|channel>thought\nHm.<channel|>Yes.<channel|>", "Yes.", "Hm.", []),
    (
        "gemma4",
        "<|turn>tool\n<tool_response|>",
        '<|tool_call>call:weather{"city": "Köln", "days": 2}<tool_call|>',
        None,
        None,
        [CITY],
    ),
    (
        "functiongemma",
        "<start_of_turn>model\n",
        "<start_function_call>call:weather{city:<escape>Köln<escape>,days:2}<end_function_call><start_function_response>",
        None,
        None,
        [CITY],
    ),
    (
        "kimi-k2",
        KIMI,
        f"<think>Hm.</think>I look.<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_CALL}<|tool_calls_section_end|>",
        "I look.",
        "Hm.",
        [CITY, CITY],
    ),
    ("kimi-k2", KIMI, f"<think>Hm.<|tool_calls_section_begin|>{KIMI_CALL}", None, "Hm.", [CITY]),
    ("kimi-k2", KIMI, f"<think>Hm.{KIMI_CALL[:-17]}{KIMI_CALL[:-17]}", None, "Hm.", [CITY, CITY]),
    (
        "minimax-m2",
        "]~b]ai\n<think>\n",
        'Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">Köln</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
        '<invoke name="weather">\n</invoke>\n</minimax:tool_call>',
        "I look.",
        "Hm.",
        [CITY, "{}"],
    ),
    ("granite-3", GRANITE, f'<|tool_call|>[{{"name": "weather", "arguments": {CITY}}}]', None, None, [CITY]),
    ("granite-3", GRANITE, "<think>Hm.</think>\n<response>Yes.</response>", "Yes.", "Hm.", []),
    ("granite-3", GRANITE, "<response>Yes.</response>", "<response>Yes.</response>", None, []),
    (
        "lfm2",
        IM,
        "<think>Hm.</think>I look.<|tool_call_start|>[weather(city='Köln', days=2), weather()]<|tool_call_end|>",
        "I look.",
        "Hm.",
        [CITY, "{}"],
    ),
    (
        "nemotron-nano-v2",
        "<SPECIAL_11>Assistant\n<think>\n",
        f'Hm.\n</think>\n\n<TOOLCALL>[{{"name": "weather", "arguments": {CITY}}}, {{"name": "weather"}}]</TOOLCALL>\n',
        None,
        "Hm.",
        [CITY, "{}"],
    ),
    (
        "seed-oss",
        "<seed:bos>assistant\n",
        "<seed:think>Hm.</seed:think>\nI look.\n\n<seed:tool_call>\n<function=weather>\n"
        "<parameter=city>Köln</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=weather>\n</function>\n</seed:tool_call>",
        "I look.",
        "Hm.",
        [CITY, "{}"],
    ),
    (
        "command-r7b",
        "<|CHATBOT_TOKEN|>",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
        f'"parameters": {CITY}}},\n    {{"tool_call_id": "1", "tool_name": "weather", "parameters": {{}}}}\n]'
        "<|END_ACTION|>",
        None,
        "Hm.",
        [CITY, "{}"],
    ),
    (
        "command-r7b",
        "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
        "<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Yes.",
        None,
        [],
    ),
    (
        "command-r",
        "<|CHATBOT_TOKEN|>",
        f'I look.\nAction:\n```json\n[\n    {{\n        "tool_name": "weather",\n        "parameters": {CITY}\n    }}\n'
        "]```",
        "I look.",
        None,
        [CITY],
    ),
    (
        "phi-4-mini",
        "<|assistant|>",
        f'I look.<|tool_call|>[{{"name": "weather", "arguments": {CITY}}}, {{"name": "weather"}}]<|/tool_call|>',
        "I look.",
        None,
        [CITY, "{}"],
    ),
    ("pythonic", "", "[weather(city='Köln', days=2), weather()]", None, None, [CITY, "{}"]),
    ("pythonic", "", '<|python_tag|>[weather(city="Köln", days=2)]', None, None, [CITY]),
    (
        "pythonic",
        "",
        "[weather(city='1e999', days=[1e999])]",
        None,
        None,
        [f'{{"city": "1e999", "days": [{LARGEST}]}}'],
    ),
    ("llama3", "", f'{{"name": "weather", "parameters": {CITY}}}', None, None, [CITY]),
    ("llama3", "", f'<|python_tag|>{{"name": "weather", "parameters": {CITY}}}', None, None, [CITY]),
    (
        "llama3",
        "",
        f'{{"name": "weather", "parameters": {CITY}}}; {{"name": "weather", "parameters": {{}}}}',
        None,
        None,
        [CITY, "{}"],
    ),
    ("llama3", "", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', None, []),
    (
        "mistral",
        "",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}, "id": "abcdefghi"}}]',
        None,
        None,
        [CITY],
    ),
    (
        "mistral-args",
        "",
        f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{CITY}[TOOL_CALLS]weather{{}}",
        "I look.",
        "Hm.",
        [CITY, "{}"],
    ),
    (
        "gpt-oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{CITY}",
        None,
        "Hm.",
        [CITY],
    ),
    (
        "gpt-oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Yes.",
        "Hm.",
        [],
    ),
]


# template, prompt, and whether its block is open; None: it is closed, or there is none
BLOCKS: list[tuple[str, str, bool | None]] = [
    ("qwen3", IM, False),
    ("qwen3", f"{IM}<think>\n", True),
    ("qwen3", f"{IM}<think>\n\n</think>\n\n", None),
    ("qwen3", f"<|im_start|>user\nWhat is </think>?{IM}", False),
    ("qwen3", f"{IM}<think>so</think>Yes<|im_end|>\n{IM}<think>\n", True),
    ("qwen3", f"{IM}<think>\nI thought", True),
    ("qwen3", f"{IM}The answer is", None),
    ("qwen3-coder", IM, False),
    ("glm-4.5", f"{GLM}<think>", True),
    ("glm-4.5", f"{GLM}\n<think></think>", None),
    ("deepseek-r1", f"{R1}<think>\n", True),
    ("deepseek-r1", f"{R1}</think>", None),
    ("deepseek-r1", R1, False),
    ("think", "<user>Hi\n<think>\n", True),
    ("think", "<user>Hi\n<think>\n\n</think>\n\n", None),
    ("think", "<user>Hi\n", False),
    ("mistral-args", "[INST]Hi[/INST]", False),
    ("mistral-args", "[INST]Hi[/INST][THINK]", True),
    ("gpt-oss", HARMONY, False),
    ("gpt-oss", f"{HARMONY}<|channel|>analysis<|message|>Hm", True),
    ("gpt-oss", f"{HARMONY}<|channel|>analysis<|message|>Hm<|end|>{HARMONY}", False),
    ("gpt-oss", f"{HARMONY}<|channel|>final<|message|>The answer is", None),
    ("gpt-oss", f"{HARMONY}<|channel|>final<|message|>", None),
    ("glm-4.5", f"{GLM}</think>", None),
    ("gemma4", "<|turn>model\n", False),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", None),
    ("kimi-k2", KIMI, False),
    ("minimax-m2", "]~b]ai\n<think>\n", True),
    ("deepseek-dsml", f"{R1}<think>", True),
    ("deepseek-dsml", f"{R1}</think>", None),
    ("deepseek-dsml", DSML_RESULT, True),
    ("granite-3", GRANITE, False),
    ("granite-3", f'{GRANITE}Hm<|end_of_text|>\n<|start_of_role|>assistant {{"length": "long"}}<|end_of_role|>', False),
    ("lfm2", IM, False),
    ("nemotron-nano-v2", "<SPECIAL_11>Assistant\n<think>\n", True),
    ("nemotron-nano-v2", "<SPECIAL_11>Assistant\n<think></think>", None),
    ("seed-oss", "<seed:bos>assistant\n", False),
    ("command-r7b", "<|CHATBOT_TOKEN|>", False),
    ("command-r7b", "<|CHATBOT_TOKEN|><|START_THINKING|>", True),
    ("command-r7b", "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", None),
    *[(name, "", None) for name in ("functiongemma", "command-r", "phi-4-mini", "pythonic")],
    ("hermes", IM, None),
    ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", None),
    ("mistral", "[INST]Hi[/INST]", None),
]


@pytest.mark.parametrize(("name", "prompt", "is_open"), BLOCKS)
def test_the_end_of_a_prompt_tells_what_a_completion_begins_with(name: str, prompt: str, is_open: bool | None) -> None:
    thinking = MessageFormat(shipped_template(name), {}).thinking(prompt)
    assert (None if thinking is None else thinking.is_open) == is_open
    assert {block[0] for block in BLOCKS} == set(shipped_names())


def test_a_constrained_reader_sees_the_tags_that_are_special_tokens() -> None:
    messages = MessageFormat(shipped_template("mistral-args"), {5: "[THINK]", 6: "[/THINK]", 7: "[TOOL_CALLS]"})
    plan = messages.plan(None, "", is_constrained=True, thinking=messages.thinking("[/INST]"))
    assert plan.markers == {5: "[THINK]", 6: "[/THINK]"}
    assert message(plan.build_reader(), "[THINK]Hm[/THINK]\n[TOOL_CALLS]") == wanted("[TOOL_CALLS]", "Hm", [])


@pytest.mark.parametrize(
    "field",
    [
        {"open_pattern": "<think>", "close": "</think>"},
        {"open": "<think>", "close": ["</think>", "<end>"]},
        {"open": "<think>", "close_pattern": "</think>"},
        {"open": "|", "close": "|"},
        {"open": "<" * 100, "close": ">" * 100},
    ],
)
def test_tags_that_are_not_two_strings_are_none(field: dict[str, Any]) -> None:
    spec = {**shipped_template("think"), "fields": {"reasoning_content": field, "content": {"content": "text"}}}
    assert MessageFormat(spec, {}).thinking("<user>Hi\n<think>\n") is None


PATTERNS = {"content": {}, "thinking": {"open_pattern": "<[ab]>", "close": ["</a>", "</b>"]}}


@pytest.mark.parametrize(
    ("prompt", "lead", "rest"),
    [("<s>", "", ""), ("<s>", "<s>x", "x"), ("<s>", "y", "y"), ("Hm <s", "<s>x", ">x"), ("x", "x", None)],
)
def test_a_template_names_its_tags_beside_patterns(prompt: str, lead: str, rest: str | None) -> None:
    named = {"open": "<a>\n", "close": "\n</a>\n"} | ({"lead": lead} if lead else {})
    spec = {"start_anchor": "<s>", "fields": PATTERNS, "thinking": named}
    thinking = MessageFormat(spec, {}).thinking(prompt)
    assert (None if thinking is None else thinking.lead[thinking.num_led :]) == rest
    assert thinking is None or (thinking.opening, thinking.closing) == ("<a>", "</a>")
    assert message(reader_of(spec, "<s>"), "<b>Hm</b>Yes.") == wanted("Yes.", "Hm", [])


def test_the_template_of_the_documents_names_its_tags() -> None:
    text = (ROOT / "docs" / "chat.md").read_text().split("### Tags of thinking")[1]
    messages = MessageFormat(json.loads(text.split("```json")[1].split("```")[0]), {})
    thinking = messages.thinking("<user>Hi<bot>")
    assert thinking == Thinking("<plan>", "</plan>", is_open=False, lead="<bot><say>", num_led=5)
    for answer in ("<plan>Hm</plan><bot><say>Yes.</say>", "<say>Yes.</say>"):
        for is_constrained in (True, False):
            plan = messages.plan(None, "<bot>", is_constrained=is_constrained, thinking=thinking)
            made = message(plan.build_reader(), answer.removesuffix("</say>" if is_constrained else ""), 3)
            assert made == wanted("Yes.", "Hm" if "Hm" in answer else None, [])


@pytest.mark.parametrize(
    "named",
    [
        None,
        [],
        "<a>",
        {},
        {"open": "<a>"},
        {"open": "<a>", "close": ""},
        {"open": "<a>", "close": "<a>"},
        {"open": "<a>", "close": ["</a>"]},
        {"open": "<a>", "close": "</a>", "lead": None},
        {"open": "<a>", "close": "</a>", "leed": "x"},
        {"open": "<a>", "close": "</a>", "lead": "x" * 200},
    ],
)
def test_tags_that_are_named_wrong_are_refused(tmp_path: Path, named: object) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"start_anchor": "<s>", "fields": PATTERNS, "thinking": named}))
    with pytest.raises(SettingsError, match=r"thinking must be an object of open and close, two different strings"):
        load_response_template("mine.json", tmp_path)


def reader_of(template: Any, prompt: str = "", **options: Any) -> MessageReader:
    chat = parse_chat(json.dumps([{"role": "user", "content": "x"}]), {"tools": TOOLS, **options}, 10_000)
    return MessageFormat(template, {}).plan(chat, prompt, is_constrained=False).build_reader()


def message(reader: MessageReader, text: str, step: int | None = None, *, is_cut: bool = False) -> dict[str, Any]:
    step = step or max(len(text), 1)
    for start in range(0, len(text), step):
        reader.feed(text[start : start + step])
    reader.finish(is_cut=is_cut)
    made = reader.message()
    for call in made.get("tool_calls", ()):
        assert call.pop("id").startswith(("call_", "functions.weather:"))
    return made


def wanted(content: str | None, reasoning: str | None, arguments: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        made["reasoning_content"] = reasoning
    if arguments:
        calls = [{"type": "function", "function": {"name": "weather", "arguments": text}} for text in arguments]
        made["tool_calls"] = calls
    return made


@pytest.mark.parametrize(
    ("name", "prompt", "text", "content", "reasoning", "arguments"), EXAMPLES, ids=[each[0] for each in EXAMPLES]
)
def test_pieces_of_any_size_make_the_same_message(
    name: str, prompt: str, text: str, content: str | None, reasoning: str | None, arguments: list[str]
) -> None:
    for step in (None, 1, 2, 3, 5, 7):
        made = message(reader_of(shipped_template(name), prompt), text, step)
        assert made == wanted(content, reasoning, arguments), step


@pytest.mark.full
@pytest.mark.parametrize("step", [None, 1, 3])
@pytest.mark.parametrize(
    ("name", "prompt", "text", "content", "reasoning", "arguments"), [each for each in EXAMPLES if each[4]]
)
def test_a_message_that_is_cut_shows_no_part_of_a_tag_of_its_texts(
    name: str, prompt: str, text: str, content: str | None, reasoning: str, arguments: list[str], step: int | None
) -> None:
    end_of_reasoning = text.index("Hm.") + len(reasoning)
    for end in range(len(text)):
        made = message(reader_of(shipped_template(name), prompt), text[:end], step, is_cut=True)
        assert reasoning.startswith(made.get("reasoning_content", "")), text[:end]
        if end < end_of_reasoning + 10 or not (arguments or name == "gemma4"):  # whose tags are tokens
            assert (content or "").startswith(made["content"] or ""), text[:end]


def test_every_shipped_template_has_an_example() -> None:
    assert {each[0] for each in EXAMPLES} == set(shipped_names()) == {path.stem for path in FOLDER.iterdir()}


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": weather}</tool_call>',
        '<tool_call>{"name": "others"}</tool_call>',
        '<tool_call>{"name": "weather", "age": 3}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>',
        f"<tool_call>{'[' * 100_000}</tool_call>",
        "<tool_call></tool_call>",
    ],
    ids=lambda text: text[11:40],
)
def test_a_malformed_call_is_content(broken: str) -> None:
    for text in (f"{broken}\n{CALL}", f"{CALL}\n{broken}"):
        for step in (None, 9):
            assert message(reader_of(shipped_template("hermes")), text, step) == wanted(broken, None, [CITY])


DIALECT = '{"a-b.c": null, "d": [{"e_f": "\\"}\\\\"}]}'
PYTHON = "a\n\\d\\\\w]}"
QWEN_VALUE = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
INNER = QWEN_VALUE.format("x")


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        ("qwen3-coder", f"I look.\n\n{QWEN_VALUE.format('Rom')[12:]}", "I look.", ['{"city": "Rom"}']),
        ("qwen3-coder", "<function=weather>\n</function>", None, ["{}"]),
        ("qwen3-coder", "Write `<function=x>`.", "Write `<function=x>`.", []),
        *[
            ("qwen3-coder", QWEN_VALUE.format(value), None, [json.dumps({"city": value})])
            for value in (
                INNER,
                f"{INNER}\n{INNER}",
                "a </parameter> b",
                "a <parameter=x> b",
                "</function>\n</tool_call>",
            )
        ],
        *[
            ("qwen3-coder", text, text, [])
            for text in (
                QWEN_VALUE.format("x\n</parameter>\n</function>\n</tool_call>\ny"),
                QWEN_VALUE.format("x\n<parameter=days>\n2"),
                QWEN_VALUE.format("x\n</parameter>\n<parameter=city>\n2"),
                "<tool_call>\n<function=weather>\nRom\n</function>\n</tool_call>",
                INNER.partition("\n</function>")[0],
            )
        ],
        ("qwen3-coder", f"{INNER}\nDone.\n{INNER[:-60]}", f"Done.\n{INNER[:-60]}", ['{"city": "x"}']),
        ("glm-4.5", "<tool_call>weather</tool_call>", None, ["{}"]),
        *[
            (name, text, text, [])
            for name, text in (
                ("deepseek-dsml", DSML_CALL),
                ("deepseek-dsml", f"<{D}tool_calls>{DSML_CALL.replace('>2<', '>two<')}</{D}tool_calls>"),
                ("deepseek-dsml", f"<{D}tool_calls>{DSML_CALL[:-10]}"),
                ("minimax-m2", 'In XML: <invoke name="weather"></invoke>'),
                ("minimax-m2", '<minimax:tool_call>\n<invoke name="weather">\nRom\n</invoke>\n</minimax:tool_call>'),
                ("gemma4", "<|tool_call>call:weather{city:Rom}<tool_call|>"),
                ("gemma4", '<|tool_call>call:weather{city:<|"|>Rom<tool_call|>'),
                ("lfm2", "<|tool_call_start|>[weather('Rom')]<|tool_call_end|>"),
                ("lfm2", "<|tool_call_start|>[weather(city='Rom'"),
                ("kimi-k2", KIMI_CALL.replace("2}", "two}")),
                ("granite-3", '<|tool_call|>{"name": "weather", "arguments": [1]}'),
                ("nemotron-nano-v2", '<TOOLCALL>[{"name": "weather"</TOOLCALL>'),
                ("command-r7b", '<|START_ACTION|>{"tool_name": "weather", "parameters": {}}<|END_ACTION|>'),
                ("command-r", 'Action:\n```json\n[{"tool_name": "weather"}]\n```'),
                ("phi-4-mini", '<|tool_call|>{"name": "weather", "arguments": {}'),
                ("pythonic", "[see(below)] for more"),
                ("pythonic", "[weather(city='Rom')] is a call."),
                ("pythonic", "Write [weather(city='Rom')]"),
                ("pythonic", "[1, 2]"),
            )
        ],
        ("gemma4", '<|tool_call>call:weather{a-b.c:None,d:[{e_f:<|"|>"}\\<|"|>}]}<tool_call|>', None, [DIALECT]),
        (
            "lfm2",
            f"<|tool_call_start|>[weather(city='{PYTHON}')]<|tool_call_end|>",
            None,
            ['{"city": "a\\n\\\\d\\\\w]}"}'],
        ),
        ("hermes", '<tool_call>{"name": "weather"}</tool_call>', None, ["{}"]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": null}</tool_call>', None, ["{}"]),
        ("llama3", '{"name": "weather"}', None, ["{}"]),
        ("llama3", '{"name": "Bob"}', '{"name": "Bob"}', []),
        ("mistral-args", "[TOOL_CALLS]weather[ARGS]", None, ["{}"]),
        ("gpt-oss", "<|channel|>commentary to=functions.weather<|message|><|call|>", None, ["{}"]),
        ("gpt-oss", "<|channel|>news json<|message|>Yes.<|end|>", "Yes.", []),
        ("gpt-oss", "Yes.", "Yes.", []),
        ("gpt-oss", "<|channel|>news to=user<|message|>Yes.", "<|channel|>news to=userYes.", []),
    ],
)
def test_a_call_is_taken_whole_or_not_at_all(name: str, text: str, content: str | None, arguments: list[str]) -> None:
    for step in (None, 1, 3):
        assert message(reader_of(shipped_template(name)), text, step) == wanted(content, None, arguments)


TYPES = {"s": "string", "i": "integer", "f": "number", "b": "boolean", "o": "object", "a": "array", "n": "null"}
JSON_VALUES = {"s": "[1]", "i": "2", "f": "1.5", "b": "true", "o": '{"a": [null]}', "a": '["x", 1]', "n": "null"}
PYTHON_VALUES = JSON_VALUES | {"b": "True", "o": "{'a': [None]}", "a": "['x', 1]", "n": "None"}
TYPED = {"s": "[1]", "i": 2, "f": 1.5, "b": True, "o": {"a": [None]}, "a": ["x", 1], "n": None}


@pytest.mark.parametrize("values", [JSON_VALUES, PYTHON_VALUES], ids=["json", "python"])
@pytest.mark.parametrize(
    ("name", "call", "value"),
    [
        ("glm-4.5", "<tool_call>weather{}</tool_call>", "<arg_key>{}</arg_key><arg_value>{}</arg_value>"),
        (
            "seed-oss",
            "<seed:tool_call><function=weather>{}</function></seed:tool_call>",
            "<parameter={}>{}</parameter>",
        ),
        (
            "minimax-m2",
            '<minimax:tool_call><invoke name="weather">{}</invoke></minimax:tool_call>',
            '<parameter name="{}">{}</parameter>',
        ),
        (
            "deepseek-dsml",
            f'<{D}tool_calls><{D}invoke name="weather">{{}}</{D}invoke></{D}tool_calls>',
            f'<{D}parameter name="{{}}" string="true">{{}}</{D}parameter>',
        ),
    ],
)
def test_values_between_tags_have_the_types_of_the_schema(
    name: str, call: str, value: str, values: dict[str, str]
) -> None:
    properties: dict[str, Any] = {key: {"type": kind} for key, kind in TYPES.items()}
    properties["a"] = {"anyOf": [properties["a"], properties["n"]]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}]
    text = call.format("".join(value.format(*each) for each in values.items()))
    [made] = message(reader_of(shipped_template(name), tools=tools), text)["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == TYPED


def test_a_call_without_arguments_is_none_where_they_may_be_cut_off() -> None:
    text = "[TOOL_CALLS]weather[ARGS]"
    assert message(reader_of(shipped_template("mistral-args")), text, is_cut=True) == wanted(text, None, [])


def test_nothing_within_a_call_that_is_cut_off_is_a_call() -> None:
    text = '[TOOL_CALLS]weather[ARGS]{"city": "[TOOL_CALLS]weather{}'
    for is_cut in (True, False):
        assert message(reader_of(shipped_template("mistral-args")), text, is_cut=is_cut) == wanted(text, None, [])


def test_a_call_that_is_cut_off_is_content() -> None:
    for step in (None, 1):
        text = f"Hm {CALL[:-30]}"
        assert message(reader_of(shipped_template("hermes")), text, step) == wanted(text, None, [])


@pytest.mark.parametrize("number", [2**53 - 1, 2**53, -123456789012345678])
def test_a_large_number_in_python_loses_no_call(number: int) -> None:
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    chat = parse_chat('[{"role": "user", "content": "x"}]', {"tools": tools}, 1000)
    reader = MessageFormat(shipped_template("lfm2"), {}).plan(chat, "", is_constrained=False).build_reader()
    reader.feed(f"<|tool_call_start|>[f(id={number}, note='{number}')]<|tool_call_end|>")
    reader.finish()
    [call] = reader.message()["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"id": number, "note": str(number)}


def test_only_one_call_without_parallel_calls() -> None:
    reader = reader_of(shipped_template("hermes"), parallel_tool_calls=False)
    assert message(reader, CALL * 3) == wanted(None, None, [CITY])


def test_without_tools_a_call_is_content() -> None:
    plan = MessageFormat(shipped_template("hermes"), {}).plan(None, "", is_constrained=False)
    assert message(plan.build_reader(), CALL) == wanted(CALL, None, [])


def test_a_long_text_of_any_pieces_is_kept() -> None:
    dice = random.Random(0)
    text = "".join(dice.choice([" ", "\n", "<", "<tool", "x", "</think>", "é", "```"]) for _ in range(20_000))
    reader = reader_of(shipped_template("qwen3"))
    assert message(reader, text, 3)["content"] == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", '<|tool_call>call:f{a:"' + '\\"' * 8000),
        ("gemma4", '<|tool_call>call:f{a:"' + '\\"' * 8000 + "}"),
        ("lfm2", "<|tool_call_start|>[f(x='" + "\\'" * 8000),
        ("functiongemma", f"<start_function_call>call:{'f' * 16_000}"),
        ("kimi-k2", f"<|tool_call_begin|>f:{'0' * 16_000}"),
        ("qwen3-coder", "<function=f>" + "<parameter=" * 4000),
        ("command-r", "Action:```json [" * 1500),
        ("mistral-args", '[TOOL_CALLS]f[ARGS]{"a":"' * 900),
    ],
)
def test_parts_of_calls_that_never_end_are_content_in_linear_time(name: str, text: str) -> None:
    before_s = time.thread_time()
    assert message(reader_of(shipped_template(name)), text, 4) == wanted(text, None, [])
    assert time.thread_time() - before_s < 20, "minutes if quadratic; a quarter of a second on a quiet core"


def test_a_run_of_white_space_is_cut() -> None:
    for step in (None, 1, 300):
        made = message(reader_of(shipped_template("qwen3")), f"a{' ' * 5000}b{' ' * 1000}c{' ' * 5000}", step)
        assert made["content"] == f"a{' ' * MAX_SPACE}b{' ' * 1000}c{' ' * MAX_SPACE}"


def test_markers_are_the_special_tokens_that_a_template_names() -> None:
    tokens = {1: "<|channel|>", 2: "<|endoftext|>", 3: "<|message|>", 4: "<|im_end|>"}
    plan = MessageFormat(shipped_template("gpt-oss"), tokens).plan(None, "", is_constrained=False)
    assert plan.markers.keys() == {1, 3}


# the tags of a family that its vocabulary has as special tokens, by llama.cpp's preserved tokens and the templates
SPECIAL_TAGS = {
    "gemma4": '<|channel> <channel|> <|tool_call> <tool_call|> <|"|> <|tool_response>',
    "functiongemma": "<start_function_call> <end_function_call> <escape> <start_function_response>",
    "kimi-k2": "<think> </think> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>",
    "glm-4.5": "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
    "minimax-m2": "<think> </think> <minimax:tool_call> </minimax:tool_call>",
    "deepseek-dsml": "<think> </think> ｜DSML｜",
    "granite-3": "<|tool_call|>",
    "lfm2": "<think> </think> <|tool_call_start|> <|tool_call_end|>",
    "nemotron-nano-v2": "</think> <TOOLCALL> </TOOLCALL>",
    "seed-oss": "<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>",
    "command-r7b": "<|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|START_RESPONSE|> "
    "<|END_RESPONSE|> <|START_TEXT|> <|END_TEXT|>",
    "phi-4-mini": "<|tool_call|> <|/tool_call|>",
    "pythonic": "<|python_tag|> <|python_start|> <|python_end|>",
}


@pytest.mark.parametrize(("name", "tags"), SPECIAL_TAGS.items())
def test_tags_that_are_special_tokens_are_seen(name: str, tags: str) -> None:
    tokens = dict(enumerate([*tags.split(), "<|endoftext|>"]))
    chat = parse_chat('[{"role": "user", "content": "x"}]', {"tools": TOOLS}, 10_000)
    plan = MessageFormat(shipped_template(name), tokens).plan(chat, "", is_constrained=False)
    assert list(plan.markers.values()) == tags.split()


def test_a_named_call_is_its_arguments() -> None:
    reader = NamedCallReader("weather")
    reader.feed('{"city"')
    [first] = reader.take()["tool_calls"]
    assert first.keys() == {"index", "id", "type", "function"}
    reader.feed(": 1}")
    assert reader.take() == {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}
    assert message(NamedCallReader("weather"), CITY, 1) == wanted(None, None, [CITY])


def test_calls_of_kimi_have_the_ids_that_its_chat_template_writes() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    past = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    chat = parse_chat(
        json.dumps([*past, {"role": "tool", "tool_call_id": "x", "content": "y"}]), {"tools": TOOLS}, 9999
    )
    reader = MessageFormat(shipped_template("kimi-k2"), {}).plan(chat, KIMI, is_constrained=False).build_reader()
    reader.feed(KIMI_CALL * 2)
    reader.finish()
    assert [call["id"] for call in reader.message()["tool_calls"]] == ["functions.weather:1", "functions.weather:2"]


def test_an_array_of_calls_gives_each_when_it_is_complete() -> None:
    tricky = {"city": 'a"]}\\', "list": [[1], {}]}
    text = json.dumps([{"name": "weather", "arguments": tricky}, {"name": "weather", "arguments": {}}])
    for step in (None, 1, 4):
        made = message(CallArrayReader(), text, step)
        assert made == wanted(None, None, [json.dumps(tricky), "{}"])
    assert message(CallArrayReader(), text[:-5], 1)["content"] == text[text.rindex('{"name"') : -5]


# --- which one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_names())
def test_a_template_is_found_by_its_markers(name: str) -> None:
    assert detect(" ".join(shipped_markers()[name])) == name


# what tells a family in its chat template, and its response template
EXCERPTS: list[tuple[str, str]] = [
    ("'<|turn>model\\n' '<|tool_call>call:' + function['name'] + '{' '<|channel>thought\\n'", "gemma4"),
    ("'<start_function_call>call:' + tool_call['name'] '<escape>'", "functiongemma"),
    ("'<start_of_turn>' + role + '\\n' message['content'] | trim '<end_of_turn>\\n'", "None"),  # Gemma 3
    ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|> <think></think>", "kimi-k2"),
    ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value> '<|assistant|></think>'", "glm-4.5"),
    ("'<minimax:tool_call>' '<invoke name=\"' ~ ']~b]ai' '<think>' '</think>'", "minimax-m2"),
    ("set dsml_token = '｜DSML｜' '<｜Assistant｜>' '<think>' '</think>' 'function_calls>'", "deepseek-dsml"),
    ("<|start_of_role|> respond only with <|tool_call|> followed by a JSON list <think></think>", "granite-3"),
    ("<|start_of_role|> '<tool_call>\\n{\"name\": \"' '\\n</tool_call>'", "hermes"),  # Granite 4
    ('"List of tools: <|tool_list_start|>[" "<|im_start|>"', "lfm2"),
    ('"List of tools: [" "<|im_start|>" if "</think>" in content', "lfm2"),  # LFM2.5
    ("<SPECIAL_11>Assistant <TOOLCALL>[ ]</TOOLCALL> '</think>'", "nemotron-nano-v2"),
    ("'<seed:tool_call>' '<seed:think>' <function= <parameter=", "seed-oss"),
    ('<|CHATBOT_TOKEN|><|START_THINKING|> <|START_ACTION|>[ "tool_name": "{{ name }}", "parameters":', "command-r7b"),
    ("'<|CHATBOT_TOKEN|>' '\\nAction:\\n```json\\n[\\n' '\"tool_name\": \"' '\"parameters\": '", "command-r"),
    ("'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>'", "phi-4-mini"),
    ("<|start_header_id|> Respond in the format [func_name1(params_name1=params_value1)", "pythonic"),
    ('<|start_header_id|> Respond in the format {"name": function name, "parameters": dictionary}', "llama3"),
    ("'<tool_call>\\n<function=' '<parameter=' '</think>'", "qwen3-coder"),
    ("'<｜Assistant｜>' '<｜tool▁calls▁begin｜>' '</think>'", "deepseek-r1"),
]


@pytest.mark.parametrize(("excerpt", "name"), EXCERPTS)
def test_a_family_is_told_by_its_own_chat_template(excerpt: str, name: str) -> None:
    assert str(detect(excerpt)) == name


def test_a_chat_template_without_markers_has_none() -> None:
    assert detect("{{ messages }}") is None


def test_the_folders_template_comes_before_the_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    own = shipped_template("think")
    tokenizer = SimpleNamespace(chat_template="<tool_call>", response_template=own)
    with caplog.at_level(logging.INFO):
        build_message_format(shipped_template("qwen3"), tokenizer, None, {})
        build_message_format(None, tokenizer, None, {})
        tokenizer.response_template = {"fields": 7}
        build_message_format(None, tokenizer, None, {})
    told = [record.message for record in caplog.records]
    assert "that the folder names" in told[0]
    assert "checkpoint's own" in told[1]
    assert "ignored" in told[2]
    assert "'hermes'" in told[3]


def test_a_file_beside_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(shipped_template("think")))
    assert load_response_template("mine.json", tmp_path) == shipped_template("think")
    assert load_response_template("none", tmp_path) == "none"
    assert load_response_template(None, tmp_path) is None


@pytest.mark.parametrize(
    ("setting", "content", "words"),
    [
        ("qwen2", None, ["qwen2", "did you mean 'qwen3'"]),
        ("gone.json", None, ["gone.json", "No such file"]),
        ("bad.json", b"{", ["bad.json", "not JSON"]),
        ("bad.json", b"\xff", ["bad.json", "UTF-8"]),
        ("bad.json", b"[]", ["bad.json", "not a response template"]),
        ("bad.json", b'{"fields": {"content": {}}}', ["bad.json", "start_anchor"]),
        ("bad.json", b'{"start_anchor": "x", "fields": {"content": {"open_pattern": "("}}}', ["bad.json", "regex"]),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, setting: str, content: bytes | None, words: list[str]) -> None:
    if content is not None:
        (tmp_path / setting).write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load_response_template(setting, tmp_path)
    for word in ("response_template", *words):
        assert word in caught.value.sentence


SLOW: Final = "(?:a|aa|[a-z])+[0-9]"
"""Takes time that is exponential in the length of a word."""


@pytest.mark.parametrize(
    "change",
    [
        {"start_anchor_pattern": SLOW},
        {"fields": {"content": {}, "thinking": {"open_pattern": SLOW, "close": "!"}}},
        {"fields": {"content": {}, "thinking": {"open": "a", "close_pattern": SLOW}}},
        {
            "fields": {
                "content": {},
                "thinking": {
                    "open": "<",
                    "close": ">",
                    "content": "xml-inline",
                    "content_args": {"tag_pattern": f"(?P<key>{SLOW})(?P<value>.)"},
                },
            }
        },
    ],
    ids=["start", "open", "close", "tag"],
)
def test_a_pattern_that_takes_too_long_makes_all_content(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_triton.tasks.text_generation.response_template.MAX_SEARCH_S", 0.05)
    monkeypatch.setattr("hf_triton.tasks.text_generation.response_parser.MAX_SEARCH_S", 0.05)
    spec = {"start_anchor": "never", "fields": {"content": {}}} | change
    spec.pop("start_anchor" if "start_anchor_pattern" in change else "", None)
    word = "a" * 60
    reader = reader_of(spec, prompt=word)
    text = f"<{word}> and more {word}" if "<" in str(change) else f"{word} and more {word}"
    assert message(reader, text, step=7)["content"] == (text if "close_pattern" not in str(change) else text[1:])
    [told] = [record.message for record in caplog.records]
    assert "TimeoutError" in told
    assert word not in told


def test_forced_schemas_may_not_be_too_large() -> None:
    huge = {"type": "function", "function": {"name": "huge", "parameters": {"description": "x" * 70_000}}}
    with pytest.raises(RequestError, match="huge"):
        parse_chat('[{"role": "user", "content": "x"}]', {"tools": [huge], "tool_choice": "required"}, 200_000)
