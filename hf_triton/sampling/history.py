# SPDX-License-Identifier: Apache-2.0
"""TokenHistory: the biases, penalties and bans that follow from a sequence's tokens so far. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_triton.sampling.params import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class TokenHistory:
    """Biases, penalties and bans for a sequence's next token. It keeps only what the sampling parameters need."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], eos_ids: frozenset[int]) -> None:
        self._params = params
        self._prompt_ids = prompt_ids
        self._eos = eos_ids
        self._num_new_tokens = 0
        self._bad_word_ends = _bad_word_ends(params.bad_words_ids, eos_ids)
        self._has_penalties = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        self._looks_back = params.no_repeat_ngram_size > 0 or any(length > 0 for length in self._bad_word_ends)

    @cached_property
    def _eos_ids(self) -> Ids:
        return np.array(sorted(self._eos), np.int64)

    @cached_property
    def _counts(self) -> _Counts:
        return _Counts(self._prompt_ids if self._params.repetition_penalty != 1.0 else ())

    @cached_property
    def _token_ids(self) -> _GrowingArray:
        return _GrowingArray(np.array(self._prompt_ids if self._looks_back else (), np.int64))

    @cached_property
    def biases(self) -> tuple[Ids, Floats]:
        """Token ids and the biases added to their scores, both `[ids]`."""
        token_ids, biases = zip(*self._params.logit_bias, strict=True) if self._params.logit_bias else ((), ())
        return np.array(token_ids, np.int64), np.array(biases, np.float32)

    @property
    def edits_logits(self) -> bool:
        """Whether there can be a bias, penalty or ban for the next token."""
        return bool(
            self._has_penalties
            or self._looks_back
            or self._bad_word_ends
            or self._params.logit_bias
            or self._num_new_tokens < self._params.min_new_tokens
        )

    def append(self, token_id: int) -> None:
        self._num_new_tokens += 1
        if self._has_penalties:
            self._counts.add(token_id)
        if self._looks_back:
            self._token_ids.append(token_id)

    def first_eos_id(self, vocabulary_size: int) -> int | None:
        """The lowest end-of-sequence token in the vocabulary; None if there is none."""
        return int(self._eos_ids[0]) if len(self._eos_ids) and self._eos_ids[0] < vocabulary_size else None

    def penalties(self) -> tuple[Ids, Floats, Floats]:
        """Distinct token ids, what divides their scores (multiplies negative ones), and what is subtracted then.

        Repetition: CTRL, Keskar et al. 2019, section 4.1, over prompt and completion. Presence and frequency: OpenAI's
        API, over the completion: `presence + frequency * count` for counts above 0.
        """
        params, (token_ids, counts) = self._params, self._counts.view()
        factors = np.full(len(token_ids), params.repetition_penalty, np.float32)
        return token_ids, factors, params.frequency_penalty * counts + params.presence_penalty * np.minimum(counts, 1)

    def banned_ids(self) -> Ids:
        """Tokens that are banned next; may hold duplicates."""
        token_ids = self._token_ids.view()
        banned = [np.array(self._bad_words_completed(token_ids), np.int64)]
        if self._params.no_repeat_ngram_size:
            banned.append(_repeated_ngram_endings(token_ids, self._params.no_repeat_ngram_size))
        if self._num_new_tokens < self._params.min_new_tokens:
            banned.append(self._eos_ids)
        return np.concatenate(banned)

    def _bad_words_completed(self, token_ids: Ids) -> list[int]:
        """Last tokens of bad words whose other tokens are the end of the sequence."""
        endings: list[int] = []
        for length, by_start in self._bad_word_ends.items():
            if length <= len(token_ids):
                endings += by_start.get(tuple(token_ids[len(token_ids) - length :].tolist()), ())
        return endings


def _bad_word_ends(
    words: Iterable[tuple[int, ...]], eos_ids: frozenset[int]
) -> dict[int, dict[tuple[int, ...], list[int]]]:
    """Last tokens of bad words, by the number of their other tokens and by those; end-of-sequence is no bad word."""
    endings: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for *start, last in words:
        if start or last not in eos_ids:
            endings.setdefault(len(start), {}).setdefault(tuple(start), []).append(last)
    return endings


def _repeated_ngram_endings(token_ids: Ids, size: int) -> Ids:
    """Tokens that would repeat an n-gram of `size` tokens."""
    if len(token_ids) < size:
        return np.empty(0, np.int64)
    starts = np.arange(len(token_ids) - size + 1)
    for offset, token_id in enumerate(token_ids[len(token_ids) - size + 1 :]):
        starts = starts[token_ids[starts + offset] == token_id]
    endings: Ids = token_ids[starts + size - 1]
    return endings


class _Counts:
    """How often the completion holds each token; 0 for tokens that only the prompt holds."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = np.unique(np.array(prompt_ids, np.int64))
        self._token_ids = _GrowingArray(distinct)
        self._counts = _GrowingArray(np.zeros(len(distinct), np.float32))
        self._indices = {token_id: index for index, token_id in enumerate(distinct.tolist())}

    def add(self, token_id: int) -> None:
        index = self._indices.setdefault(token_id, len(self._indices))
        if index == len(self._token_ids.view()):
            self._token_ids.append(token_id)
            self._counts.append(0)
        self._counts.view()[index] += 1

    def view(self) -> tuple[Ids, Floats]:
        return self._token_ids.view(), self._counts.view()


class _GrowingArray:
    """An array of numbers whose capacity doubles when it is full."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._values = values
        self._size = len(values)

    def append(self, value: float) -> None:
        if self._size == len(self._values):
            self._values = np.concatenate([self._values, np.empty(max(64, self._size), self._values.dtype)])
        self._values[self._size] = value
        self._size += 1

    def view(self) -> npt.NDArray[Any]:
        return self._values[: self._size]
