# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 (DeepSeek's own vertical lines)
"""Whatever a model writes in a shipped format: no text is lost, no call is half taken, and pieces do not matter."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import pytest

from hf_triton.protocol.chat_request import parse_chat
from hf_triton.tasks.text_generation.message import MessagePlan
from hf_triton.tasks.text_generation.response_template import MessageFormat, shipped_names, shipped_template

NAMES = ("weather", "sh", "now")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in NAMES
]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How models write in one format."""

    prompt: str
    think: Callable[[str], str] | None
    say: Callable[[str], str]
    call: Callable[[list[tuple[str, Arguments]]], str]
    syntax: tuple[str, ...]
    """Its tags, which may also stand in a text or an argument."""
    has_json: bool = True
    unclean: tuple[str, ...] = field(default=())
    """Tags of the syntax that make a value ambiguous: there is no call then."""
    bare_keys: bool = False
    """Whether keys have no quotes, so that not every text is one."""
    is_alone: bool = False
    """Whether there is no text beside calls."""


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def each(form: Callable[[str, Arguments], str], between: str = "\n") -> Callable[[list[tuple[str, Arguments]]], str]:
    return lambda calls: between.join(form(name, arguments) for name, arguments in calls)


def in_tags(head: str, middle: str, tail: str) -> Callable[[Arguments], str]:
    return lambda arguments: "".join(f"{head}{key}{middle}{value}{tail}\n" for key, value in arguments.items())


def thought(opening: str, closing: str) -> Callable[[str], str]:
    return lambda text: f"{opening}{text}{closing}"


HERMES = each(lambda name, given: f"<tool_call>\n{dumps({'name': name, 'arguments': given})}\n</tool_call>")
QWEN_TAGS = in_tags("<parameter=", ">\n", "\n</parameter>")
GLM_TAGS = in_tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
THINK = thought("<think>", "</think>")
HEADERS = (
    "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json",
    "<|start|>assistant<|channel|>analysis to=functions.{name} code",
    "<|start|>assistant to=functions.{name}<|channel|>analysis code",
    "<|start|>assistant to={name}<|channel|>commentary json",
    "<|channel|>commentary to={name}",
    "<|channel|>final to={name}<|channel|>commentary <|constrain|>xml",
)
NVIDIA = each(lambda name, given: f"<TOOLCALL>[{dumps({'name': name, 'arguments': given})}]</TOOLCALL>")
MINIMAX_TAGS = in_tags('<parameter name="', '">', "</parameter>")
SEED_TAGS = in_tags("<parameter=", ">", "</parameter>")
GEMMA_QUOTE = '<|"|>'
DSML = "｜DSML｜"
DSML_TAGS = in_tags(f'<{DSML}parameter name="', '" string="true">', f"</{DSML}parameter>")
plain: Callable[[str], str] = str


def in_section(
    opening: str, closing: str, form: Callable[[str, Arguments], str], between: str = "\n"
) -> Callable[[list[tuple[str, Arguments]]], str]:
    return lambda calls: f"{opening}{each(form, between)(calls)}{closing}" if calls else ""


