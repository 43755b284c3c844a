# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, the same for every tokenizer. Knows no engine and no tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from hf_triton.errors import RequestError, clip, panics_as_errors
from hf_triton.sentence import param
from hf_triton.tasks.text_generation.detokenizer import (
    NUM_CONTEXT_TOKENS,
    REPLACEMENT,
    MarkedTextStream,
    TextStream,
)
from hf_triton.tasks.text_generation.fill_in import find_form

ENCODERS: Final = ("__call__", "_encode_plus")
DECODERS: Final = ("decode", "_decode")
"""Methods of transformers' tokenizers, which some of its own and those of a folder or a repository override."""
NO_IDS: Final[frozenset[int]] = frozenset()
MARK: Final = "☺"
SPACE: Final = "▁"
"""Sentencepiece's."""
PRINTABLE: Final = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_LETTERS: Final = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}
"""The letters by which byte-level vocabularies, GPT-2's kind, spell bytes."""


class TextCodec:
    """Encodes and decodes with one tokenizer. May be used from several threads.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary_size: Rows of the model's embedding; a token id beyond it would crash the model.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self._tokenizer("")  # drops a padding or truncation saved with it: later calls change nothing, from any thread
        backend = _copy_of_backend(tokenizer)
        self._encoder = backend if _delegates_to_backend(tokenizer, ENCODERS) else None
        self._decoder = backend if _delegates_to_backend(tokenizer, DECODERS) else None
        vocabulary = tokenizer.get_vocab()
        self.fill_in = find_form(vocabulary)
        """How its model fills in the middle; None: it has no tokens for that."""
        ends = NO_IDS if self.fill_in is None else self.fill_in.end_ids(vocabulary)
        self.fill_in_ends = {token_id for token_id in ends if token_id < vocabulary_size}
        """The tokens of the model that end the middle, beside end-of-sequence."""
        self.is_fast: bool = tokenizer.is_fast
        """Whether it is the tokenizers library's; one in Python takes ten times as long."""
        self.revises = not self.is_fast  # one in Python may decode "fo@@" and later "foo" (CTRL, BlenderbotSmall)
        self.byte_of = self._find_byte_tokens(vocabulary)
        decoder = type(tokenizer.backend_tokenizer.decoder).__name__ if self.is_fast else None
        self._joins_bytes = decoder == "ByteLevel"  # GPT-2's kind: a string is the bytes of its tokens, complete or not
        self._silent_ids = self._find_silent_tokens(set(vocabulary.values()))
        words = (token_id for token_id in sorted(vocabulary.values()) if self.decode([token_id]).strip().isalpha())
        self._word = None if self._joins_bytes else next(words, None)

    def encode(
        self,
        text: str,
        about: str = "the prompt",
        *,
        adds_special_tokens: bool = True,
        special_ids: tuple[list[int], list[int]] | None = None,
    ) -> list[int]:
        """A prompt as token ids, never empty.

        Args:
            text: The prompt.
            about: What sentences call it.
            adds_special_tokens: Whether to add the tokenizer's special tokens; a chat template has written them.
            special_ids: Tokens to put before and after the text's instead.

        Raises:
            RequestError: The prompt is empty and the model has no token to begin with, or a token is unknown to the
                model.
        """
        ids = self._encode(text, adds_special_tokens=adds_special_tokens and special_ids is None)
        if special_ids is not None:
            ids = [*special_ids[0], *ids, *special_ids[1]]
        if not ids:  # transformers begins an empty prompt with this token too
            firsts = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
            ids = [token_id for token_id in firsts if token_id is not None][:1]
        if not ids:
            raise RequestError("invalid_input", f"{about} is empty, and this model needs a token to begin with")
        self._check_known(ids, about)
        return ids

    def _check_known(self, ids: list[int], about: str) -> None:
        if max(ids) >= self.vocabulary_size:
            raise RequestError(
                "invalid_input",
                f"{about} holds token {max(ids)}, and the model knows {self.vocabulary_size} tokens: "
                "tokenizer and model do not belong together",
            )

    def encode_around(self, text: str, suffix: str, about: str, *, adds_special_tokens: bool) -> list[int]:
        """A text and what is behind its completion as the prompt that has the middle filled in.

        A tokenizer that puts a space before each text does so for the prefix alone, as CodeLlama's own code and
        mistral-common have it.
        """
        form = self.fill_in
        assert form is not None
        before, behind, middle = self._tokenizer.convert_tokens_to_ids(
            [form.prefix, form.suffix, form.middle or form.prefix]
        )
        prefix_ids = [before, *self._encode(text, adds_special_tokens=False)]
        suffix_ids = [behind, *self._encode_inside(suffix)]
        parts = [suffix_ids, prefix_ids] if form.suffix_first else [prefix_ids, suffix_ids]
        firsts = self._encode("", adds_special_tokens=adds_special_tokens)
        firsts = [token_id for token_id in firsts if token_id == self._tokenizer.bos_token_id]
        ids = [*firsts, *parts[0], *parts[1], *([middle] if form.middle else ())]
        self._check_known(ids, about)
        return ids

    def _encode_inside(self, text: str) -> list[int]:
        """A text without the space that sentencepiece's tokenizers put before it: behind a mark, which is cut off."""
        marks = self._encode(MARK, adds_special_tokens=False)
        if str(self.token_strings(marks[:1])[0]).startswith(SPACE):
            ids = self._encode(MARK + text, adds_special_tokens=False)
            if ids[: len(marks)] == marks:
                return ids[len(marks) :]
        return self._encode(text, adds_special_tokens=False)

    def token_strings(self, ids: list[int]) -> list[str | None]:
        """Tokens as the vocabulary spells them; None: it has no such token, though the model has."""
        strings: list[str | None] = self._tokenizer.convert_ids_to_tokens(ids)
        return strings

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Refuse token ids that the model does not have; the RequestError names the first one."""
        if max(ids, default=0) >= self.vocabulary_size:
            index = next(index for index, token_id in enumerate(ids) if token_id >= self.vocabulary_size)
            raise RequestError(
                "invalid_input",
                f"{param(f'{name}[{index}]')} is {ids[index]}, and the model's token ids are below "
                f"{self.vocabulary_size}",
            )

    def encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell one of these words, after a space or without one.

        Raises:
            RequestError: The tokenizer cannot write a word with tokens that the model knows.
        """
        spellings = {ids for word in words for ids in self._spellings(word)}
        return tuple(sorted(spellings))

    def continuation(self, prompt_ids: list[int], token_ids: list[int]) -> str:
        """The text that `token_ids` add to the prompt.

        The deltas of `stream` add up to this text, up to its first stop string. An incomplete character becomes U+FFFD.

        Args:
            prompt_ids: Empty for a completion that stands alone, such as an encoder-decoder's.
            token_ids: The new tokens.
        """
        context = self.context(prompt_ids)
        before, whole = self.decode(context), self.decode(context + token_ids)
        if whole.startswith(before) and (self._joins_bytes or REPLACEMENT not in whole):
            return whole[len(before) :]
        stream = self.stream(prompt_ids)
        return "".join([stream.push(token_id) for token_id in token_ids]) + stream.finish()

    def stream(
        self, prompt_ids: list[int], stop_strings: tuple[str, ...] = (), *, includes_stop: bool = False
    ) -> TextStream:
        """The same text, token by token."""
        return TextStream(self, prompt_ids, stop_strings, includes_stop=includes_stop)

    def marked_stream(
        self, prompt_ids: list[int], stop_strings: tuple[str, ...], markers: Mapping[int, str], *, includes_stop: bool
    ) -> MarkedTextStream:
        """A `stream` that also keeps the text with some special tokens in it."""
        return MarkedTextStream(self, prompt_ids, stop_strings, includes_stop=includes_stop, markers=markers)

    def special_tokens(self) -> dict[int, str]:
        """The tokens without text that have a name, by id."""
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        return {token_id: name for name, token_id in added.items() if self.is_silent(token_id)}

    def decode(self, ids: list[int], *, keeps_special_tokens: bool = False) -> str:
        """Tokens as the tokenizer decodes them on their own."""
        text: str
        skips = not keeps_special_tokens
        with panics_as_errors():
            if self._decoder is not None:
                text = self._decoder.decode(ids, skip_special_tokens=skips)
            else:
                text = self._tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of a token behind others: sentencepiece's decoders drop the space of the first one."""
        if self._word is None:
            return self.decode([token_id])
        before, text = self.decode([self._word]), self.decode([self._word, token_id])
        return text.removeprefix(before) if text.startswith(before) else self.decode([token_id])

    def part_of_character(self, token_id: int) -> bytes | None:
        """The bytes of a token that has a part of a character, which is no text; None: they are not known."""
        if (byte := self.byte_of.get(token_id)) is not None:
            return bytes([byte])
        spelled = self.token_strings([token_id])[0]
        if spelled is None or not BYTE_LETTERS.keys() >= set(spelled):
            return None
        data = bytes(BYTE_LETTERS[letter] for letter in spelled)
        return data if data.decode(errors="replace") == self.decode([token_id]) else None

    def is_silent(self, token_id: int) -> bool:
        """Whether a token has no text: special tokens, and ids that the tokenizer does not know."""
        return token_id in self._silent_ids

    def context(self, ids: list[int]) -> list[int]:
        """The last tokens that affect how later ones are decoded."""
        audible = (token_id for token_id in reversed(ids) if not self.is_silent(token_id))
        return list(islice(audible, NUM_CONTEXT_TOKENS))[::-1]

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        spellings = {tuple(self._encode(text, adds_special_tokens=False)) for text in (word, " " + word.lstrip())}
        unknown = self._tokenizer.unk_token_id
        if any(not ids or unknown in ids or max(ids) >= self.vocabulary_size for ids in spellings):
            raise RequestError(
                "invalid_parameter", f"{param('bad_words')} holds {clip(word)}, which this model has no tokens for"
            )
        return [ids for ids in spellings if not any(_is_tail(other, ids) for other in spellings)]

    def _encode(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        ids: list[int]
        with panics_as_errors():
            if self._encoder is not None:  # a batch call releases the interpreter's lock
                [encoding] = self._encoder.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
                ids = encoding.ids
            else:
                ids = self._tokenizer(text, add_special_tokens=adds_special_tokens, verbose=False)["input_ids"]
        return ids

    def _find_byte_tokens(self, vocabulary: dict[str, int]) -> dict[int, int]:
        """The byte that each byte token of a sentencepiece tokenizer stands for; empty for other tokenizers."""
        ids = {vocabulary[name]: byte for byte in range(256) if (name := f"<0x{byte:02X}>") in vocabulary}
        has_bytes = len(ids) == 256 and self.decode([vocabulary["<0xC3>"], vocabulary["<0xA9>"]]) == "é"
        return ids if has_bytes else {}

    def _find_silent_tokens(self, known_ids: set[int]) -> frozenset[int]:
        special_ids = set(self._tokenizer.all_special_ids)
        if self.is_fast:
            added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
            special_ids.update(token_id for token_id, token in added.items() if token.special)
        skipped_ids = {token_id for token_id in special_ids if self.decode([token_id]) == ""}
        return frozenset(skipped_ids | (set(range(self.vocabulary_size)) - known_ids))


def _copy_of_backend(tokenizer: Any) -> Any | None:
    """A copy of a tokenizer's Rust part, which other calls cannot set to truncate or pad; None without one."""
    try:
        return copy.deepcopy(tokenizer.backend_tokenizer)
    except Exception:  # there is none, or it has parts in Python
        return None


def _delegates_to_backend(tokenizer: Any, methods: tuple[str, ...]) -> bool:
    """Whether these methods of a tokenizer only call the tokenizers library.

    It is then called directly: beside a running model, transformers' wrappers cost most of the time of a short prompt.
    """
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    return issubclass(kind, PreTrainedTokenizerFast) and not any(
        name in vars(tokenizer) or getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None)
        for name in methods
    )


def _is_tail(tail: tuple[int, ...], ids: tuple[int, ...]) -> bool:
    return len(tail) < len(ids) and ids[-len(tail) :] == tail
