# SPDX-License-Identifier: Apache-2.0
"""A step while it is being scheduled: its tokens, its budget, and what has changed since the last one. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.block_pool import BlockPool
from hf_triton.engine.engine_config import ModelTraits
from hf_triton.engine.image_features import ImageFeatures
from hf_triton.engine.prefix_cache import PrefixCache
from hf_triton.engine.sequence import Sequence
from hf_triton.runner.image_inputs import ImageInput
from hf_triton.runner.step import AdmittedSequence, Step, TokenRange

MIN_CHUNK: Final = 3
"""Tokens of a chunk, if as many are missing: with states, neither it nor what it leaves may be one token."""


class StepNotes:
    """Sequences that have come and gone since the last step, and what the next one copies for them.

    Args:
        pool: Holds each block that is to be copied until the step is built.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.admitted: list[AdmittedSequence] = []
        self.finished: list[int] = []
        self.block_copies: list[tuple[int, int]] = []
        self.slot_copies: list[tuple[int, int]] = []
        self._pool = pool

    def copy_block(self, source: int, target: int) -> None:
        self._pool.share(source)
        self.block_copies.append((source, target))

    def leave(self, sequence: Sequence) -> None:
        """A sequence loses its blocks and its slot, so nothing is copied into them."""
        dropped = [pair for pair in self.block_copies if pair[1] in sequence.blocks]
        self._pool.release([source for source, _ in dropped])
        self.block_copies = [pair for pair in self.block_copies if pair not in dropped]
        self.slot_copies = [pair for pair in self.slot_copies if pair[1] != sequence.slot]
        self.admitted = [new for new in self.admitted if new.sequence_id != sequence.id]
        self.finished.append(sequence.id)


