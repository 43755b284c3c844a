# SPDX-License-Identifier: Apache-2.0
"""Prompts with image files, through processor, engine and tokenizer: what `generate` gives, in every family."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hf_triton.engine.protocols import Observer
from hf_triton.runner import device, model_runner
from hf_triton.runner.device import ChunkSizes
from tests.support.image_checkpoints import ALL, FAMILIES, build_seeing_checkpoint
from tests.support.image_reference import ImageReference, load_image_reference
from tests.support.image_serving import Served, rows_of
from tests.support.images import encoded, made_image

BLOCK = 16
CHUNKS = ChunkSizes(24, 12)
SIZES = [(56, 40), (33, 60), (28, 28)]
FILES = [encoded(made_image(*SIZES[seed % 3], seed)) for seed in range(6)]
"""The first and the fourth are of one size, and so on."""
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "maximum": 9}},
    "required": ["legs"],
    "additionalProperties": False,
}
LIKELIEST: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 1}
"""Draws what greedy decoding takes, of which several sequences are refused."""
LONG = "The river goes to the mill and then to the sea. "


QUICK = ("llava", "gemma3", "qwen3-vl")


def turn(*parts: str | None, role: str = "user") -> dict[str, Any]:
    """A message; None stands for an image."""
    kinds = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": kinds}


def ids_of(row: Any) -> list[int]:
    ids: list[int] = json.loads(row.token_ids)
    return ids


PROMPTS = [
    ([turn(None, "Who?")], [0]),
    ([turn(None, "Who?")], [3]),
    ([turn("What is ", None, " and ", None, "?")], [0, 1]),
    ([turn("Only text.")], []),
    ([turn(LONG * 3, None)], [2]),
    ([turn(None, None, None)], [3, 1, 2]),
    ([turn(None, "Who?"), turn("They.", role="assistant"), turn("And ", None, "?")], [0, 4]),
    ([turn(None, "Who are they?")], [0]),
]
"""Chats, and the numbers of their files."""


class Eyes(Observer):
    def __init__(self) -> None:
        self.num_towers = 0

    def on_image(self, num_tokens: int, tower_s: float) -> None:
        self.num_towers += 1


@dataclass
class Family:
    name: str
    folder: Path
    reference: ImageReference
    served: Served
    eyes: Eyes

    def expected(self, number: int, max_new_tokens: int) -> list[int]:
        chat, files = PROMPTS[number]
        return self.reference.ids(chat, [FILES[file] for file in files], max_new_tokens)

    def start(self, number: int, **asked: Any) -> Any:
        chat, files = PROMPTS[number]
        return self.served.start(chat, [FILES[file] for file in files], **asked)


in_some = pytest.mark.parametrize(
    "family",
    [
        name if name.values[0] in QUICK else pytest.param(*name.values, marks=[*name.marks, pytest.mark.full])
        for name in ALL
    ],
    indirect=True,
)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """A tiny model whose prompts are cut into small chunks, in a cache that holds few of them."""
    folder = build_seeing_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)
    eyes = Eyes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.CHUNK_SIZES, "cpu", CHUNKS)
        patch.setattr(model_runner, "CPU_BLOCK_SIZE", BLOCK)
        most = 448 if request.param == "gemma4" else 256
        served = Served(folder, eyes, max_num_seqs=8, max_cache_tokens=most)
    yield Family(request.param, folder, load_image_reference(folder), served, eyes)
    served.close()


@in_some
def test_company_chunks_and_a_small_cache_change_nothing(family: Family) -> None:
    assert family.served.engine.name == family.served.engine.images == "continuous"
    expected = [family.expected(number, 12) for number in range(len(PROMPTS))]
    assert len({tuple(ids) for ids in expected}) > len(PROMPTS) / 2
    order = [number for number in range(len(PROMPTS)) for _ in range(2)]
    random.Random(0).shuffle(order)
    lengths = [random.Random(turn).choice([12, 12, 7, 1]) for turn in range(len(order))]
    replies = [family.start(number, max_new_tokens=length) for number, length in zip(order, lengths, strict=True)]
    got = [ids_of(rows_of(reply)[0]) for reply in replies]
    assert got == [expected[number][:length] for number, length in zip(order, lengths, strict=True)]


@in_some
def test_an_image_asked_again_is_neither_seen_nor_computed_again(family: Family) -> None:
    first = rows_of(family.start(6))[0]
    before = family.eyes.num_towers
    again = rows_of(family.start(6))[0]
    assert ids_of(again) == ids_of(first) == family.expected(6, 12)
    assert again.num_cached_tokens >= 2 * BLOCK
    chat, _ = PROMPTS[6]
    changed = [encoded(made_image(*SIZES[0], 9)), FILES[4]]  # the first one by another of its size
    other = family.served.ask(chat, changed)
    assert ids_of(other) == family.reference.ids(chat, changed, 12)
    assert other.num_cached_tokens <= BLOCK
    assert family.eyes.num_towers - before <= 3


@in_some
def test_streams_and_several_sequences_are_those_of_generate(family: Family) -> None:
    expected = family.expected(2, 12)
    reply = family.start(2, streams=True, num_return_sequences=2, **LIKELIEST)
    rows_of(reply)
    decoded = family.reference.processor.tokenizer.decode(expected, skip_special_tokens=True)
    for row in range(2):
        text = "".join(piece for index, piece in reply.pieces if index == row)
        assert text.rstrip("\ufffd") == decoded.rstrip("\ufffd")  # no part of a character ends a stream
    assert [ids_of(row) for row in rows_of(family.start(2, num_return_sequences=2, **LIKELIEST))] == [expected] * 2


@in_some
def test_tools_and_schemas_go_with_images(family: Family) -> None:
    chat, files = PROMPTS[2]
    images = [FILES[file] for file in files]
    expected = family.reference.ids(chat, images, template={"tools": [TOOL]})
    assert ids_of(family.served.ask(chat, images, tools=[TOOL])) == expected
    constrained = [
        family.start(
            number,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            max_new_tokens=60,
        )
        for number in (2, 0, 2)
    ]
    texts = [rows_of(reply)[0].text_output for reply in constrained]
    assert texts[0] == texts[2]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@in_some
def test_a_text_prompt_has_its_placeholder_for_each_image(family: Family) -> None:
    placeholder = FAMILIES[family.name].part
    prompt = f"one {placeholder} two {placeholder} three"
    expected = family.reference.ids(prompt, FILES[:2])
    assert ids_of(family.served.ask(prompt, FILES[:2])) == expected
