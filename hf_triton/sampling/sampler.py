# SPDX-License-Identifier: Apache-2.0
"""The next token of every row in one go, a different setting in each: edited, warped where a row draws, and picked.

Sampling changes no state, `SequenceSampler.note` does: a step that fails after sampling is sampled again, and a row
that depends on its scores alone is sampled before the host has seen its last token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hf_triton.runner.transfer import ToHost, array_to_device, to_index
from hf_triton.sampling.edits import edit_scores
from hf_triton.sampling.history import TokenHistory
from hf_triton.sampling.logprobs import table_of_logprobs
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint, LogitsProcessor, TokenLogprobs
from hf_triton.sampling.warp import warp_scores


@dataclass(frozen=True)
class SampledToken:
    """A row's next token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Where the row's plan wants them (`num_top_logprobs`)."""


class SequenceSampler:
    """How one row picks its tokens: its settings, what it has seen, and a random stream of its own.

    Args:
        plan: The prompt's settings.
        copy: Which of the prompt's `num_rows` texts this is; each has a stream of its own.
        prompt_ids: The prompt's token ids.
        eos_ids: The tokens that end a text.
        constraint: What this text may hold; None: anything.
        processor: What else changes its scores.
    """

    def __init__(
        self,
        plan: SamplingParams,
        copy: int,
        prompt_ids: Sequence[int],
        eos_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
        processor: LogitsProcessor | None = None,
    ) -> None:
        self.plan = plan
        self.constraint = constraint
        self.processor = processor
        self._token_ids = list(prompt_ids) if processor else []
        self.history = TokenHistory(plan, prompt_ids, eos_ids)
        self.is_plain = not (plan.do_sample or self.edits_scores or plan.num_top_logprobs is not None)
        """Whether it takes the model's likeliest token and nothing else is wanted."""
        self._copy = copy
        self._keys: deque[int] = deque()

    @cached_property
    def _stream(self) -> np.random.Generator:
        """Philox's streams differ by key (Salmon 2011)."""
        seed = self.plan.seed
        return np.random.Generator(np.random.Philox(key=None if seed is None else seed + (self._copy << 64)))

    @property
    def edits_scores(self) -> bool:
        """Whether its tokens are not simply those of the model's scores."""
        return self.constraint is not None or self.processor is not None or self.history.edits_scores

    @property
    def needs_host(self) -> bool:
        """Whether the host must have seen its last token before the next one is picked."""
        return self.edits_scores or self.plan.num_top_logprobs is not None

    def key(self, num_ahead: int = 0) -> int:
        """Decides a draw; 64 bits. One for each token, so the stream keeps step with the text.

        Args:
            num_ahead: SampledTokens before this one that were not noted yet.
        """
        while len(self._keys) <= num_ahead:
            self._keys.append(int(self._stream.integers(2**64, dtype=np.uint64)))
        return self._keys[num_ahead]

    def way_out(self, vocabulary_size: int) -> int | None:
        """The token that comes where all are banned; None: the model's likeliest."""
        return self.constraint.closing()[0] if self.constraint else self.history.first_eos_id(vocabulary_size)

    def closing(self) -> list[int]:
        """What the text needs to be whole, end-of-sequence included; nothing where it may hold anything."""
        return self.constraint.closing() if self.constraint else []

    def resolve_sampling_params(self, token_id: int) -> int:
        """The token, or another one where the row's constraint wants it."""
        return self.constraint.resolve_sampling_params(token_id) if self.constraint else token_id

    def process(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[vocabulary]` float32 by the row's own processor."""
        return self.processor(list(self._token_ids), scores) if self.processor else scores

    def note(self, token_id: int) -> None:
        """A token was picked for this row; to be called once for each, end-of-sequence included."""
        if self.constraint:
            self.constraint.accept(token_id)  # may fail: nothing else is noted then
        self.history.append(token_id)
        if self.processor:
            self._token_ids.append(token_id)
        if self.plan.do_sample:
            self.key()
            self._keys.popleft()


class SampledTokens:
    """The next token of every row, on the device and on its way to the host.

    A row in which every token is banned takes its end-of-sequence token (the lowest id of several), were it banned
    itself, and the model's likeliest token where it has none. A row of NaN takes some token. A constraint is never
    broken: where bans leave none of the tokens that it allows, or where the text could not be ended any more behind the
    token that was picked, the row takes the next one of those that end it.

    Args:
        logits: `[rows, vocabulary]`, any float dtype and device; must stay as they are until `read` where a row wants
            log probabilities.
        rows: One for each row of `logits`.
        num_ahead: Tokens of these rows sampled before this one and not yet noted; 0 if any row needs the host.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[SequenceSampler], num_ahead: int = 0) -> None:
        self._rows = rows
        self._logits = logits if any(row.plan.num_top_logprobs is not None for row in rows) else None
        if all(row.is_plain for row in rows):
            self.tokens = logits.argmax(-1)
        else:
            self.tokens = _choose(edit_scores(logits, rows), rows, num_ahead)
        """`[rows]` int64, as constraints find them."""
        self._copy = ToHost(self.tokens)

    def read(self) -> list[SampledToken]:
        """As constraints settle them; the one place where the host waits for the device."""
        token_ids = [
            row.resolve_sampling_params(token_id) for row, token_id in zip(self._rows, self._copy.tolist(), strict=True)
        ]
        logprobs = {} if self._logits is None else _logprobs_of_rows(self._logits, token_ids, self._rows)
        return [SampledToken(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]


def sample_tokens(logits: torch.Tensor, rows: Sequence[SequenceSampler]) -> list[SampledToken]:
    """The next token of every row, once it is on the host; see `SampledTokens`."""
    return SampledTokens(logits, rows).read()


def _choose(scores: torch.Tensor, rows: Sequence[SequenceSampler], num_ahead: int) -> torch.Tensor:
    """The token id of each row of edited scores, on their device."""
    drawing = [index for index, row in enumerate(rows) if row.plan.do_sample]
    if len(drawing) == len(rows):
        return _draw(scores.float(), rows, num_ahead)
    tokens = scores.argmax(-1)
    if drawing:
        index = to_index(drawing, scores.device)
        tokens[index] = _draw(scores[index].float(), [rows[each] for each in drawing], num_ahead)
    return tokens


def _draw(scores: torch.Tensor, rows: Sequence[SequenceSampler], num_ahead: int) -> torch.Tensor:
    """Draw a token id for each row of `scores`, `[rows, vocabulary]` float32, by the Gumbel-max trick (Gumbel 1954).

    The highest of score and noise is a draw from the softmax. Noise is each token's own: where rounding moves scores by
    1e-6, as the shape of a batch does, about one draw in a million comes out otherwise. Along cumulative probabilities
    each token behind would move as well, and a hundred times as many would. What is at minus infinity is never drawn.
    """
    warped = warp_scores(scores, [row.plan for row in rows])
    noise = _gumbel([row.key(num_ahead) for row in rows], scores.shape[1], scores.device)
    return (warped + noise).argmax(-1)


def _gumbel(keys: Sequence[int], size: int, device: torch.device) -> torch.Tensor:
    """Noise `[rows, size]` of Gumbel's distribution, by a row's key of 64 bits and the place alone.

    Places are hashed by the rounds of Wellons's lowbias32 (2018), the key's halves put in before and between.
    """
    halves = np.array(keys, np.uint64).view(np.int32).reshape(-1, 2)
    first, second = array_to_device(np.ascontiguousarray(halves.T), device).unsqueeze(-1)
    bits: torch.Tensor = torch.arange(size, dtype=torch.int32, device=device) + first
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= second
    bits ^= bits >> 15
    bits *= 0x846CA68B - 2**32
    bits ^= bits >> 16
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # precise where it is high


def _logprobs_of_rows(
    logits: torch.Tensor, token_ids: Sequence[int], rows: Sequence[SequenceSampler]
) -> dict[int, TokenLogprobs]:
    """Those of the rows that want them, by row."""
    wanted = {index: num for index, row in enumerate(rows) if (num := row.plan.num_top_logprobs) is not None}
    if not wanted:
        return {}
    index = to_index(list(wanted), logits.device)
    found = table_of_logprobs(logits[index], [token_ids[each] for each in wanted], list(wanted.values()))
    return dict(zip(wanted, found, strict=True))
