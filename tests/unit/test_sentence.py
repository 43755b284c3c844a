# SPDX-License-Identifier: Apache-2.0
"""Sentences in a client's names: marks are replaced, and never a word of a value."""

import ast
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from hf_triton.errors import RequestError, clip, read_error_data
from hf_triton.protocol.request_options import PARAMETERS
from hf_triton.sentence import param, plain, remedy, renamed, row, text
from hf_triton_gateway.http.client_names import ClientNames

ROOMS = ("protocol", "tasks", "engine", "encoder", "grammar", "triton_backend")
MAKERS = ("RequestError", "ValueError", "rejection", "_refusal", "Problem")
NAMES = ClientNames({"max_new_tokens": "max_tokens", "stop_strings": "stop", "prompt": "input"}, ["max_tokens", "stop"])


def test_only_what_is_marked_is_renamed() -> None:
    sentence = f"{param('max_new_tokens')} beside max_new_tokens, got {clip('stop_strings prompt')}"
    assert text(sentence, NAMES) == "max_tokens beside max_new_tokens, got 'stop_strings prompt'"
    assert text(sentence) == "max_new_tokens beside max_new_tokens, got 'stop_strings prompt'"


@pytest.mark.parametrize(
    "value", [param("stop_strings"), [remedy("x")], {row(3): param("a")}, "\ufdd0stop_strings\ufdd1"]
)
def test_marks_in_a_value_are_no_marks(value: Any) -> None:
    for shown in (clip(value, 200), plain(str(value))):
        assert text(f"got {shown}", NAMES) == f"got {shown}"


def test_a_remedy_is_for_clients_that_can_follow_it() -> None:
    sentence = "too long" + remedy(f", or set {param('truncate_prompt_tokens')}")
    assert text(sentence) == "too long, or set truncate_prompt_tokens"
    assert text(sentence, NAMES) == "too long"
    assert text(sentence, ClientNames(fields=["truncate_prompt_tokens"])) == text(sentence)
    assert text(sentence, ClientNames({"truncate_prompt_tokens": None})) == "too long"


def test_what_a_client_cannot_send_is_the_folders() -> None:
    assert text(f"{param('guided_json')} is wrong", NAMES) == "the folder's guided_json is wrong"
    assert NAMES.param("guided_json") is None


def test_rows_are_counted_as_the_client_counts() -> None:
    sentence = f"{param('text')}{row(1)} is empty; so is this{row(1, ' (row {})')}"
    assert text(sentence) == "text row 1 is empty; so is this (row 1)"
    assert text(sentence, ClientNames(rows=[7, 9])) == "text row 9 is empty; so is this (row 9)"
    assert text(sentence, ClientNames(rows=())) == "text is empty; so is this"


def test_places_are_those_of_the_clients_list() -> None:
    names = ClientNames({"messages": "input"}, ["input", "instructions"], {"messages": ["instructions", "input[4]"]})
    assert names.of("messages[1].content") == "input[4].content"
    assert names.of("messages[0]") == "instructions"
    assert names.of("messages[2].role") == "input.role"
    assert names.param("messages[1].role") == "input[4].role"
    tools = ClientNames(places={"tools": []})
    assert tools.of("tools[3].function.name") == "tools[3].name"


def test_names_of_names_are_open_within_remedies_too() -> None:
    sentence = renamed(f"{param('a')}{remedy(param('a'))}", lambda name: f"{name}.b")
    assert text(sentence) == "a.ba.b"


def test_an_error_survives_json() -> None:
    words = ["stop", " ", param("max_new_tokens"), remedy(f"x{param('stop_strings')}"), row(3), "\u2028é\n", clip("é")]
    for seed in range(100):
        sentence = "".join(random.Random(seed).choices(words, k=8))
        error = RequestError("invalid_parameter", sentence, field="messages[2]", sizes={"tokens": seed})
        assert read_error_data(error.to_json()) == (sentence, "messages[2]", {"tokens": seed})


@pytest.mark.parametrize(
    "sentence",
    [
        "",
        "a plain one",
        "{",
        '{"sentence": 3}',
        '{"sentence": "x"}',
        "[1]",
        '"x"',
        "[" * 10_000,
        "null",
        json.dumps({}),
    ],
)
def test_what_is_no_data_is_a_plain_sentence(sentence: str) -> None:
    assert read_error_data(sentence) == (sentence, None, {})


def _constants(node: ast.AST) -> list[str]:
    """The literal text of an expression, without what stands in calls within it."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    return [] if isinstance(node, ast.Call) else [s for child in ast.iter_child_nodes(node) for s in _constants(child)]


def test_no_sentence_has_a_name_that_is_not_open() -> None:
    root = Path(__file__).parents[2] / "hf_triton"
    names = {name for name in PARAMETERS if "_" in name}
    for path in (path for room in ROOMS for path in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                words = " ".join(text for argument in node.args for text in _constants(argument))
                assert not names & set(re.findall(r"[a-z_]+", words)), (path.name, node.lineno, words)
