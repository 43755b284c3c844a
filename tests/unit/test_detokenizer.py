# SPDX-License-Identifier: Apache-2.0
"""Text token by token: joined, it is the text at once, and it ends in front of the first stop string."""

import json
import random
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer, CTRLTokenizer

from hf_triton.tasks.text_generation.detokenizer import up_to_stop
from hf_triton.tasks.text_generation.text_codec import TextCodec
from tests.support.tokenizers import KINDS, TEXTS, WITH_BYTES, bytes_of, codec_of, raw_ids, tokenizer_of

NUM_CASES = 300
CTRL_WORDS = ["the", "ri@@", "ver", "go@@", "es", "to", "sea", "a@@", "b"]


def byt5(folder: Path) -> Any:
    """A slow one: every byte is a token, and bytes that are no character are left out."""
    build: Any = ByT5Tokenizer
    return build()


def ctrl(folder: Path) -> Any:
    """A slow one that takes back what it wrote: `ri@@` and `ver` are `river`."""
    words = {word: place for place, word in enumerate(["<unk>", *CTRL_WORDS])}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n\n")
    build: Any = CTRLTokenizer
    return build(str(folder / "vocab.json"), str(folder / "merges.txt"))


SLOW: dict[str, Callable[[Path], Any]] = {each.__name__: each for each in (byt5, ctrl)}


@pytest.fixture(scope="module")
def make_codec(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextCodec]:
    @cache
    def make(kind: str) -> TextCodec:
        if kind in KINDS:
            return codec_of(kind)
        tokenizer = SLOW[kind](tmp_path_factory.mktemp(kind))
        return TextCodec(tokenizer, len(tokenizer))

    return make


def random_case(codec: TextCodec, source: random.Random) -> tuple[list[int], list[int]]:
    """A prompt, and what a model wrote behind it: any tokens, tokens of a real text, or the two together."""
    vocabulary_size = codec.vocabulary_size
    prompt_ids = codec._tokenizer(source.choice(TEXTS), add_special_tokens=False)["input_ids"]
    noise = [source.randrange(vocabulary_size) for _ in range(source.randint(0, 20))]
    text = codec._tokenizer("".join(source.sample(TEXTS, 2)), add_special_tokens=False)["input_ids"]
    text = text[: source.randint(0, len(text))]
    return source.choice([[], prompt_ids]), source.choice([noise, text, noise + text, text + noise])


def streamed(codec: TextCodec, prompt_ids: list[int], token_ids: list[int], stops: tuple[str, ...] = ()) -> str:
    stream = codec.stream(prompt_ids, stops)
    return "".join([stream.push(token_id) for token_id in token_ids]) + stream.finish()


@pytest.mark.parametrize("kind", [*KINDS, *SLOW])
def test_joined_deltas_are_the_text(kind: str, make_codec: Callable[[str], TextCodec]) -> None:
    codec, source = make_codec(kind), random.Random(0)
    for _ in range(NUM_CASES):
        prompt_ids, token_ids = random_case(codec, source)
        assert streamed(codec, prompt_ids, token_ids) == codec.continuation(prompt_ids, token_ids), token_ids


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_joined_deltas_are_the_text_of_random_tokens(kind: str) -> None:
    codec, source = codec_of(kind), random.Random(3)
    some = [token_id for character in "é€😀語\ufffd" for token_id in bytes_of(kind, character)]
    for _ in range(10 * NUM_CASES):
        ids = [source.choice(some) for _ in range(source.randint(1, 12))]
        place = source.randint(0, len(ids))
        prompt_ids, token_ids = ids[:place], ids[place:]
        assert streamed(codec, prompt_ids, token_ids) == codec.continuation(prompt_ids, token_ids), ids


@pytest.mark.parametrize("kind", [*KINDS, *SLOW])
def test_the_text_of_complete_characters_is_the_tokenizer_s(kind: str, make_codec: Callable[[str], TextCodec]) -> None:
    codec, source, num_compared = make_codec(kind), random.Random(1), 0
    for _ in range(NUM_CASES):
        prompt_ids, token_ids = random_case(codec, source)
        before, whole = codec.decode(prompt_ids), codec.decode(prompt_ids + token_ids)
        if "\ufffd" not in whole and whole.startswith(before):
            assert streamed(codec, prompt_ids, token_ids) == whole[len(before) :]
            num_compared += 1
    assert num_compared > NUM_CASES / 20


@pytest.mark.parametrize("kind", [*KINDS, *SLOW])
def test_a_text_ends_before_its_stop_string_across_tokens(kind: str, make_codec: Callable[[str], TextCodec]) -> None:
    codec, source, num_stopped = make_codec(kind), random.Random(2), 0
    for _ in range(NUM_CASES):
        prompt_ids, token_ids = random_case(codec, source)
        text = codec.continuation(prompt_ids, token_ids)
        stops = tuple({pick_stop(text, source) for _ in range(source.randint(1, 4))})
        expected = text[: min([place for stop in stops if (place := text.find(stop)) >= 0], default=len(text))]
        assert streamed(codec, prompt_ids, token_ids, stops) == expected
        before, stop = up_to_stop(text, stops, includes_stop=False)
        assert before == expected
        assert (stop in stops and text.startswith(before + stop)) if expected != text else not stop
        num_stopped += expected != text
    assert num_stopped > NUM_CASES / 5


