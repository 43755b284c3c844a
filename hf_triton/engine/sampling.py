# SPDX-License-Identifier: Apache-2.0
"""The next token of every row in one go, a different setting in each. Knows no model and no cache.

Scores go through transformers' own steps in its own order (`_get_logits_processor`, transformers 5.23): logit bias,
repetition penalty, n-grams, bad words, shortest length; then, where a row draws, temperature, top_k, top_p, min_p and
typical_p. Presence and frequency penalties, which transformers does not have, follow the repetition penalty, and a
row's constraint follows the bans. Every limit is a score of the row's own, and tokens of just that score are kept: what
a row draws depends on no other row.

Picking changes nothing, `RowSampler.note` does: a step that failed after its picks is simply picked again, and a row
that depends on its scores alone is picked for before the host has seen its last token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch

from hf_triton.engine.history import Array, TextHistory
from hf_triton.engine.interface import Constraint, LogitsProcessor, TokenLogprobs
from hf_triton.generation import SamplingPlan
from hf_triton.runner.transfer import ToHost, array_to_device, to_device

FIRST_CANDIDATES: Final = 128  # a language model's nucleus is rarely larger; sorting a vocabulary on a CPU takes long
CANDIDATES_GROWTH: Final = 8
MAX_LOGPROB_SCORES: Final = 2**24  # a long prompt's log probabilities at once would be gigabytes


@dataclass(frozen=True)
class Pick:
    """A row's next token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Where the row's plan wants them (`num_top_logprobs`)."""


class RowSampler:
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
        plan: SamplingPlan,
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
        self.history = TextHistory(plan, prompt_ids, eos_ids)
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
            num_ahead: Picks before this one that were not noted yet.
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

    def settle(self, token_id: int) -> int:
        """The token, or another one where the row's constraint wants it."""
        return self.constraint.settle(token_id) if self.constraint else token_id

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


class Picks:
    """The next token of every row, on the device and on its way to the host.

    A row in which every token is banned takes its end-of-sequence token (the lowest id of several), were it banned
    itself, and the model's likeliest token where it has none. A row of NaN takes some token. A constraint is never
    broken: where bans leave none of the tokens that it allows, or where the text could not be ended any more behind the
    token that was picked, the row takes the next one of those that end it.

    Args:
        logits: `[rows, vocabulary]`, any float dtype and device; must stay as they are until `read` where a row wants
            log probabilities.
        rows: One for each row of `logits`.
        num_ahead: Picks of these rows before this one that were not noted yet; 0 where any of them needs the host.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[RowSampler], num_ahead: int = 0) -> None:
        self._rows = rows
        self._logits = logits if any(row.plan.num_top_logprobs is not None for row in rows) else None
        if all(row.is_plain for row in rows):
            self.tokens = logits.argmax(-1)
        else:
            self.tokens = _choose(edit_scores(logits, rows), rows, num_ahead)
        """`[rows]` int64, as constraints find them."""
        self._copy = ToHost(self.tokens)

    def read(self) -> list[Pick]:
        """As constraints settle them; the one place where the host waits for the device."""
        token_ids = [row.settle(token_id) for row, token_id in zip(self._rows, self._copy.tolist(), strict=True)]
        logprobs = {} if self._logits is None else _logprobs_of_rows(self._logits, token_ids, self._rows)
        return [Pick(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]


def pick_tokens(logits: torch.Tensor, rows: Sequence[RowSampler]) -> list[Pick]:
    """The next token of every row, once it is on the host; see `Picks`."""
    return Picks(logits, rows).read()


def _choose(scores: torch.Tensor, rows: Sequence[RowSampler], num_ahead: int) -> torch.Tensor:
    """The token id of each row of edited scores, on their device."""
    drawing = [index for index, row in enumerate(rows) if row.plan.do_sample]
    if len(drawing) == len(rows):
        return _draw(scores.float(), rows, num_ahead)
    tokens = scores.argmax(-1)
    if drawing:
        index = _index(drawing, scores.device)
        tokens[index] = _draw(scores[index].float(), [rows[each] for each in drawing], num_ahead)
    return tokens


def _draw(scores: torch.Tensor, rows: Sequence[RowSampler], num_ahead: int) -> torch.Tensor:
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


# --- processors ------------------------------------------------------------------------------------------------------


def edit_scores(logits: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    """The scores after biases, penalties and bans, `[rows, vocabulary]`.

    Returns:
        float32, or `logits` itself where no row has any. Banned tokens are at minus infinity, never all of a row.
    """
    if not any(row.edits_scores for row in rows):
        return logits
    histories = [row.history for row in rows]
    size = logits.shape[1]
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = scores.view(-1)
    places, biases = _flattened([history.biases() for history in histories], size, scores.device)
    flat.index_add_(0, places, biases)
    places, factors, subtrahends = _flattened([history.penalties() for history in histories], size, scores.device)
    before = flat[places]
    flat[places] = torch.where(before < 0, before * factors, before / factors) - subtrahends
    (places,) = _flattened([(history.banned_ids(),) for history in histories], size, scores.device)
    if len(places):
        flat.index_fill_(0, places, -torch.inf)
    processed = [index for index, row in enumerate(rows) if row.processor]
    for index in processed:
        scores[index] = rows[index].process(scores[index])
    is_masked = _apply_masks(scores, rows)
    if is_masked or processed or len(places):
        _leave_a_way_out(scores, logits, rows)
    return scores


def _flattened(parts: Sequence[tuple[Array, ...]], size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Every row's ids as places in the flattened scores, and the numbers that belong to them.

    Args:
        parts: Of each row its ids and columns of numbers, all `[ids]`. An id from `size` on is passed over: a prompt
            may hold tokens that the model cannot write.
        size: The vocabulary.
        device: Where to.
    """
    ids, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    places = ids + np.repeat(np.arange(len(parts)) * size, [len(part[0]) for part in parts])
    is_written = ids < size
    return tuple(array_to_device(column[is_written], device) for column in (places, *columns))