def in_dialect(quote: str, value: object) -> str:
    """Gemma's way to write a value: JSON without quotes around keys, and with tags around strings."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_dialect(quote, entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_dialect(quote, entry) for entry in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else str(value)


def in_python(name: str, given: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def cohere(calls: list[tuple[str, Arguments]]) -> str:
    return dumps([{"tool_call_id": "0", "tool_name": name, "parameters": given} for name, given in calls])


FAMILIES = {
    "hermes": Family("<|im_start|>assistant\n", None, plain, HERMES, ("<tool_call>", "</tool_call>")),
    "qwen3": Family(
        "<|im_start|>assistant\n", THINK, plain, HERMES, ("<tool_call>", "</tool_call>", "<think>", "</think>")
    ),
    "qwen3-coder": Family(
        "<|im_start|>assistant\n",
        THINK,
        plain,
        each(lambda name, given: f"<tool_call>\n<function={name}>\n{QWEN_TAGS(given)}</function>\n</tool_call>"),
        ("<tool_call>", "</tool_call>", "</function>", "<function=sh>", "</parameter>", "<parameter=x>"),
        has_json=False,
        unclean=("</parameter>", "<parameter=x>"),
    ),
    "glm-4.5": Family(
        "<|assistant|>",
        THINK,
        plain,
        each(lambda name, given: f"<tool_call>{name}\n{GLM_TAGS(given)}</tool_call>"),
        ("<tool_call>", "</tool_call>", "</arg_value>", "<arg_value>", "<arg_key>", "</arg_key>"),
        has_json=False,
        unclean=("</arg_value>",),
    ),
    "think": Family("<think>", None, lambda text: f"</think>{text}", lambda _: "", ("</think>", "<think>")),
    "deepseek-r1": Family(
        "<｜Assistant｜>",
        THINK,
        plain,
        each(
            lambda name, given: (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(given)}\n```<｜tool▁call▁end｜>"
            )
        ),
        ("<｜tool▁call▁end｜>", "```", "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>sh<｜tool▁sep｜>", "<think>"),
    ),
    "llama3": Family(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        None,
        plain,
        lambda calls: (
            "<|python_tag|>" + "; ".join(dumps({"name": name, "parameters": given}) for name, given in calls)
            if calls
            else ""
        ),
        ("<|python_tag|>", '}; {"name": ', ";", '{"name":'),
    ),
    "mistral": Family(
        "[/INST]",
        None,
        plain,
        lambda calls: (
            f"[TOOL_CALLS] {dumps([{'name': name, 'arguments': given} for name, given in calls])}" if calls else ""
        ),
        ("[TOOL_CALLS]",),
    ),
    "mistral-args": Family(
        "[/INST]",
        thought("[THINK]", "[/THINK]"),
        plain,
        each(lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}", ""),
        ("[TOOL_CALLS]", "[TOOL_CALLS]sh{", "[ARGS]", "[THINK]", "[/THINK]"),
    ),
    "gpt-oss": Family(
        "<|start|>assistant",
        thought("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        lambda text: f"<|channel|>final<|message|>{text}<|end|>",
        each(
            lambda name, given: (
                HEADERS[len(dumps(given)) % len(HEADERS)].format(name=name) + f"<|message|>{dumps(given)}<|call|>"
            )
        ),
        ("<|end|>", "<|call|>", "<|message|>", "<|channel|>", "<|channel|>analysis to=sh code<|message|>", " to=sh "),
    ),
    "gemma4": Family(
        "<|turn>model\n",
        thought("<|channel>thought\n", "<channel|>"),
        plain,
        each(lambda name, given: f"<|tool_call>call:{name}{in_dialect(GEMMA_QUOTE, given)}<tool_call|>", ""),
        ("<|tool_call>call:sh{", "<tool_call|>", "<|channel>", "}", "]", "{a:", '"', "\\", "<|", "True"),
        bare_keys=True,
    ),
    "functiongemma": Family(
        "<start_of_turn>model\n",
        None,
        plain,
        each(
            lambda name, given: f"<start_function_call>call:{name}{in_dialect('<escape>', given)}<end_function_call>",
            "",
        ),
        ("<start_function_call>call:sh{", "<end_function_call>", "}", "]", ",a:", '"', "\\", "<esc", "None"),
        bare_keys=True,
    ),
    "kimi-k2": Family(
        "<|im_assistant|>assistant<|im_middle|>",
        THINK,
        plain,
        in_section(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            lambda name, given: (
                f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{dumps(given)}<|tool_call_end|>"
            ),
            "",
        ),
        ("<|tool_call_end|>", "<|tool_call_begin|>sh:1<|tool_call_argument_begin|>", "<|tool_calls_section_end|>"),
    ),
    "minimax-m2": Family(
        "]~b]ai\n<think>\n",
        None,
        lambda text: f"</think>\n\n{text}",
        in_section(
            "<minimax:tool_call>\n",
            "\n</minimax:tool_call>",
            lambda name, given: f'<invoke name="{name}">\n{MINIMAX_TAGS(given)}</invoke>',
        ),
        ("<minimax:tool_call>", "</invoke>", '<invoke name="sh">', "</parameter>", '<parameter name="x">'),
        has_json=False,
        unclean=("</parameter>", '<parameter name="x">'),
    ),
    "deepseek-dsml": Family(
        "<｜Assistant｜>",
        THINK,
        plain,
        in_section(
            f"\n\n<{DSML}function_calls>\n",
            f"\n</{DSML}function_calls>",
            lambda name, given: f'<{DSML}invoke name="{name}">\n{DSML_TAGS(given)}</{DSML}invoke>',
        ),
        (f"</{DSML}invoke>", f'<{DSML}invoke name="sh">', f"</{DSML}parameter>", f"</{DSML}function_calls>", DSML),
        has_json=False,
        unclean=(f"</{DSML}parameter>",),
    ),
    "granite-3": Family(
        "<|start_of_role|>assistant<|end_of_role|>",
        THINK,
        plain,
        lambda calls: (
            f"<|tool_call|>{dumps([{'name': name, 'arguments': given} for name, given in calls])}" if calls else ""
        ),
        ("<|tool_call|>", "<response>", "</response>"),
    ),
    "lfm2": Family(
        "<|im_start|>assistant\n",
        THINK,
        plain,
        in_section("<|tool_call_start|>[", "]<|tool_call_end|>", in_python, ", "),
        ("<|tool_call_start|>", "<|tool_call_end|>", "]<|tool_call_end|>", "[sh()]", "'", '\\"', "</think>"),
    ),
    "nemotron-nano-v2": Family(
        "<SPECIAL_11>Assistant\n<think>\n",
        None,
        lambda text: f"</think>\n\n{text}",
        NVIDIA,
        ("<TOOLCALL>", "</TOOLCALL>", "<TOOLCALL>[{", "<think>"),
    ),
    "seed-oss": Family(
        "<seed:bos>assistant\n",
        thought("<seed:think>", "</seed:think>"),
        plain,
        each(
            lambda name, given: f"<seed:tool_call>\n<function={name}>\n{SEED_TAGS(given)}</function>\n</seed:tool_call>"
        ),
        ("<seed:tool_call>", "</seed:tool_call>", "</function>", "<function=sh>", "</parameter>", "<parameter=x>"),
        has_json=False,
        unclean=("</parameter>", "<parameter=x>"),
    ),
    "command-r7b": Family(
        "<|CHATBOT_TOKEN|>",
        thought("<|START_THINKING|>", "<|END_THINKING|>"),
        lambda text: f"<|START_RESPONSE|>{text}<|END_RESPONSE|>",
        lambda calls: f"<|START_ACTION|>{cohere(calls)}<|END_ACTION|>" if calls else "",
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_THINKING|>"),
    ),
    "command-r": Family(
        "<|CHATBOT_TOKEN|>",
        None,
        plain,
        lambda calls: f"\nAction:\n```json\n{cohere(calls)}```" if calls else "",
        ("Action:", "```", "```json\n[", "Action:\n```json\n[{"),
    ),
    "phi-4-mini": Family(
        "<|assistant|>",
        None,
        plain,
        each(lambda name, given: f"<|tool_call|>{dumps({'name': name, 'arguments': given})}<|/tool_call|>"),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "pythonic": Family(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        None,
        plain,
        in_section("[", "]", in_python, ", "),
        ("[sh()]", "[sh(", "<|python_tag|>", "'", '"'),
        is_alone=True,
    ),
}


@cache
def plan_of(family: str) -> MessagePlan:
    chat = parse_chat('[{"role": "user", "content": "x"}]', {"tools": TOOLS}, 10_000)
    return MessageFormat(shipped_template(family), {}).plan(chat, FAMILIES[family].prompt, is_constrained=False)


def read(family: str, pieces: list[str], *, is_cut: bool = False) -> dict[str, Any]:
    """The message of a completion; as a stream's deltas make it."""
    reader = plan_of(family).build_reader()
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for piece in [*pieces, None]:
        if piece is None:
            reader.finish(is_cut=is_cut)
        else:
            reader.feed(piece)
        for name, value in reader.take().items():
            message[name] += value
    message["tool_calls"] = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    return message


