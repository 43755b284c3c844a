# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 (DeepSeek's own vertical lines)
"""Calls in free text: whatever a model writes, each call that is read from it is one of the tools, by its schema."""

import json
import random
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from hf_triton.errors import RequestError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.grammar.free_calls import CallsConstraint
from hf_triton.protocol.chat_request import Chat, parse_chat
from hf_triton.protocol.thinking_switches import Thinking
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint
from hf_triton.tasks.text_generation.response_template import MessageFormat, shipped_names, shipped_template
from tests.support.grammars import allowed_tokens
from tests.support.marks import full
from tests.support.tokenizers import BOS, EOS, UNK, byte_level

TOOLS = [
    {
        "name": "trip",
        "parameters": {
            "type": "object",
            "description": "Where to go.",
            "properties": {
                "city": {"type": "string", "maxLength": 8, "description": "Its name."},
                "days": {"type": "integer", "minimum": 1, "maximum": 30},
                "by": {"$ref": "#/$defs/By"},
                "price": {"type": ["number", "null"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "stops": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["city", "days", "by", "price"],
            "additionalProperties": False,
            "$defs": {"By": {"enum": ["train", "boat"]}},
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
SCHEMAS: dict[str, Any] = {str(tool["name"]): tool["parameters"] for tool in TOOLS}
OPENINGS: dict[str, Sequence[str]] = {
    "kimi-k2": ("<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_begin|>"),
    "minimax-m2": ("<minimax:tool_call>", '</invoke>\n<invoke name="', "<think>so</think>\n<minimax:tool_call>"),
    "deepseek-dsml": (
        "<｜DSML｜function_calls>",
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="',
        "<think>so</think>\n\n<｜DSML｜tool_calls>",
    ),
    "granite-3": ("<|tool_call|>",),
    "nemotron-nano-v2": ("<TOOLCALL>",),
    "seed-oss": ("<seed:tool_call>", "<seed:think>so</seed:think>\n<seed:tool_call>"),
    "command-r7b": ("<|START_ACTION|>", "<|START_THINKING|>so<|END_THINKING|><|START_ACTION|>"),
    "command-r": ("Action:\n```json",),
    "phi-4-mini": ("<|tool_call|>",),
    "hermes": ("<tool_call>",),
    "qwen3": ("<tool_call>", "<think>so</think>\n\n<tool_call>"),
    "qwen3-coder": ("<tool_call>", "<function="),
    "glm-4.5": ("<tool_call>", "<think>so</think><tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
    "mistral-args": ("[TOOL_CALLS]", "[THINK]so[/THINK][TOOL_CALLS]"),
    "llama3": ("<|python_tag|>", '{"name":', ' {\n"type" :', 'so }; {"name": '),
    "deepseek-r1": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>"),
    "gpt-oss": (
        " to=",
        "<|channel|>commentary to=",
        "<|channel|>analysis<|message|>so to=<|end|><|start|>assistant<|channel|>commentary to=",
        "<|channel|>final<|message|>so<|end|><|start|>assistant to=",
    ),
}
"""What opens a call, by response template."""
ODD_TOKENS = (
    ">\n",
    '>{"',
    ">\n{",
    "l>{",
    '{"',
    '":',
    '": ',
    ">t",
    "]tr",
    '][{"',
    "=trip",
    "to=functions.",
    "</tool_call>x",
)
"""Tokens that end an opening, or a call, and go on."""
TAGS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call|>", "<|/tool_call|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<TOOLCALL>"),
)
WORDS = (
    *TAGS,
    *(opening for openings in OPENINGS.values() for opening in openings),
    *('{"name": "x", "parameters": {}}', "; ", "<function=x>", "<parameter=y>", " to=x", "sh<｜tool▁sep｜>{}", "<"),
    *('<invoke name="', "</invoke>", "<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
)
PROMPT = {"gpt-oss": "<|start|>assistant"}


@cache
def tokenizer_of(*, is_special: bool) -> Any:
    backend = byte_level()
    backend.add_tokens([AddedToken(text, normalized=False) for text in ODD_TOKENS])
    if is_special:
        backend.add_special_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, unk_token=UNK)


@cache
def compiler_of(*, is_special: bool) -> GrammarCompiler:
    tokenizer = tokenizer_of(is_special=is_special)
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))


def chat_of(tools: Sequence[dict[str, Any]] = TOOLS, **options: Any) -> Chat:
    given = [{"type": "function", "function": {"strict": True, **tool}} for tool in tools]
    return parse_chat('[{"role": "user", "content": "x"}]', {"tools": given, **options}, 100_000)


def with_argument(schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {token_id: token.content for token_id, token in added.items() if token.special}


class Writer:
    """Writes in one format, by a random model whose calls are held."""

    def __init__(self, name: str, chat: Chat, *, is_special: bool, spec: Any = None) -> None:
        self.tokenizer = tokenizer_of(is_special=is_special)
        self.chat, self.prompt = chat, PROMPT.get(name, "")
        self.format = MessageFormat(spec or shipped_template(name), special_tokens(self.tokenizer))
        held = {name for name, is_held in chat.strict.items() if is_held}
        plan = self.format.call_plan(chat, self.prompt, held)
        _, self.build, _ = compiler_of(is_special=is_special).compile_calls(plan, SamplingParams(1))
        self.likely = set(self.ids('}]"),:{}<>\n/trip'))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def force(self, constraint: Constraint, text: str) -> list[int]:
        """Write a text, as the constraint must allow."""
        ids = self.ids(text)
        for token_id in ids:
            assert token_id in self.allowed(constraint), text
            constraint.accept(token_id)
        return ids

    def allowed(self, constraint: Constraint) -> list[int]:
        size = len(self.tokenizer)
        return [*range(size)] if constraint.bitmask() is None else allowed_tokens(constraint, size)  # type: ignore[arg-type]

    def draw(self, constraint: CallsConstraint, dice: random.Random, num: int = 400) -> list[int]:
        """Random allowed tokens up to the call's end; all `num` if it has none."""
        drawn: list[int] = []
        while constraint._call is not None and not constraint.is_complete and len(drawn) < num:
            choices = self.allowed(constraint)
            if self.tokenizer.eos_token_id in choices:
                break
            likely = [token_id for token_id in choices if token_id in self.likely]
            drawn.append(dice.choice(likely if likely and dice.random() < 0.6 else choices))
            constraint.accept(drawn[-1])
        return drawn

    def read(self, ids: Sequence[int], *, is_cut: bool) -> dict[str, Any]:
        visible = self.format.plan(self.chat, self.prompt, is_constrained=False).markers
        special = special_tokens(self.tokenizer).keys() - visible.keys()
        text = self.tokenizer.decode([token_id for token_id in ids if token_id not in special])
        reader = self.format.plan(self.chat, self.prompt, is_constrained=False).build_reader()
        reader.feed(text)
        reader.finish(is_cut=is_cut)
        return {**reader.message(), "text": text}


def check(message: dict[str, Any], schemas: dict[str, Any] = SCHEMAS) -> int:
    """The number of a message's calls, each of which is valid."""
    calls = message.get("tool_calls", [])
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    return len(calls)


def sweep(name: str, num: int, *, is_special: bool, seed: int = 0) -> tuple[int, int]:
    """Forced into openings: how many completions end with a call, and how many are cut; each of the ended is read."""
    writer, dice, num_ended = Writer(name, chat_of(), is_special=is_special), random.Random(seed), 0
    for index in range(num):
        constraint = writer.build()
        opening = OPENINGS[name][index % len(OPENINGS[name])]
        ids = writer.force(constraint, opening)
        assert constraint._call is not None, opening
        ids += writer.draw(constraint, dice)
        has_ended = constraint._call is None or writer.tokenizer.eos_token_id in writer.allowed(constraint)
        message = writer.read(ids, is_cut=not has_ended)
        num_calls = check(message)
        assert num_calls >= has_ended, message["text"]
        num_ended += has_ended
    return num_ended, num - num_ended


def sweep_freely(name: str, num: int, *, is_special: bool, seed: int = 0) -> int:
    """Of a model that writes words of the format as it likes: how many calls are read."""
    writer, dice, num_calls = Writer(name, chat_of(), is_special=is_special), random.Random(seed), 0
    eos = writer.tokenizer.eos_token_id
    for _ in range(num):
        constraint, ids, next_ids = writer.build(), list[int](), list[int]()
        while len(ids) < 300 and not constraint.is_complete:
            choices = writer.allowed(constraint)
            if constraint._call is not None:
                ids += (drawn := writer.draw(constraint, dice, 300))
                if constraint._call is not None and not drawn:
                    break
                continue
            next_ids = next_ids or (writer.ids(dice.choice(WORDS)) if dice.random() < 0.6 else [dice.choice(choices)])
            token_id = next_ids.pop(0)
            if token_id not in choices:
                next_ids = []
            elif token_id == eos:
                break
            else:
                constraint.accept(token_id)
                ids.append(token_id)
        is_cut = constraint._call is not None and not constraint.is_complete
        num_calls += check(writer.read(ids, is_cut=is_cut))
    return num_calls


@pytest.mark.parametrize("is_special", [False, *full(True)])
@pytest.mark.parametrize("name", OPENINGS)
def test_a_call_that_a_model_opens_is_one_of_the_tools(name: str, is_special: bool) -> None:
    num_ended, _ = sweep(name, 2 * len(OPENINGS[name]), is_special=is_special)
    assert num_ended > 0


@pytest.mark.full
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", OPENINGS)
def test_no_call_is_read_that_was_not_held(name: str, is_special: bool) -> None:
    assert sweep_freely(name, 10, is_special=is_special) > 0


def test_every_response_template_with_calls_is_among_them() -> None:
    held = [name for name in shipped_names() if MessageFormat(shipped_template(name), {}).can_hold_calls]
    assert sorted(OPENINGS) == held


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_free_text_is_free(name: str) -> None:
    """Any token may come, end-of-sequence and halves of letters too, but those that go on behind an opening wrongly."""
    writer = Writer(name, chat_of(), is_special=True)
    constraint, dice = writer.build(), random.Random(0)
    constraint.accept(writer.ids("x")[0])
    for _ in range(200):
        forbidden = set(range(len(writer.tokenizer))) - set(writer.allowed(constraint))
        assert all(text in ODD_TOKENS for text in map(writer.tokenizer.decode, forbidden))
        token_id = dice.choice(writer.allowed(constraint))
        if writer.tokenizer.decode([token_id]) not in TAGS:
            constraint.accept(token_id)
    assert constraint._call is None


@pytest.mark.parametrize(
    ("text", "ends", "others"),
    [
        ("<tool_call", {">", ">\n", '>{"', ">\n{"}, {">so", ">t"}),
        ("<tool_cal", {"l", "l>{"}, set()),
        ("<tool_call>\n", {"{", '{"'}, {"s", ">so"}),
    ],
)
def test_a_token_may_end_an_opening_and_go_on_as_the_call_does(text: str, ends: set[str], others: set[str]) -> None:
    writer = Writer("hermes", chat_of(), is_special=False)
    constraint = writer.build()
    for letter in text:
        writer.force(constraint, letter)
    allowed = {writer.tokenizer.decode([token_id]) for token_id in writer.allowed(constraint)}
    assert ends <= allowed
    assert not others & allowed
    writer.force(constraint, max(ends, key=len))
    assert constraint._call is not None


def test_thinking_opens_no_call() -> None:
    thought = '<think>I may <tool_call>\n{"name": "nope"}</tool_call> and more</think>'
    for name in ("qwen3", "glm-4.5"):
        writer = Writer(name, chat_of(), is_special=False)
        constraint = writer.build()
        writer.force(constraint, thought)
        assert constraint._call is None
        writer.force(constraint, "\n\n<tool_call>")
        assert constraint._call is not None


def test_a_prompt_may_end_in_thinking_and_not_in_a_call() -> None:
    def build(prompt: str) -> CallsConstraint:
        plan = MessageFormat(shipped_template("qwen3"), {}).call_plan(
            chat_of(), f"<|im_start|>assistant\n{prompt}", {"now"}
        )
        return compiler_of(is_special=False).compile_calls(plan, SamplingParams(1))[1]()

    writer = Writer("qwen3", chat_of(), is_special=False)
    constraint = build("<think>\n")
    writer.force(constraint, "<tool_call>x</think>")
    assert constraint._call is None
    with pytest.raises(RequestError, match="ends within a call"):
        build('<tool_call>\n{"name": ')


def test_tools_that_are_not_strict_have_any_arguments() -> None:
    tools = [TOOLS[0], {"name": "free", "strict": False, "parameters": SCHEMAS["trip"]}]
    for name, call in (
        ("hermes", '<tool_call>{"name": "free", "arguments": {"x": [1]}}</tool_call>'),
        ("qwen3-coder", "<tool_call>\n<function=free>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"),
    ):
        writer = Writer(name, chat_of(tools), is_special=False)
        constraint = writer.build()
        message = writer.read(writer.force(constraint, call + "so"), is_cut=False)
        assert message["tool_calls"][0]["function"]["name"] == "free"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": ["string", "integer"]}, "7"),
        ({"enum": ["a", "b"]}, "b"),
        ({"enum": [1, 2]}, "2"),
        ({"anyOf": [{"$ref": "#/$defs/D"}, {"type": "null"}]}, "null"),
        ({"anyOf": [{"$ref": "#/$defs/D"}, {"type": "null"}]}, "[1]"),
        ({"$ref": "#/$defs/D"}, "[1]"),
        ({"type": "array", "items": {"$ref": "#"}}, '[{"x": []}]'),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, '{"x": null}'),
        ({"type": ["string", "null"], "enum": ["a", None]}, "a"),
        ({"type": "string", "minLength": 1}, "a > b\n"),
        ({}, "anything"),
    ],
)
def test_arguments_in_tags_are_what_the_schema_says(schema: dict[str, Any], value: str) -> None:
    parameters = {"properties": {"x": schema}, "required": ["x"], "$defs": {"D": {"type": "array"}}}
    writer = Writer("qwen3-coder", chat_of([{"name": "f", "parameters": parameters}]), is_special=False)
    ids = writer.force(writer.build(), f"<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>")
    assert check(writer.read(ids, is_cut=False), {"f": {"type": "object", **parameters}}) == 1


@pytest.mark.parametrize(
    ("name", "tool", "words"),
    [
        ("think", TOOLS[0], "say tool_choice required"),
        (
            "qwen3-coder",
            {"name": "f", "parameters": {"properties": {"x": {"type": "string", "pattern": "a"}}}},
            "pattern",
        ),
        ("qwen3-coder", {"name": "f", "parameters": {"properties": {"x": {"minimum": 1}}}}, "without a type"),
        ("glm-4.5", {"name": "f", "parameters": {"anyOf": []}}, "anyOf"),
        ("glm-4.5", {"name": "f", "parameters": {"$ref": "#"}}, r"\$ref.*: leave it out, or say strict false"),
        ("glm-4.5", {"name": "a b"}, "a name of letters"),
    ],
)
def test_a_strict_tool_that_cannot_be_held_is_refused(name: str, tool: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        Writer(name, chat_of([tool]), is_special=False)
    assert caught.value.code == "invalid_parameter"


def test_a_form_of_several_ways_takes_as_many_tools() -> None:
    tools = [{**with_argument({"enum": [f"{index}" * 1000]}), "name": f"f{index}"} for index in range(10, 30)]
    Writer("gpt-oss", chat_of(tools), is_special=True)
    with pytest.raises(RequestError, match="up to 65536 can be enforced"):
        Writer("gpt-oss", chat_of([with_argument({"enum": ["a" * 70_000]})]), is_special=True)


def test_a_template_of_the_checkpoint_s_own_with_calls_between_tags_is_held() -> None:
    spec = {name: value for name, value in shipped_template("hermes").items() if name != "calls"}
    writer = Writer("own", chat_of(), is_special=True, spec=spec)
    ids = writer.force(writer.build(), '<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    assert check(writer.read(ids, is_cut=False)) == 1


def test_arguments_in_json_stay_what_the_schema_allows() -> None:
    """A text that looks like a number stays a text if it may be one; a number beyond those of floats is the largest."""
    number_or_text = {"type": ["string", "integer", "number"], "maximum": 5}
    writer = Writer("hermes", chat_of([with_argument(number_or_text)]), is_special=False)
    for value in ('"77"', "4", "4.5"):
        call = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'
        message = writer.read(writer.force(writer.build(), call), is_cut=False)
        assert check(message, {"f": with_argument(number_or_text)["parameters"]}) == 1
        assert json.loads(message["tool_calls"][0]["function"]["arguments"])["x"] == json.loads(value)
    writer = Writer("hermes", chat_of([with_argument({"type": "number"})]), is_special=False)
    ids = writer.force(writer.build(), '<tool_call>{"name": "f", "arguments": {"x": -1e999}}</tool_call>')
    [call] = writer.read(ids, is_cut=False)["tool_calls"]
    assert json.loads(call["function"]["arguments"])["x"] == -sys.float_info.max


@pytest.mark.parametrize("is_open", [True, False])
def test_calls_come_behind_thinking_that_a_budget_ends(is_open: bool) -> None:
    writer = Writer("qwen3", chat_of(), is_special=False)
    compiler = compiler_of(is_special=False)
    plan = writer.format.call_plan(writer.chat, "", {"now"})
    params, _, build_behind = compiler.compile_calls(plan, SamplingParams(1))
    build = compiler.behind_thinking(Thinking("<think>", "</think>", is_open, budget=3), params, build_behind)
    assert build is not None
    constraint = build()
    for letter in "" if is_open else "<think>":
        writer.force(constraint, letter)
    for letter in "abc":
        writer.force(constraint, letter)
    while len(allowed_ids := writer.allowed(constraint)) == 1:  # the closing tag
        constraint.accept(allowed_ids[0])
    for letter in "I <tool_call>":
        writer.force(constraint, letter)
    allowed = {writer.tokenizer.decode([token_id]) for token_id in writer.allowed(constraint)}
    assert "{" in allowed
    assert "x" not in allowed


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({"opening": "<a>"}, "objects of opening and call"),
        ({"opening": "<a>", "call": "{call}", "more": "x"}, "objects of opening and call"),
        ({"opening": "<a>x*", "call": "{call}"}, "a letter of its own"),
        ({"opening": "(<a>", "call": "{call}"}, "calls: "),
        ({"opening": "<a>", "call": "{name}"}, "the place"),
        ({"opening": "<a>", "call": "{name}{arguments}", "argument": "{key}={value}"}, "what ends the value"),
    ],
)
def test_forms_that_are_none_are_a_sentence(calls: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MessageFormat({**shipped_template("hermes"), "calls": calls}, {})
