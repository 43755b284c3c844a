# SPDX-License-Identifier: Apache-2.0
"""Thinking in front of an answer: free, bounded, and told from it, of random tokens."""

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.grammar.thinking import MAX_SPACES, ThinkingConstraint
from hf_triton.protocol.structured_output import Grammar
from hf_triton.protocol.thinking_switches import Thinking
from hf_triton.sampling.params import SamplingParams
from hf_triton.tasks.text_generation.message import MessageReader, ThinkingReader
from tests.support.grammars import allowed_tokens, choice, json_schema, regex
from tests.support.marks import full
from tests.support.tokenizers import BOS, EOS, UNK, byte_level

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ODD_TOKENS = ("</think>{", "</think>\n\n", 'k>{"', ">\n", "</thi", "<thi", ">{", "think>so", "> }")
"""Tokens that spell a tag with a neighbour, or a part of one."""
TAGS = {"tokens": ("<think>", "</think>"), "letters": ("<think>", "</think>"), "special": ("[THINK]", "[/THINK]")}
START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
CHANNELS = Thinking("<|channel|>analysis<|message|>", "<|end|>", False, lead=START + FINAL, num_led=len(START))
"""gpt-oss's, behind a prompt that ends with `START`."""


@cache
def tokenizer_of(kind: str) -> Any:
    backend = byte_level()
    backend.add_tokens([AddedToken(text, normalized=False) for text in ODD_TOKENS])
    if kind == "tokens":
        backend.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS[kind]])
    elif kind == "special":
        backend.add_special_tokens([AddedToken(tag, normalized=False) for tag in TAGS[kind]])
    elif kind == "channels":
        names = ("start", "channel", "message", "end", "call")
        backend.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in names])
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, unk_token=UNK)


@cache
def compiler_of(kind: str) -> GrammarCompiler:
    tokenizer = tokenizer_of(kind)
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))


def thinking_of(kind: str, *, is_open: bool, budget: int | None) -> Thinking:
    if kind == "channels":
        return replace(CHANNELS, is_open=is_open, budget=budget)
    return Thinking(*TAGS[kind], is_open, budget)


def constraint_of(
    kind: str, grammar: Grammar | None, *, is_open: bool = True, budget: int | None = None
) -> ThinkingConstraint:
    compiler, params, answer = compiler_of(kind), SamplingParams(1), None
    if grammar is not None:
        params, answer = compiler.compile(grammar, params)
    build = compiler.behind_thinking(thinking_of(kind, is_open=is_open, budget=budget), params, answer)
    assert build is not None
    return build()


def allowed(constraint: ThinkingConstraint, kind: str) -> list[int]:
    size = len(tokenizer_of(kind))
    return [*range(size)] if constraint.bitmask() is None else allowed_tokens(constraint, size)  # type: ignore[arg-type]


def ids_of(kind: str, text: str) -> list[int]:
    return list(tokenizer_of(kind)(text, add_special_tokens=False)["input_ids"])


def decode(kind: str, ids: list[int]) -> str:
    return str(tokenizer_of(kind).decode(ids))


def write(constraint: ThinkingConstraint, kind: str, text: str) -> None:
    """Write a text byte by byte, as the constraint must allow."""
    for letter in text:
        [token_id] = ids_of(kind, letter)
        assert token_id in allowed(constraint, kind), (text, letter)
        constraint.accept(token_id)


def draw(constraint: ThinkingConstraint, kind: str, source: random.Random, tag: str, num: int = 200) -> list[int]:
    """Random allowed tokens, those of the tag and of JSON's end more often than others."""
    eos = tokenizer_of(kind).eos_token_id
    likely = {*ids_of(kind, tag), *ids_of(kind, '"}'), *(ids_of(kind, text)[0] for text in ODD_TOKENS)}
    drawn: list[int] = []
    while not constraint.is_complete and len(drawn) < num:
        choices = allowed(constraint, kind)
        if eos in choices and source.random() < 0.3:
            break
        preferred = [token_id for token_id in choices if token_id in likely and token_id != eos]
        others = [token_id for token_id in choices if token_id != eos]
        drawn.append(source.choice(preferred if preferred and source.random() < 0.5 else others))
        constraint.accept(drawn[-1])
    return drawn


def read(text: str, thinking: Thinking, size: int, *, is_cut: bool = False) -> dict[str, Any]:
    """The message of a text that comes in pieces; those of any size give the same."""
    reader = ThinkingReader(MessageReader, thinking)
    for start in range(0, len(text), size):
        reader.feed(text[start : start + size])
    reader.finish(is_cut=is_cut)
    return reader.message()