class StepDraft:
    """The ranges of a step, to which decoding sequences are added first."""

    def __init__(self, traits: ModelTraits, features: ImageFeatures) -> None:
        self.ranges: dict[Sequence, TokenRange] = {}
        self.num_left = 0
        """Tokens of chunks that the step has room for yet."""
        self.wait_s = 0.0
        """Seconds to wait in place of a step."""
        self.awaiting: set[int] = set()
        """Sequences that sit out the next step, once this one is built."""
        self.image: ImageInput | None = None
        """The one whose features it computes."""
        self._blind: set[Sequence] = set()  # whose chunks wait for features
        self._traits = traits
        self._features = features
        self._budget = 0  # tokens of chunks that it may compute in all
        self._is_decoding = False
        self._proposal_cost = math.inf

    def begin_chunks(self) -> None:
        """What is added from now on are chunks of contexts, within a budget."""
        self._is_decoding = bool(self.ranges)
        self._budget = self.num_left = self._traits.chunk_sizes.budget(len(self.ranges))

    def chunk_size(self, sequence: Sequence) -> int:
        """Tokens of a context's next chunk; 0: its turn comes later.

        A chunk waits for the features of its images. A vision tower cannot be cut, so a step runs it for one image at
        most, and computes as many fewer tokens of chunks.
        """
        size, group = self._chunk_size(sequence), sequence.group
        if group.images is None or not size:
            return size
        if sequence in self._blind:  # less room than it was asked with would be no reason to cut it
            return 0
        start = sequence.num_computed
        images = group.images.among(start, start + size)
        missing = [image for image in images if image is self.image or not self._features.has(group, image)]
        if missing:
            self._blind.add(sequence)
            if self.image is None:
                self.image = missing[0]
                self._features.add(group, self.image)
                self.num_left = max(0, self.num_left - len(self.image.places))
            return 0
        return max([size, *(image.end - start for image in images)]) if self._traits.joins_images else size

    def _chunk_size(self, sequence: Sequence) -> int:
        """The same for text."""
        traits, missing = self._traits, sequence.num_missing
        if traits.prefills_whole:
            return missing if missing <= self.num_left or self.num_left == self._budget else 0
        cut = next((end for end in sequence.cuts if end > sequence.num_computed), None)
        if cut is not None:
            missing = min(missing, cut - sequence.num_computed)
        share = traits.chunk_sizes.share(is_decoding=self._is_decoding, num_cached=sequence.num_computed)
        size = min(missing, self.num_left, max(MIN_CHUNK, int(self.num_left * share)))
        if traits.has_states and size < missing:  # a chunk of one token would be taken for a decoding step
            size -= missing - size == 1
            size = size if size > 1 else 0
        return size

    def add(self, sequence: Sequence, num_tokens: int, kept_slot: int) -> None:
        """Compute a sequence's next tokens; behind the last one of its context, the token that follows is sampled."""
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        num_top, num_scored = None, 0
        if sequence.wants_scores:
            num_scored = max(0, min(end, len(sequence.group.prompt_ids) - 1) - start)
            num_top = sequence.group.params.prompt_logprobs if num_scored else None
        samples: list[int] = []
        if num_tokens == sequence.num_missing:
            for sampling in (sequence, *sequence.siblings):
                sampling.num_inflight += 1
                samples.append(sampling.id)
        images = sequence.group.images
        self.ranges[sequence] = TokenRange(
            sequence_id=sequence.id,
            start=start,
            end=end,
            token_ids=sequence.tokens(start, end),
            block_table=sequence.blocks[:],
            context_length=sequence.num_tokens,
            samples=tuple(samples),
            num_top_logprobs=num_top,
            num_scored=num_scored,
            slot=sequence.slot,
            kept_slot=kept_slot,
            images=tuple(image.number for image in images.among(start, end)) if images else (),
            positions=images.positions_of(start, end) if images else None,
        )
        sequence.num_computed = end
        self.num_left = max(0, self.num_left - num_tokens)

    def add_proposals(self, memory: BlockMemory, running: Collection[Sequence]) -> None:
        """Compute what decoding sequences propose, where their own blocks and free ones have room.

        A step that is scheduled while they are in flight finds the blocks that running sequences need then.

        None goes past the length at which keys are computed anew.
        """
        costs = self._traits.proposals
        if costs is None or (cost := costs.cost(len(running))) >= 1:
            return
        self._proposal_cost = cost
        pool, num_needed = memory.pool, 0
        if self._traits.runs_ahead:
            ends = [(each, each.num_tokens + each.num_inflight) for each in running]
            num_needed = sum([max(0, memory.num_blocks(end) - len(each.blocks)) for each, end in ends])
        for sequence, part in self.ranges.items():
            if not part.is_decode or not part.token_ids or part.samples != (sequence.id,):
                continue
            room = (len(sequence.blocks) + max(0, pool.num_free - num_needed)) * memory.block_size - part.end
            num_short = self._traits.recompute_length - 1 - sequence.num_tokens
            most = min(costs.most, room, num_short if num_short >= 0 else math.inf)
            if not (proposal := sequence.propose(int(most), cost)):
                continue
            end, images = part.end + len(proposal), sequence.group.images
            while len(sequence.blocks) < memory.num_blocks(end):
                sequence.blocks.append(pool.allocate())
            self.ranges[sequence] = part._replace(
                end=end,
                token_ids=[*part.token_ids, *proposal],
                block_table=sequence.blocks[:],
                num_drafted=len(proposal),
                positions=images.positions_of(part.start, end) if images else None,
            )

    def remove(self, sequence: Sequence) -> TokenRange | None:
        """Take back what was added of a sequence that is preempted; what it was to sample is not in flight."""
        tokens = self.ranges.pop(sequence, None)
        if tokens and tokens.samples:
            for sampling in (sequence, *sequence.siblings):
                sampling.num_inflight -= 1
        return tokens

    @property
    def cuts_context(self) -> bool:
        """Whether a context has its rest in later steps, or waits for its image's features."""
        return self.image is not None or not all(tokens.samples for tokens in self.ranges.values())

    def build(self, notes: StepNotes, prefixes: PrefixCache) -> Step:
        """The step, with what has changed since the last one; one without ranges may say how long to wait."""
        images, dropped = (self.image,) if self.image else (), self._features.take_dropped()
        if not self.ranges:
            return Step(images=images, dropped_images=dropped, wait_s=0.0 if images else self.wait_s)
        ranges = list(self.ranges.values())
        if len(ranges) > 1:
            ranges.sort(key=lambda tokens: (not tokens.is_decode, tokens.slot))
        return Step(
            ranges=tuple(ranges),
            admitted=tuple(notes.admitted),
            finished=tuple(notes.finished),
            block_copies=tuple(notes.block_copies),
            full_blocks=tuple(prefixes.full_blocks(ranges)),
            slot_copies=tuple(notes.slot_copies),
            images=images,
            dropped_images=dropped,
            stays_inflight=self._traits.runs_ahead and self._can_run_ahead(),
        )

    def _can_run_ahead(self) -> bool:
        """Whether the next step is scheduled before the tokens of this one are read; decides who sits it out.

        That hides the host's work, but a sequence that sits out loses a step: half of those that sample may.
        """
        if any(sequence.wants_scores or (sequence.siblings and sequence.num_inflight) for sequence in self.ranges):
            return False
        going_on = [sequence for sequence in self.ranges if sequence.num_missing]
        sampling = [sequence for sequence in going_on if sequence.num_inflight]
        awaiting = {sequence.id for sequence in sampling if self._must_be_read(sequence)}
        if not going_on or 2 * len(awaiting) > len(sampling):
            return False
        self.awaiting = awaiting
        return True

    def _must_be_read(self, sequence: Sequence) -> bool:
        """Whether the host must see a sequence's tokens in flight before the next one is computed."""
        num_tokens = sequence.num_tokens + sequence.num_inflight
        if sequence.sampler.needs_host or num_tokens == self._traits.recompute_length:
            return True
        return self._proposal_cost < 1 and (
            self.ranges[sequence].num_drafted > 0 or bool(sequence.propose(1, self._proposal_cost))
        )
