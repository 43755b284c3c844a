# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, the same for every tokenizer, at once or token by token. Knows no engine and no tensors.

What tokens add to a text depends on those in front of them: a sentencepiece tokenizer drops the space at the beginning,
and a character may be spread over several tokens. So tokens are decoded behind a few that precede them, and what those
give is cut off.
"""

from __future__ import annotations

import codecs
import copy
from itertools import islice
from typing import Any, Final

from hf_triton.errors import RequestError, clip

REPLACEMENT: Final = "\ufffd"
NUM_CONTEXT_TOKENS: Final = 4
"""Tokens that are decoded in front of new ones: an unfinished UTF-8 character has at most three of them."""

ENCODERS: Final = ("__call__", "_encode_plus")
DECODERS: Final = ("decode", "_decode")
"""Methods of transformers' tokenizers, which some of its own and those of a folder or a repository override."""


class TextCodec:
    """A tokenizer, used the one right way.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary_size: Rows of the model's embedding; a token id beyond it would crash the model.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size
        self._tokenizer("")  # drops a padding or truncation saved with it: later calls change nothing, from any thread
        backend = _copy_of_backend(tokenizer)
        self._encoder = backend if _leaves_it_to_its_backend(tokenizer, ENCODERS) else None
        self._decoder = backend if _leaves_it_to_its_backend(tokenizer, DECODERS) else None
        vocabulary = tokenizer.get_vocab()
        self.is_fast: bool = tokenizer.is_fast
        """Whether it is no Python's own, which takes ten times as long."""
        self.revises = not self.is_fast  # Python's own may decode "fo@@" and later "foo" (CTRL, BlenderbotSmall)
        self.byte_of = self._find_byte_tokens(vocabulary)
        decoder = type(tokenizer.backend_tokenizer.decoder).__name__ if self.is_fast else None
        self._joins_bytes = decoder == "ByteLevel"  # GPT-2's kind: a text is the bytes of its tokens, whole or not
        self._silent_ids = self._find_silent_tokens(set(vocabulary.values()))

    def encode(self, text: str, row: int, *, adds_special_tokens: bool = True) -> list[int]:
        """A prompt as token ids, with the special tokens that the tokenizer adds by itself; never empty.

        A chat template writes the special tokens itself: what comes of it gets no more.

        Raises:
            RequestError: The prompt is empty and the model has no token to begin with, or a token is unknown to the
                model. `row` says which prompt.
        """
        ids = self._encode(text, adds_special_tokens=adds_special_tokens)
        if not ids:  # transformers begins an empty prompt with this token too
            ids = [
                token for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id) if token is not None
            ][:1]
        if not ids:
            raise RequestError(
                "invalid_input", f"text_input row {row} is empty, and this model needs a token to begin with"
            )
        if max(ids) >= self.vocabulary_size:
            raise RequestError(
                "invalid_input",
                f"text_input row {row} holds token {max(ids)}, and the model knows {self.vocabulary_size} tokens: "
                "tokenizer and model do not belong together",
            )
        return ids

    def encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that write one of these words, behind a space or without one.

        Raises:
            RequestError: The tokenizer cannot write a word with tokens that the model knows.
        """
        spellings = {ids for word in words for ids in self._spellings(word)}
        return tuple(sorted(spellings))

    def continuation(self, prompt_ids: list[int], token_ids: list[int]) -> str:
        """The text that `token_ids` add to the prompt.

        Joined, the pieces of `stream` are this text, up to its first stop string. A character that is not whole becomes
        U+FFFD.

        Args:
            prompt_ids: Empty where the text stands alone, such as an encoder-decoder's answer.
            token_ids: The new tokens.
        """
        context = self.context(prompt_ids)
        before, whole = self.decode(context), self.decode(context + token_ids)
        if whole.startswith(before) and (self._joins_bytes or REPLACEMENT not in whole):
            return whole[len(before) :]
        stream = self.stream(prompt_ids)
        return "".join([stream.push(token_id) for token_id in token_ids]) + stream.finish()

    def stream(self, prompt_ids: list[int], stop_strings: tuple[str, ...] = ()) -> TextStream:
        """The same text, token by token."""
        return TextStream(self, prompt_ids, stop_strings)

    def decode(self, ids: list[int]) -> str:
        """Tokens as the tokenizer decodes them when they stand alone."""
        text: str
        if self._decoder is not None:
            text = self._decoder.decode(ids, skip_special_tokens=True)
        else:
            text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def is_silent(self, token_id: int) -> bool:
        """Whether a token is never any text: special tokens, and ids that the tokenizer does not know."""
        return token_id in self._silent_ids

    def context(self, ids: list[int]) -> list[int]:
        """As many of the last tokens as matter for the text behind them."""
        audible = (token_id for token_id in reversed(ids) if not self.is_silent(token_id))
        return list(islice(audible, NUM_CONTEXT_TOKENS))[::-1]

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        spellings = {self._encode_plain(text) for text in (word, " " + word.lstrip())}
        unknown = self._tokenizer.unk_token_id
        if any(not ids or unknown in ids or max(ids) >= self.vocabulary_size for ids in spellings):
            raise RequestError("invalid_parameter", f"bad_words holds {clip(word)}, which this model has no tokens for")
        return [ids for ids in spellings if not any(_is_tail(other, ids) for other in spellings)]

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text, adds_special_tokens=False))

    def _encode(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        ids: list[int]
        if self._encoder is not None:  # as a batch, while which other threads run
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
    """The tokenizers library's part of a tokenizer, which other calls cannot have truncate or pad; None without one."""
    try:
        return copy.deepcopy(tokenizer.backend_tokenizer)
    except Exception:  # there is none, or it is made of Python's own parts
        return None