def _apply_masks(scores: torch.Tensor, rows: Sequence[RowSampler]) -> bool:
    """Leave of each row only what its constraint allows; whether there is any constraint."""
    masks = {index: row.constraint.mask() for index, row in enumerate(rows) if row.constraint}
    if not masks:
        return False
    size = scores.shape[1]
    packed = np.zeros((len(masks), -(-size // 8)), np.uint8)
    for place, mask in enumerate(masks.values()):
        packed[place, : len(mask)] = mask[: packed.shape[1]]
    index = _index(list(masks), scores.device)
    weights = to_device([1 << bit for bit in range(8)], torch.uint8, scores.device)
    is_banned = (array_to_device(packed, scores.device).unsqueeze(-1) & weights) == 0
    scores[index] = scores[index].masked_fill_(is_banned.view(len(masks), -1)[:, :size], -torch.inf)
    return True


def _leave_a_way_out(scores: torch.Tensor, logits: torch.Tensor, rows: Sequence[RowSampler]) -> None:
    """Give a row in which every token is banned its only one: see `pick_tokens`."""
    ends = [row.way_out(scores.shape[1]) for row in rows]
    ways_out = _column([-1 if end is None else end for end in ends], scores.device, torch.int64)
    if None in ends:
        ways_out = torch.where(ways_out < 0, logits.argmax(-1, keepdim=True), ways_out)
    is_stuck = scores.amax(-1, keepdim=True) == -torch.inf
    scores.scatter_(1, ways_out, scores.gather(1, ways_out).masked_fill(is_stuck, 0.0))


# --- warpers ---------------------------------------------------------------------------------------------------------


def warp_scores(scores: torch.Tensor, plans: Sequence[SamplingPlan]) -> torch.Tensor:
    """The scores that rows draw from, minus infinity for what they may not draw.

    Args:
        scores: `[rows, vocabulary]`, float32, after `edit_scores`.
        plans: One for each row; `do_sample` is not looked at.
    """
    if any(plan.temperature != 1.0 for plan in plans):
        scores = scores / _column([plan.temperature for plan in plans], scores.device)
    if any(plan.top_k or plan.top_p < 1.0 or plan.min_p for plan in plans):
        scores = scores.masked_fill(scores < _floors(scores, plans), -torch.inf)
    typical = [index for index, plan in enumerate(plans) if plan.typical_p < 1.0]
    if typical:
        index = _index(typical, scores.device)
        mass = _column([plans[each].typical_p for each in typical], scores.device)
        scores = scores.index_copy(0, index, _keep_typical(scores[index], mass))
    return scores


def _floors(scores: torch.Tensor, plans: Sequence[SamplingPlan]) -> torch.Tensor:
    """The lowest score that top_k, top_p and min_p leave each row, `[rows, 1]`."""
    size = scores.shape[1]
    floors = torch.full_like(scores[:, :1], -torch.inf)
    by_top_k = [index for index, plan in enumerate(plans) if 0 < plan.top_k < size]
    by_top_p = [index for index, plan in enumerate(plans) if not 0 < plan.top_k < size and plan.top_p < 1.0]
    for indices, find_floors in ((by_top_k, _top_k_floors), (by_top_p, _top_p_floors)):
        if indices:
            index = _index(indices, scores.device)
            floors[index] = find_floors(scores[index], [plans[each] for each in indices])
    if any(plan.min_p for plan in plans):
        min_p = _column([plan.min_p for plan in plans], scores.device)
        floors = floors.maximum(scores.amax(-1, keepdim=True) + min_p.log())
    return floors


def _top_k_floors(scores: torch.Tensor, plans: Sequence[SamplingPlan]) -> torch.Tensor:
    """The lowest score of top_k, and of top_p among what that leaves."""
    sizes = _column([plan.top_k for plan in plans], scores.device, torch.int64)
    ordered = scores.topk(max(plan.top_k for plan in plans)).values
    floors = ordered.gather(1, sizes - 1)
    if all(plan.top_p == 1.0 for plan in plans):
        return floors
    normalisers = scores.masked_fill(scores < floors, -torch.inf).logsumexp(-1, keepdim=True)
    top_p = _column([plan.top_p if plan.top_p < 1.0 else torch.inf for plan in plans], scores.device, torch.float64)
    return floors.maximum(_nucleus_floors(ordered, normalisers, top_p))


def _top_p_floors(scores: torch.Tensor, plans: Sequence[SamplingPlan]) -> torch.Tensor:
    """The lowest score of top_p among all tokens."""
    normalisers = scores.logsumexp(-1, keepdim=True)
    top_p = _column([plan.top_p for plan in plans], scores.device, torch.float64)
    return _nucleus_floors(_likeliest(scores, normalisers, top_p), normalisers, top_p)


def _nucleus_floors(ordered: torch.Tensor, normalisers: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The lowest score among the likeliest tokens whose probabilities add up to `top_p` (Holtzman et al. 2020).

    Args:
        ordered: `[rows, candidates]`, descending.
        normalisers: `[rows, 1]`, a token's log probability is its score less this.
        top_p: `[rows, 1]`, float64.
    """
    probabilities = (ordered - normalisers).double().exp()
    is_kept = probabilities.cumsum(-1) - probabilities < top_p
    return ordered.gather(1, is_kept.sum(-1, keepdim=True).clamp(min=1) - 1)  # none only for NaN


def _likeliest(scores: torch.Tensor, normalisers: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The highest scores in descending order, so many that every row's nucleus is among them.

    A GPU sorts the vocabulary sooner than the host could look at a part of it.
    """
    count = FIRST_CANDIDATES
    while scores.device.type == "cpu" and count < scores.shape[1]:
        ordered = scores.topk(count).values
        mass = (ordered - normalisers).double().exp().sum(-1, keepdim=True)
        if bool((mass > top_p + 1e-5).all()):  # float32 normalisers err by less
            return ordered
        count *= CANDIDATES_GROWTH
    return scores.sort(descending=True).values


def _keep_typical(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose surprise is closest to the entropy, up to a probability of `mass` (Meister et al. 2022)."""
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -(logprobs * probabilities).nansum(-1, keepdim=True)
    distance = (logprobs + entropy).abs()
    ordered, order = distance.sort(-1)
    cumulative = probabilities.gather(1, order).cumsum(-1, dtype=torch.float64)
    last = (cumulative < mass).sum(-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    return scores.masked_fill(distance > ordered.gather(1, last), -torch.inf)


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One number a row, `[rows, 1]`."""
    return to_device(values, dtype, device).unsqueeze(1)


def _index(places: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(places, torch.int64, device)


# --- log probabilities -----------------------------------------------------------------------------------------------


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """How likely each token is by the logits before it.

    Args:
        logits: `[tokens, vocabulary]`, any float dtype and device.
        token_ids: One for each row of `logits`. A token that the model has no logit for is at minus infinity.
        num_top: Likeliest tokens to give beside it, cut to the vocabulary.
    """
    return _token_logprobs(logits, token_ids, [num_top] * len(token_ids))


def _logprobs_of_rows(
    logits: torch.Tensor, token_ids: Sequence[int], rows: Sequence[RowSampler]
) -> dict[int, TokenLogprobs]:
    """Those of the rows that want them, by row."""
    wanted = {index: num for index, row in enumerate(rows) if (num := row.plan.num_top_logprobs) is not None}
    if not wanted:
        return {}
    index = _index(list(wanted), logits.device)
    found = _token_logprobs(logits[index], [token_ids[each] for each in wanted], list(wanted.values()))
    return dict(zip(wanted, found, strict=True))


def _token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    size = logits.shape[1]
    most = min(max(num_top, default=0), size)
    tokens = _column(token_ids, logits.device, torch.int64)
    rows_at_once = max(1, MAX_LOGPROB_SCORES // size)
    parts = zip(torch.split(logits, rows_at_once), torch.split(tokens, rows_at_once), strict=True)
    table = torch.cat([_logprob_table(*part, most) for part in parts]).tolist()
    return [
        TokenLogprobs(token_id, row[0], tuple((int(row[1 + most + n]), row[1 + n]) for n in range(min(num, most))))
        for token_id, num, row in zip(token_ids, num_top, table, strict=True)
    ]


def _logprob_table(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """In float64, which holds token ids too, `[tokens, 1 + 2 * most]`: the token's, the highest, and whose they are."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    own = logprobs.gather(1, tokens.clamp(max=logits.shape[1] - 1)).masked_fill(tokens >= logits.shape[1], -torch.inf)
    top = logprobs.topk(most)
    return torch.cat([own.double(), top.values.double(), top.indices.double()], dim=-1)
