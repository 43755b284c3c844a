# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 (DeepSeek's own vertical lines)
"""Calls in free text: whatever a model writes, each call that is read from it is one of the tools, by its schema."""

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.grammar.free_calls import CallsConstraint
from hf_triton.protocol.chat_request import Chat, parse_chat
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint
from hf_triton.tasks.text_generation.response_template import MessageFormat, shipped_template
from tests.support.grammars import allowed_tokens
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
SCHEMAS: dict[str, Any] = {tool["name"]: tool["parameters"] for tool in TOOLS}
OPENINGS: dict[str, Sequence[str]] = {
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
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
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


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", OPENINGS)
def test_a_call_that_a_model_opens_is_one_of_the_tools(name: str, is_special: bool) -> None:
    num_ended, _ = sweep(name, 8 * len(OPENINGS[name]), is_special=is_special)
    assert num_ended > 0