def _leaves_it_to_its_backend(tokenizer: Any, methods: tuple[str, ...]) -> bool:
    """Whether a tokenizer does no more in these methods than to call the tokenizers library.

    Then so may we, which spares what transformers puts around it, each time with other lines of the caches: with a
    model's weights going through them, most of what a short text takes.
    """
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    return issubclass(kind, PreTrainedTokenizerFast) and not any(
        name in vars(tokenizer) or getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name, None)
        for name in methods
    )


class TextStream:
    """A text that comes token by token. Made by `TextCodec.stream`; for one thread at a time.

    Args:
        codec: The tokenizer.
        prompt_ids: What the text follows.
        stop_strings: The text ends in front of the first of them; none of them empty.
    """

    def __init__(self, codec: TextCodec, prompt_ids: list[int], stop_strings: tuple[str, ...]) -> None:
        self._detokenizer = _Detokenizer(codec, prompt_ids)
        self._stops = _StopFinder(stop_strings)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found: the text is complete."""
        return self._stops.is_found

    def push(self, token_id: int) -> str:
        """The text that is decided with this token; empty where it depends on those to come."""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()


class _Detokenizer:
    """Turns tokens into text, holding back what later tokens may change: the beginning of a character."""

    def __init__(self, codec: TextCodec, prompt_ids: list[int]) -> None:
        self._codec = codec
        self._context = codec.context(prompt_ids)
        self._num_used = 0  # characters at the end of the context's text that were not given out
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._codec.is_silent(token_id):
            return ""
        byte = self._codec.byte_of.get(token_id)
        if byte is None:
            return self._utf8.decode(b"", final=True) + self._decode_behind_context(token_id)
        # sentencepiece's decoders spoil a whole run of byte tokens where one character in it is not whole
        text = self._held() + self._utf8.decode(bytes([byte]))
        self._context, self._num_used = [*self._context, token_id][-NUM_CONTEXT_TOKENS:], 0
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True) + self._held()

    def _held(self) -> str:
        return self._codec.decode(self._context)[-self._num_used :] if self._num_used else ""

    def _decode_behind_context(self, token_id: int) -> str:
        window = [*self._context, token_id]
        before, text = self._codec.decode(self._context), self._codec.decode(window)
        num_common = _num_common(before, text)
        end = num_common if self._codec.revises else len(text)
        if text.endswith(REPLACEMENT, 0, end):
            end -= 1  # perhaps the beginning of a character
        start = min(len(before) - self._num_used, num_common)
        self._context, self._num_used = window[-NUM_CONTEXT_TOKENS:], len(text) - max(start, end)
        return text[start:end]


def up_to_stop(text: str, stop_strings: tuple[str, ...]) -> str:
    """A whole text up to the first of its stop strings, none of which is empty."""
    return text[: min((place for stop in stop_strings if (place := text.find(stop)) >= 0), default=len(text))]


class _StopFinder:
    """Passes a text on up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._stops = stop_strings
        self._longest = max(map(len, stop_strings), default=0)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        if self.is_found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end = next((place for place in range(len(text)) if self._may_stop_at(text, place)), len(text))
        self.is_found = text.startswith(self._stops, end)
        self._held = "" if self.is_found else text[end:]
        return text[:end]

    def finish(self) -> str:
        """What was held back, up to a stop string within it."""
        text, self._held = self._held, ""
        for place in range(len(text)):
            if text.startswith(self._stops, place):
                self.is_found = True
                return text[:place]
        return text

    def _may_stop_at(self, text: str, place: int) -> bool:
        if text.startswith(self._stops, place):
            return True
        if len(text) - place >= self._longest:
            return False
        tail = text[place:]
        return any(stop.startswith(tail) for stop in self._stops)


def _num_common(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    if second.startswith(first):
        return len(first)
    return next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second)
    )


def _is_tail(tail: tuple[int, ...], ids: tuple[int, ...]) -> bool:
    """Whether `ids` ends with `tail` and is longer."""
    return len(tail) < len(ids) and ids[-len(tail) :] == tail
