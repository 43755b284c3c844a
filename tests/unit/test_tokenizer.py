# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: the prompt's bytes stay, and the continuation is what the tokens add to them."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hf_triton.errors import RequestError
from hf_triton.tasks.text_generation.text_codec import TextCodec
from tests.support.tokenizers import (
    BOS,
    BYTES,
    CORPUS,
    EOS,
    KINDS,
    SPECIAL,
    TEXTS,
    UNK,
    WITH_BYTES,
    byte_level,
    bytes_of,
    codec_of,
    raw_ids,
    tokenizer_of,
)

DROPS_SPACE = ["byte_fallback", "unigram", "metaspace"]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_continuation_read_as_one_text(kind: str) -> None:
    """For random tokens behind every prompt, up to half-written characters, which have a test of their own."""
    codec, tokenizer, source = codec_of(kind), tokenizer_of(kind), random.Random(0)
    plain = [
        token
        for token in range(len(SPECIAL), len(tokenizer))
        if "\ufffd" not in tokenizer.decode([token]) and tokenizer.convert_ids_to_tokens(token) not in BYTES
    ]
    for text in TEXTS * 5:
        prompt_ids = codec.encode(text)
        new_ids = [source.choice(plain) for _ in range(source.randint(1, 12))]
        before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
        whole = tokenizer.decode(prompt_ids + new_ids, skip_special_tokens=True)
        assert before + codec.continuation(prompt_ids, new_ids) == whole


@pytest.mark.parametrize("kind", DROPS_SPACE)
def test_the_space_between_prompt_and_continuation_is_kept(kind: str) -> None:
    codec = codec_of(kind)
    new_ids = raw_ids(kind, "the sea")
    assert codec.continuation([], new_ids) == "the sea"
    assert codec.continuation(codec.encode("It goes to"), new_ids) == " the sea"


