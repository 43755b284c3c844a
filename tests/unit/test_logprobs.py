# SPDX-License-Identifier: Apache-2.0
"""Log probabilities in OpenAI's forms: tokens that are parts of a character, offsets, and what each list has."""

import json
from typing import Any

import pytest

from hf_triton.tasks.text_generation.outputs import _described
from hf_triton_gateway.chat.openai_logprobs import TextOffsets, chat_positions, completion_logprobs
from tests.support.tokenizers import KINDS, codec_of, raw_ids

TEXT = "a 😀 é नि b😀"
WITHOUT_GAPS = ("byte_level", "byte_fallback")
"""Tokenizers that have every character."""


def positions_of(kind: str, ids: list[int]) -> list[dict[str, Any]]:
    return [{str(token_id): {"logprob": -1.0, "rank": 1, **_described(codec_of(kind), token_id)}} for token_id in ids]


def text_of(kind: str, ids: list[int]) -> str:
    return codec_of(kind).continuation([], ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("echo", [True, False])
def test_offsets_stay_in_step_with_the_text(kind: str, echo: bool) -> None:
    ids = raw_ids(kind, TEXT)
    text, positions = text_of(kind, ids), list[Any](positions_of(kind, ids))
    if echo:
        positions[0] = None
    whole = completion_logprobs(positions, text)
    assert whole["text_offset"][0] == 0
    for token, start, end in zip(
        whole["tokens"], whole["text_offset"], [*whole["text_offset"][1:], len(text)], strict=True
    ):
        assert text[start:end] == token or "\ufffd" in token
    pieces = TextOffsets()
    streamed = [offset for each in positions for offset in completion_logprobs([each], text, pieces)["text_offset"]]
    assert echo or streamed == whole["text_offset"]


@pytest.mark.parametrize("kind", WITHOUT_GAPS)
def test_bytes_of_parts_join_to_the_text(kind: str) -> None:
    ids = raw_ids(kind, TEXT)
    tokens = chat_positions(positions_of(kind, ids))["content"]
    assert any("\ufffd" in token["token"] for token in tokens)
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode().lstrip() == TEXT
    assert [token["bytes"] for token in tokens] == [token["top_logprobs"][0]["bytes"] for token in tokens]


@pytest.mark.parametrize("kind", WITHOUT_GAPS)
@pytest.mark.parametrize("num_cut", [0, 3])
def test_the_first_token_of_a_prompt_is_what_the_others_leave(kind: str, num_cut: int) -> None:
    ids = raw_ids(kind, TEXT + " and more")
    text = text_of(kind, ids)
    logprobs = completion_logprobs([None, *positions_of(kind, ids[1:])], text[: len(text) - num_cut])
    assert logprobs["tokens"][0] == text_of(kind, ids[:1])
    ids = raw_ids("byte_level", "😀 a")
    logprobs = completion_logprobs([None, *positions_of("byte_level", ids[1:])], "😀 a")
    assert logprobs["text_offset"] == [0] * (len(ids) - 2) + [1, 2]


@pytest.mark.parametrize("kind", WITHOUT_GAPS)
@pytest.mark.parametrize("num_cut", [1, 2, 3])
def test_a_character_that_is_cut_off_leaves_the_first_token_as_it_is(kind: str, num_cut: int) -> None:
    for begin in ("a cat ", "é a cat "):
        whole = raw_ids(kind, begin + "😀")
        ids = whole[: len(whole) - num_cut]
        logprobs = completion_logprobs([None, *positions_of(kind, ids[1:])], text_of(kind, ids))
        first = completion_logprobs([None, *positions_of(kind, whole[1:])], text_of(kind, whole))
        assert logprobs["tokens"] == first["tokens"][: len(ids)]
        assert logprobs["text_offset"] == first["text_offset"][: len(ids)]


def test_alternatives_with_one_text_are_all_listed() -> None:
    part = {"decoded_token": "\ufffd", "rank": 1, "logprob": -0.5, "bytes": [0xF0]}
    own = {**part, "rank": None, "logprob": -9.0, "bytes": [0x9F]}
    silent = [{"decoded_token": "", "rank": rank, "logprob": -float(rank)} for rank in (2, 3)]
    position = {"1": own, "2": part, "3": silent[0], "4": silent[1]}
    logprobs = completion_logprobs([position], "\ufffd")
    assert logprobs["top_logprobs"] == [{"\ufffd": -9.0, "bytes:\\xf0": -0.5, "": -2.0, "token_id:4": -3.0}]
    assert logprobs["token_logprobs"] == [-9.0]
    [token] = chat_positions([position])["content"]
    assert [each["logprob"] for each in token["top_logprobs"]] == [-0.5, -2.0, -3.0]
    assert (token["bytes"], token["top_logprobs"][0]["bytes"]) == ([0x9F], [0xF0])
    assert json.dumps(token)