@pytest.mark.parametrize("budget", [5, *full(None, 0)])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("kind", [*TAGS, "channels"])
def test_what_follows_thinking_is_json_of_the_schema(kind: str, is_open: bool, budget: int | None) -> None:
    thinking, num_thoughts, num_whole = thinking_of(kind, is_open=is_open, budget=budget), 0, 0
    for seed in range(15):
        constraint = constraint_of(kind, json_schema(SCHEMA), is_open=is_open, budget=budget)
        ids = draw(constraint, kind, random.Random(seed), thinking.opening if seed % 3 == 0 else thinking.closing)
        text = decode(kind, ids)
        messages = [read(text, thinking, size) for size in (1, 3, len(text) or 1)]
        assert messages[0] == messages[1] == messages[2]
        [message, *_] = messages
        num_thoughts += thinking.closing in text
        if constraint.is_complete:
            num_whole += 1
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
            assert "reasoning_content" not in message or thinking.closing not in message["reasoning_content"]
            assert thinking.lead[thinking.num_led :] in text
        elif message["content"] is not None:
            assert not message["content"] or message["content"].startswith("{")
    assert num_whole > 2
    assert num_thoughts > 2


@pytest.mark.parametrize("kind", TAGS)
def test_the_budget_closes_the_block_after_so_many_tokens(kind: str) -> None:
    opening, closing = TAGS[kind]
    closing_ids = ids_of(kind, closing)
    for grammar in (None, choice("yes")):
        for budget in (0, 1, 7):
            constraint = constraint_of(kind, grammar, budget=budget)
            write(constraint, kind, "x" * budget)
            for token_id in closing_ids:
                assert allowed(constraint, kind) == [token_id]
                constraint.accept(token_id)
            assert len(allowed(constraint, kind)) > 1
    constraint = constraint_of(kind, None, is_open=False, budget=2)
    for token_id in [*ids_of(kind, opening), *(ids_of(kind, "x") * 2)]:
        assert constraint.bitmask() is None
        constraint.accept(token_id)
    assert allowed(constraint, kind) == closing_ids[:1]


@pytest.mark.parametrize("kind", TAGS)
def test_a_model_that_may_think_opens_the_block_or_answers(kind: str) -> None:
    opening, closing = TAGS[kind]
    for text in (
        "yes",
        f"{opening}\nyes?{closing}\n\nyes",
        f"{opening}{closing}yes",
        f"{opening}{opening}{closing}yes",
    ):
        constraint = constraint_of(kind, choice("yes", "no"), is_open=False)
        for token_id in ids_of(kind, text):
            assert token_id in allowed(constraint, kind), text
            constraint.accept(token_id)
        assert constraint.is_complete, text
    start = {decode(kind, [token_id]) for token_id in allowed(constraint_of(kind, choice("yes"), is_open=False), kind)}
    assert {text for text in start if not opening.startswith(text)} <= {"y", "ye", "yes"}


def test_an_answer_that_begins_like_the_tag_is_told_from_it() -> None:
    for text in ("<b>", "<think", "<thing>"):
        constraint = constraint_of("letters", regex("<[a-z]*>?"), is_open=False)
        write(constraint, "letters", text)
        assert not constraint.is_complete or text.endswith(">")
    constraint = constraint_of("letters", regex("<[a-z]{1,5}"), is_open=False)
    write(constraint, "letters", "<think>so</think>\n<thin")
    assert tokenizer_of("letters").eos_token_id in allowed(constraint, "letters")


@pytest.mark.parametrize("kind", TAGS)
def test_thinking_is_free_but_for_its_end(kind: str) -> None:
    tokenizer, closing = tokenizer_of(kind), TAGS[kind][1]
    constraint = constraint_of(kind, json_schema(SCHEMA))
    banned = {decode(kind, [token_id]) for token_id in range(len(tokenizer))} - {
        decode(kind, [token_id]) for token_id in allowed(constraint, kind)
    }
    assert banned == {EOS, "</think>{"} - (set() if "think" in closing else {"</think>{"})
    for _ in range(3000):
        constraint.accept(ids_of(kind, "x")[0])
    constraint.accept(ids_of(kind, "<")[0])
    if kind == "letters":
        write(constraint, kind, "/think")
        last = {decode(kind, [token_id]) for token_id in allowed(constraint, kind)}
        assert ">" in last
        assert ">\n" in last
        assert not last & {">{", "> }"}


def test_a_few_tokens_of_white_space_may_come_behind_the_tag() -> None:
    constraint = constraint_of("tokens", choice("yes"))
    write(constraint, "tokens", "")
    constraint.accept(ids_of("tokens", "</think>")[0])
    write(constraint, "tokens", "\n" * MAX_SPACES)
    assert {decode("tokens", [token_id]) for token_id in allowed(constraint, "tokens")} <= {"y", "ye", "yes"}