def pick_stop(text: str, source: random.Random) -> str:
    """A piece of the text, perhaps with another end, so that it begins like the text and then is not in it."""
    start = source.randrange(max(1, len(text)))
    piece = text[start : start + source.randint(1, 6)]
    return source.choice([piece or "x", piece + "~", piece + "x"])


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcd", ("c", "bcd"), "a"),  # `c` is complete first, `bcd` begins first
        ("abce", ("c", "bcd"), "ab"),
        ("abc", ("c", "bcd"), "ab"),  # and never gets complete
        ("aab", ("ab",), "a"),
        ("abab", ("abac",), "abab"),
        ("ab", ("a", "ab"), ""),
        ("xyz", (), "xyz"),
    ],
)
def test_the_match_that_begins_first_wins(text: str, stops: tuple[str, ...], expected: str) -> None:
    codec = codec_of("byte_level")
    letters = [token_id for letter in text for token_id in raw_ids("byte_level", letter)]
    assert streamed(codec, [], letters, stops) == expected
    assert up_to_stop(codec.continuation([], letters), stops, includes_stop=False)[0] == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcd", ("c", "bcd"), "abcd"),
        ("abce", ("c", "bcd"), "abc"),
        ("abc", ("c", "bcd"), "abc"),
        ("abcd", ("bc", "bcd"), "abc"),
        ("abcd", ("abcde",), "abcd"),
    ],
)
def test_a_text_may_end_with_its_stop_string(text: str, stops: tuple[str, ...], expected: str) -> None:
    codec = codec_of("byte_level")
    letters = [token_id for letter in text for token_id in raw_ids("byte_level", letter)]
    stream = codec.stream([], stops, includes_stop=True)
    assert "".join([stream.push(token_id) for token_id in letters]) + stream.finish() == expected
    found = up_to_stop(codec.continuation([], letters), stops, includes_stop=True)
    assert found == (expected, stream.stop_string)


def test_text_is_returned_as_soon_as_it_is_complete() -> None:
    codec = codec_of("byte_level")
    stream = codec.stream([], ("stop",))
    pieces = [stream.push(token_id) for letter in "a sto stopping" for token_id in raw_ids("byte_level", letter)]
    assert pieces == ["a", " ", "", "", "", "sto ", *[""] * 8]
    assert stream.is_stopped
    assert stream.finish() == ""


def test_a_stop_string_that_only_the_end_decides_is_found_at_the_end() -> None:
    stream = codec_of("byte_level").stream([], ("c", "bcd"))
    [token_id] = raw_ids("byte_level", "b")
    assert stream.push(token_id) == ""
    [token_id] = raw_ids("byte_level", "c")
    assert (stream.push(token_id), stream.is_stopped) == ("", False)
    assert (stream.finish(), stream.is_stopped) == ("b", True)


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_character_is_returned_with_its_last_byte(kind: str) -> None:
    codec = codec_of(kind)
    stream = codec.stream(codec.encode("The 世"))
    for character in "🦜é":
        *begun, last = [stream.push(token_id) for token_id in bytes_of(kind, character)]
        assert ("".join(begun), last) == ("", character)
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_cut_character_is_one_replacement_character(kind: str) -> None:
    codec = codec_of(kind)
    token_ids = [*bytes_of(kind, "の")[:2], *bytes_of(kind, "ん"), *bytes_of(kind, "🦜")[:-1]]
    for prompt in ("The", "世"):
        assert streamed(codec, codec.encode(prompt), token_ids) == "\ufffdん\ufffd"
        assert codec.continuation(codec.encode(prompt), token_ids) == "\ufffdん\ufffd"


def test_a_stop_string_of_several_bytes_is_found() -> None:
    for kind in WITH_BYTES:
        codec = codec_of(kind)
        assert streamed(codec, [], bytes_of(kind, "好🦜好"), ("🦜",)) == "好"


def test_tokens_that_are_no_text_change_nothing() -> None:
    for kind in KINDS:
        codec = codec_of(kind)
        prompt_ids, token_ids = codec.encode("The river"), raw_ids(kind, " goes")
        beyond = len(tokenizer_of(kind))
        padded = TextCodec(tokenizer_of(kind), beyond + 8)  # an embedding with more rows than the tokenizer has tokens
        noisy_ids = [token_id for each in token_ids for token_id in [0, 1, beyond, beyond + 7, each] * 3]
        assert streamed(padded, [*prompt_ids, 1], noisy_ids) == streamed(
            codec, prompt_ids, [each for each in token_ids for _ in range(3)]
        )


def test_streams_hold_little_beside_their_stop_strings() -> None:
    codec, stops = codec_of("byte_level"), tuple(f"{number:x}" * 1000 for number in range(16))
    tracemalloc.start()
    try:
        streams = [codec.stream([], stops) for _ in range(64)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_000_000
    [token_id] = raw_ids("byte_level", "a")
    assert [stream.push(token_id) for stream in streams] == [""] * 64


def test_the_cost_of_a_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in WITH_BYTES:
        codec = codec_of(kind)
        longest = 0

        def decode(ids: list[int], decode: Callable[[list[int]], str] = codec.decode) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids)

        monkeypatch.setattr(codec, "decode", decode)
        never_whole = bytes_of(kind, "の")
        streamed(codec, [], [*never_whole[:2], *(never_whole[2:] + never_whole[:2]) * 200])
        assert longest <= 5