def splits(text: str, dice: random.Random, num: int) -> Iterator[list[str]]:
    yield list(text)
    for _ in range(num):
        ends = sorted(dice.choices(range(len(text) + 1), k=dice.randint(1, 8)))
        yield [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


class Writer:
    """Writes random texts of words that come once."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._words = (f"w{number}w" for number in count())

    def text(self, others: tuple[str, ...] = ()) -> str:
        pieces = [
            self.dice.choice(others) if others and self.dice.random() < 0.4 else next(self._words)
            for _ in range(self.dice.randint(1, 5))
        ]
        return self.dice.choice(("", " ", "\n")).join(pieces)

    def arguments(self, family: Family) -> Arguments:
        others = tuple(tag for tag in family.syntax if tag not in family.unclean) if not family.has_json else ()
        tags = (*family.syntax, '"', "\\", "}", "]}", "{") if family.has_json else ("x" if not others else "", *others)
        given: Arguments = {f"k{number}": self.text(tags).strip() for number in range(self.dice.randint(0, 2))}
        if family.has_json and self.dice.random() < 0.5:
            given["nested"] = [{"k-1" if family.bare_keys else self.text(tags): None}, 1.5, []]
        return given


def words_of(message: dict[str, Any]) -> list[str]:
    calls = [text for call in message["tool_calls"] for text in call]
    return re.findall(r"w\d+w", "\n".join((message["content"], message["reasoning_content"], *calls)))


SEEDS = [pytest.param(range(20), id="some"), pytest.param(range(20, 50), id="many", marks=pytest.mark.full)]


def test_every_shipped_template_has_a_family() -> None:
    assert sorted(FAMILIES) == shipped_names()


@pytest.mark.full
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_by_the_format_is_read(name: str, seeds: range) -> None:
    family = FAMILIES[name]
    for seed in seeds:
        writer = Writer(seed)
        reasoning = writer.text() if family.think and seed % 2 else ""
        content = "" if family.is_alone and seed % 4 else writer.text()
        calls = [(writer.dice.choice(NAMES), writer.arguments(family)) for _ in range(seed % 4)]
        text = (family.think(reasoning) if family.think and reasoning else "") + family.say(content)
        text += family.call(calls)
        made = read(name, [text])
        assert (made["content"], made["reasoning_content"]) == (content, reasoning), text
        expected = [] if name == "think" else calls
        assert [(call, json.loads(given)) for call, given in made["tool_calls"]] == expected, text
        for pieces in splits(text, writer.dice, 5):
            assert read(name, pieces) == made, (text, pieces)
        for end in range(0, len(text), 3):  # cut by length: whole calls and no half one
            cut = read(name, [text[:end]], is_cut=True)
            taken = [(call, json.loads(given)) for call, given in cut["tool_calls"]]
            assert taken == expected[: len(taken)], text[:end]
            assert set(words_of(cut)) >= set(re.findall(r"w\d+w", text[:end])), text[:end]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_is_lost_whatever_is_written(name: str, seeds: range) -> None:
    family = FAMILIES[name]
    for seed in seeds:
        writer = Writer(seed)
        parts: list[Callable[[], str]] = [
            lambda writer=writer: writer.text(family.syntax),
            lambda writer=writer: family.say(writer.text(family.syntax)),
            lambda writer=writer: (family.think or plain)(writer.text(family.syntax)),
            lambda writer=writer: family.call([(writer.dice.choice(NAMES), {"k": writer.text(family.syntax)})]),
        ]
        text = "".join(writer.dice.choice(parts)() for _ in range(writer.dice.randint(1, 5)))
        made = read(name, [text])
        without_names = re.sub(r"<\|channel\|>[^<]+<\|message\|>", "", text)  # of channels, which are the syntax's own
        expected = re.findall(r"w\d+w", without_names)
        assert [word for word in sorted(words_of(made)) if word in expected] == sorted(expected), text
        for pieces in splits(text, writer.dice, 5):
            assert read(name, pieces) == made, (text, pieces)