def test_a_lead_is_written_in_front_of_the_answer() -> None:
    kind = "channels"
    [channel, *_], lead = ids_of(kind, "<|channel|>"), ids_of(kind, START + FINAL)
    for text in ("<|channel|>analysis<|message|>yes<|end|>", "<|channel|>analysis<|message|><|channel|><|end|>"):
        constraint = constraint_of(kind, choice("yes"), is_open=False)
        start = {decode(kind, [token_id]) for token_id in allowed(constraint, kind)}
        assert "<|channel|>" in start
        assert all("<|channel|>".startswith(other) for other in start)
        for token_id in ids_of(kind, text):
            assert token_id in allowed(constraint, kind)
            constraint.accept(token_id)
        for token_id in lead:
            assert allowed(constraint, kind) == [token_id]
            assert not constraint.is_complete
            constraint.accept(token_id)
        for token_id in ids_of(kind, "\nyes"):
            assert token_id in allowed(constraint, kind)
            constraint.accept(token_id)
        assert constraint.is_complete
    constraint = constraint_of(kind, choice("yes"), is_open=False, budget=0)
    constraint.accept(channel)
    names = {decode(kind, [token_id]) for token_id in allowed(constraint, kind)}
    assert {name[0] for name in names} == {"a", "f"}
    for token_id in ids_of(kind, "final<|message|>yes"):
        assert token_id in allowed(constraint, kind)
        constraint.accept(token_id)
    assert constraint.is_complete


def test_without_a_grammar_any_channel_follows_thinking() -> None:
    constraint = constraint_of("channels", None, is_open=False, budget=1)
    for token_id in ids_of("channels", "<|channel|>analysis<|message|>x<|end|><|start|>"):
        assert token_id in allowed(constraint, "channels")
        constraint.accept(token_id)
    assert constraint.bitmask() is None


def test_without_a_grammar_thinking_may_end_the_sequence() -> None:
    constraint = constraint_of("tokens", None, budget=5)
    assert constraint.bitmask() is None
    constraint.accept(tokenizer_of("tokens").eos_token_id)
    assert not constraint.is_complete


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", {"content": ""}),
        ("Hm", {"content": None, "reasoning_content": "Hm"}),
        (" Hm.\n</thi", {"content": None, "reasoning_content": "Hm.\n</thi"}),
        ("Hm </b> so\n</think>\n\n", {"content": None, "reasoning_content": "Hm </b> so"}),
        ("</think>{}", {"content": "{}"}),
        (
            'Hm</think>\n\n{"a": "<think>b</think>"} ',
            {"content": '{"a": "<think>b</think>"} ', "reasoning_content": "Hm"},
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_text_that_is_cut_anywhere_keeps_both_parts(text: str, message: dict[str, Any], size: int) -> None:
    assert read(text, Thinking("<think>", "</think>", True), size) == {"role": "assistant", **message}


THOUGHT = CHANNELS.opening + " Hm <|x\n" + CHANNELS.closing
CHANNELED = {"role": "assistant", "content": "{}", "reasoning_content": "Hm <|x"}
CUT: list[tuple[Thinking, str, dict[str, Any]]] = [
    (CHANNELS, f"{THOUGHT}{CHANNELS.lead}{{}}", CHANNELED),
    (CHANNELS, f"{THOUGHT}\n{CHANNELS.lead} {{}}", CHANNELED),
    (CHANNELS, f"{FINAL}{{}}", {"role": "assistant", "content": "{}"}),
    (CHANNELS, f"{FINAL}{CHANNELS.lead}", {"role": "assistant", "content": CHANNELS.lead}),
    (Thinking("<think>", "</think>", False), "<think>\nHm <|x\n</think>\n\n{}", CHANNELED),
    (Thinking("<think>", "</think>", True), "\nHm <|x</think>{}", CHANNELED),
]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(("thinking", "text", "whole"), CUT)
def test_a_text_that_is_cut_shows_no_part_of_a_tag(
    thinking: Thinking, text: str, whole: dict[str, Any], size: int
) -> None:
    assert read(text, thinking, size) == whole
    for end in range(len(text) + 1):
        made = read(text[:end], thinking, size, is_cut=True)
        for name in ("content", "reasoning_content"):
            assert whole.get(name, "").startswith(made.get(name) or ""), text[:end]


@pytest.mark.parametrize("text", ["{}", " {}", "<b", "<thi", "<b>\n</think>"])
@pytest.mark.parametrize("size", [1, 100])
def test_an_answer_without_thinking_is_content_as_it_is(text: str, size: int) -> None:
    assert read(text, Thinking("<think>", "</think>", False), size) == {"role": "assistant", "content": text}
