# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: proposes what followed in a sequence's own context where its last tokens stood before. No torch.

A step computes the proposal beside the sequence's token, samples at each of its places, and keeps the tokens up to the
first that was not proposed (Saxena 2023; Leviathan et al. 2023 for models that propose). Text that repeats its prompt,
such as an edited file, gets several tokens a step.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

NUM_MATCHED: Final = 2
"""Tokens that must stand in the context already: fewer are found by chance, and three come later into a quotation."""
MIN_SHARE: Final = 0.3
"""A sequence proposes nothing while less of what its context foretold comes true."""
LOWEST_SHARE, HIGHEST_SHARE = 0.2, 0.99
"""The share falls no further, so that a few right tokens are enough to propose again, and never reaches 1."""
MEMORY: Final = 8
"""The share is a running mean of about so many tokens."""


class PromptNgrams:
    """The pairs of tokens of a prompt, which its sequences share: sorted, as a long one would take long to hash."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        ids = np.array(prompt_ids, np.int64)
        keys = ids[:-NUM_MATCHED] << 32 | ids[1 : 1 - NUM_MATCHED]
        order = keys.argsort(kind="stable")
        self._keys = array("q", keys[order].tobytes())
        self._places = array("q", (order + NUM_MATCHED).tobytes())

    def find(self, ngram: Sequence[int]) -> int | None:
        """The place of the token behind its last place that has one; None: there is none."""
        if len(ngram) < NUM_MATCHED:
            return None
        first, second = ngram
        key = first << 32 | second
        at = bisect_right(self._keys, key) - 1
        return self._places[at] if at >= 0 and self._keys[at] == key else None


class PromptLookup:
    """The context of one sequence, searched for its last tokens.

    It foretells the next token whether or not one is proposed, so it knows what a proposal would be worth: while what
    it foretells is wrong nothing is proposed, and when it comes true again something is.
    """

    def __init__(self, prompt_ids: Sequence[int], ngrams: PromptNgrams | None = None) -> None:
        self._token_ids = list(prompt_ids)
        self._ngrams = ngrams or PromptNgrams(prompt_ids)
        self._behind: dict[tuple[int, ...], int] = {}
        """Where the token behind each n-gram that the completion has ended is, that of its last place."""
        self._num_prompt = len(prompt_ids)
        self._source = self._find()
        """The place of the token that is expected next; None: the last tokens are new."""
        self.share = 0.5
        """The part of the foretold tokens that came true lately."""

    def follow(self, completion: Sequence[int]) -> None:
        """Take in the tokens that the completion has beyond those seen before."""
        ids = self._token_ids
        for token in completion[len(ids) - self._num_prompt :]:
            if self._source is not None:
                is_right = ids[self._source] == token
                share = self.share + (is_right - self.share) / MEMORY
                self.share = min(max(share, LOWEST_SHARE), HIGHEST_SHARE)
                self._source = self._source + 1 if is_right else None
            if len(ids) >= NUM_MATCHED:
                self._behind[tuple(ids[-NUM_MATCHED:])] = len(ids)
            ids.append(token)
            if self._source is None:
                self._source = self._find()

    def propose(self, most: int, cost: float) -> list[int]:
        """The tokens that are expected next, as many as are worth `cost` decoding steps each, and `most` at most.

        A proposed token counts only if those before it are right, so the chance of each is less.
        """
        if self._source is None or self.share < MIN_SHARE or self.share <= cost:
            return []
        num_worth = int(math.log(max(cost, 1e-9)) / math.log(self.share))
        ids, proposal = self._token_ids, list[int]()
        for at in range(self._source, self._source + min(most, num_worth)):  # which may run into itself
            proposal.append(ids[at] if at < len(ids) else proposal[at - len(ids)])
        return proposal

    def _find(self) -> int | None:
        ngram = tuple(self._token_ids[-NUM_MATCHED:])
        place = self._behind.get(ngram)
        return self._ngrams.find(ngram) if place is None else place


@dataclass(frozen=True)
class ProposalCosts:
    """What a proposed token costs, by the number of running sequences, as timed at load."""

    most: int
    """Tokens of a proposal."""
    by_number: Sequence[tuple[int, float]]
    """Numbers of sequences, ascending, and the part of a decoding step of so many that each further token costs."""

    def cost(self, num_sequences: int) -> float:
        """Interpolated; infinite beyond the last number."""
        for (low, before), (high, behind) in pairwise([(0, self.by_number[0][1]), *self.by_number]):
            if num_sequences <= high:
                return before + (behind - before) * (num_sequences - low) / (high - low)
        return math.inf