@pytest.mark.parametrize("kind", DROPS_SPACE)
def test_after_an_empty_prompt_the_text_begins_without_a_space(kind: str) -> None:
    codec = codec_of(kind)
    assert codec.continuation(codec.encode(""), raw_ids(kind, "the sea")) == "the sea"


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_add_no_text(kind: str) -> None:
    codec = codec_of(kind)
    assert [codec.continuation(codec.encode(text), []) for text in TEXTS] == [""] * len(TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_not_text(kind: str) -> None:
    codec = codec_of(kind)
    prompt_ids = codec.encode("The river")
    new_ids = raw_ids(kind, " goes")
    assert codec.continuation(prompt_ids, [0, *new_ids, 1]) == codec.continuation(prompt_ids, new_ids)
    assert codec.continuation([], [0, *new_ids, 1]) == codec.continuation([], new_ids)


@pytest.mark.parametrize("prompt", ["The river", "世", "🙂", "", "ends in a space "], ids=ascii)
@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_cut_character_does_not_affect_the_text_before_it(kind: str, prompt: str) -> None:
    codec = codec_of(kind)
    prompt_ids = codec.encode(prompt)
    written, cut = raw_ids(kind, " a b"), bytes_of(kind, "🦜")[:-1]
    text = codec.continuation(prompt_ids, written + cut)
    assert text.rstrip("\ufffd") == codec.continuation(prompt_ids, written)
    assert text.endswith("\ufffd")


@pytest.mark.parametrize("prompt", ["The river", "世", "🙂"], ids=ascii)
@pytest.mark.parametrize("kind", WITH_BYTES)
def test_characters_right_after_the_prompt_are_decoded(kind: str, prompt: str) -> None:
    codec = codec_of(kind)
    prompt_ids, emoji = codec.encode(prompt), bytes_of(kind, "🦜")
    assert codec.continuation(prompt_ids, emoji) == "🦜"
    assert set(codec.continuation(prompt_ids, emoji[:-1])) == {"\ufffd"}


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_complete_character_survives_a_cut_one_after_it(kind: str) -> None:
    codec = codec_of(kind)
    for prompt in ("The river", "世"):
        text = codec.continuation(codec.encode(prompt), bytes_of(kind, "好🦜")[:-1])
        assert text.rstrip("\ufffd") == "好"


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_prompt_comes_back_byte_for_byte(kind: str, text: str) -> None:
    codec = codec_of(kind)
    assert codec.continuation([], codec.encode(text)) == text


@pytest.mark.parametrize(
    ("bos", "eos", "expected"), [(BOS, EOS, [0]), (None, EOS, [1]), (BOS, None, [0])], ids=["both", "eos", "bos"]
)
def test_an_empty_prompt_begins_with_bos_else_eos(bos: str | None, eos: str | None, expected: list[int]) -> None:
    build: Any = PreTrainedTokenizerFast
    tokenizer = build(tokenizer_object=byte_level(), bos_token=bos, eos_token=eos)
    assert TextCodec(tokenizer, 400).encode("") == expected


def test_an_empty_prompt_is_refused_where_there_is_nothing_to_begin_with() -> None:
    build: Any = PreTrainedTokenizerFast
    codec = TextCodec(build(tokenizer_object=byte_level()), 400)
    with pytest.raises(RequestError, match="text_input row 7 is empty"):
        codec.encode("", "text_input row 7")


def test_a_token_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(RequestError, match=r"row 3 holds token .* and the model knows 3 tokens"):
        TextCodec(tokenizer_of("byte_level"), 3).encode("words", "text_input row 3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds_special_tokens", [True, False])
def test_prompts_and_texts_are_read_as_by_the_tokenizer_itself(kind: str, adds_special_tokens: bool) -> None:
    codec, tokenizer = codec_of(kind), tokenizer_of(kind)
    for text in [*TEXTS, *CORPUS, f"{BOS}marked{EOS}", f" {UNK} "]:
        ids = tokenizer(text, add_special_tokens=adds_special_tokens)["input_ids"]
        assert codec.encode(text, adds_special_tokens=adds_special_tokens) == ids
        for end in range(len(ids) + 1):
            decoded = tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert codec.decode(ids[:end]) == decoded


class Shouting(PreTrainedTokenizerFast):
    """Has ways of its own to read and to write, as some of transformers' tokenizers and those of repositories."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus(text.lower() if isinstance(text, str) else text, *args, **kwargs)

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


def test_a_tokenizer_s_own_methods_are_called() -> None:
    build: Any = Shouting
    codec = TextCodec(build(tokenizer_object=byte_level(), unk_token=UNK), 400)
    ids = codec.encode("The River")
    assert ids == codec_of("byte_level").encode("the river")
    assert codec.decode(ids) == "THE RIVER"


def test_saved_padding_and_truncation_have_no_effect() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    build: Any = PreTrainedTokenizerFast
    codec = TextCodec(build(tokenizer_object=tokenizer, eos_token=EOS), 400)
    texts = [f"{number} {text}" for number in range(40) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: codec.continuation([], codec.encode(text)), texts)) == texts


def test_a_folders_own_calls_of_the_tokenizer_change_no_prompt() -> None:
    build: Any = PreTrainedTokenizerFast
    tokenizer = build(tokenizer_object=byte_level(), eos_token=EOS, pad_token=EOS)
    codec, prompt = TextCodec(tokenizer, 400), f"{CORPUS[0]}{EOS}"
    ids = codec.encode(prompt)
    tokenizer(prompt, truncation=True, padding="max_length", max_length=4, split_special_tokens=True)
    assert codec.encode(prompt) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_word_is_spelled_with_and_without_a_space(kind: str) -> None:
    codec = codec_of(kind)
    spellings = codec.encode_bad_words(("river",))
    for written in ("river", "the river", "the old river"):
        ids = tuple(raw_ids(kind, written))
        assert any(ids[-len(spelling) :] == spelling for spelling in spellings), written
    assert all(spelling and "river" in codec.decode(list(spelling)) for spelling in spellings)


def test_spellings_that_others_cover_are_left_out() -> None:
    codec = codec_of("metaspace")
    assert codec.encode_bad_words(("the", "the", " the")) == (tuple(raw_ids("metaspace", "the")),)


@pytest.mark.parametrize(
    ("kind", "word"), [("metaspace", "\u4e01"), ("wordpiece", "\u4e01"), ("byte_level", "")], ids=ascii
)
def test_a_bad_word_that_the_tokenizer_cannot_write_is_refused(kind: str, word: str) -> None:
    with pytest.raises(RequestError, match=r"invalid_parameter: bad_words holds .* no tokens for"):
        codec_of(kind).encode_bad_words(("the", word))


def test_a_bad_word_with_tokens_beyond_the_model_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens for"):
        TextCodec(tokenizer_of("byte_level"), 3).encode_bad_words(("the",))
