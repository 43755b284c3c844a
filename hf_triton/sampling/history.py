# SPDX-License-Identifier: Apache-2.0
"""What one text holds so far, and what follows from it for the scores of its next token. Knows numpy, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hf_triton.sampling.params import SamplingParams

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

FIRST_ROOM: Final = 64


class TokenHistory:
    """Biases, penalties and bans of one text's next token. It remembers only what its plan asks for.

    Args:
        plan: The prompt's settings.
        prompt_ids: The prompt's token ids.
        eos_ids: The tokens that end the text.
    """

    def __init__(self, plan: SamplingParams, prompt_ids: Sequence[int], eos_ids: frozenset[int]) -> None:
        self._plan = plan
        self._prompt_ids = prompt_ids
        self._eos = eos_ids
        self._num_new_tokens = 0
        self._bad_endings = _endings(plan.bad_words_ids, eos_ids)
        self._has_penalties = (plan.repetition_penalty, plan.presence_penalty, plan.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        self._looks_back = plan.no_repeat_ngram_size > 0 or any(length > 0 for length in self._bad_endings)

    @cached_property
    def _eos_ids(self) -> Ids:
        return np.array(sorted(self._eos), np.int64)

    @cached_property
    def _counts(self) -> _Counts:
        return _Counts(self._prompt_ids if self._plan.repetition_penalty != 1.0 else ())

    @cached_property
    def _token_ids(self) -> _Growing:
        return _Growing(np.array(self._prompt_ids if self._looks_back else (), np.int64))

    @cached_property
    def _bias_table(self) -> tuple[Ids, Floats]:
        token_ids, biases = zip(*self._plan.logit_bias, strict=True) if self._plan.logit_bias else ((), ())
        return np.array(token_ids, np.int64), np.array(biases, np.float32)

    @property
    def edits_scores(self) -> bool:
        """Whether there can be anything at all."""
        return bool(
            self._has_penalties
            or self._looks_back
            or self._bad_endings
            or self._plan.logit_bias
            or self._num_new_tokens < self._plan.min_new_tokens
        )

    def append(self, token_id: int) -> None:
        """The text goes on with a token."""
        self._num_new_tokens += 1
        if self._has_penalties:
            self._counts.add(token_id)
        if self._looks_back:
            self._token_ids.append(token_id)

    def first_eos_id(self, vocabulary_size: int) -> int | None:
        """The lowest token that ends the text and can be written; None where there is none."""
        return int(self._eos_ids[0]) if len(self._eos_ids) and self._eos_ids[0] < vocabulary_size else None

    def biases(self) -> tuple[Ids, Floats]:
        """Token ids, and what is added to their scores."""
        return self._bias_table

    def penalties(self) -> tuple[Ids, Floats, Floats]:
        """Token ids, each once; what divides their scores, or multiplies negative ones; and what is then subtracted.

        Repetition: CTRL, Keskar et al. 2019, section 4.1, over prompt and text. Presence and frequency: OpenAI's API,
        over the text alone: `presence + frequency * count` where the count is above 0.
        """
        plan, (token_ids, counts) = self._plan, self._counts.view()
        factors = np.full(len(token_ids), plan.repetition_penalty, np.float32)
        return token_ids, factors, plan.frequency_penalty * counts + plan.presence_penalty * np.minimum(counts, 1)

    def banned_ids(self) -> Ids:
        """Tokens that may not come next, some of them repeatedly."""
        token_ids = self._token_ids.view()
        banned = [self._bad_words_completed(token_ids)]
        if self._plan.no_repeat_ngram_size:
            banned.append(_repeated_ngram_endings(token_ids, self._plan.no_repeat_ngram_size))
        if self._num_new_tokens < self._plan.min_new_tokens:
            banned.append(self._eos_ids)
        return np.concatenate(banned)

    def _bad_words_completed(self, token_ids: Ids) -> Ids:
        """The last tokens of the bad words whose other tokens end the text."""
        endings: list[int] = []
        for length, by_start in self._bad_endings.items():
            if length <= len(token_ids):
                endings += by_start.get(tuple(token_ids[len(token_ids) - length :].tolist()), ())
        return np.array(endings, np.int64)


def _endings(words: Iterable[tuple[int, ...]], eos_ids: frozenset[int]) -> dict[int, dict[tuple[int, ...], list[int]]]:
    """The words' last tokens by their other tokens, by how many these are; the end of the text is no bad word."""
    endings: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for *start, last in words:
        if start or last not in eos_ids:
            endings.setdefault(len(start), {}).setdefault(tuple(start), []).append(last)
    return endings


def _repeated_ngram_endings(token_ids: Ids, size: int) -> Ids:
    """The tokens that would end an n-gram of `size` tokens which is there already."""
    if len(token_ids) < size:
        return np.empty(0, np.int64)
    starts = np.arange(len(token_ids) - size + 1)
    for offset, token_id in enumerate(token_ids[len(token_ids) - size + 1 :]):
        starts = starts[token_ids[starts + offset] == token_id]
    endings: Ids = token_ids[starts + size - 1]
    return endings


class _Counts:
    """How often the text holds each token, 0 for those that only the prompt holds."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = np.unique(np.array(prompt_ids, np.int64))
        self._token_ids = _Growing(distinct)
        self._counts = _Growing(np.zeros(len(distinct), np.float32))
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids.view()):
            self._token_ids.append(token_id)
            self._counts.append(0)
        self._counts.view()[place] += 1

    def view(self) -> tuple[Ids, Floats]:
        """Token ids, and how often each is there."""
        return self._token_ids.view(), self._counts.view()


class _Growing:
    """Numbers in an array with room for more, which doubles when it is full."""

    def __init__(self, values: Array) -> None:
        self._room = values
        self._size = len(values)

    def append(self, value: float) -> None:
        if self._size == len(self._room):
            self._room = np.concatenate([self._room, np.empty(max(FIRST_ROOM, self._size), self._room.dtype)])
        self._room[self._size] = value
        self._size += 1

    def view(self) -> Array:
        return self._room[: self._size]
