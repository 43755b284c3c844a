# SPDX-License-Identifier: Apache-2.0
"""A scheduler on a device without tensors, which checks every token that a step reads. No model, and no torch."""

import itertools
import random
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.engine_config import EngineConfig, ModelTraits
from hf_triton.engine.protocols import Observer
from hf_triton.engine.recovery import Recovery
from hf_triton.engine.scheduler import Scheduler, StepOutput
from hf_triton.engine.sequence import Outcome, Sequence, SequenceGroup
from hf_triton.engine.state_pool import StatePool
from hf_triton.engine.waiting_queue import WaitingQueue
from hf_triton.errors import HfTritonError
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.image_inputs import ImageInput, PromptImages
from hf_triton.runner.step import Step, TokenRange
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import SampledToken
from tests.support.listener import Functions

CHUNK_SIZES = ChunkSizes(16, 8)
VOCABULARY = 5
PLACEHOLDER = 4
"""A token that may be sampled, too."""


def next_token(context: list[int], index: int) -> int:
    """What follows a context in a group's sequence of this index."""
    return zlib.crc32(array("q", [*context, index]).tobytes()) % VOCABULARY


class FakeBudget:
    """So many tokens: the `TokenBudget` of a memory."""

    def __init__(self, allowed: int) -> None:
        self.allowed = self.most = allowed

    def tokens(self, held: int) -> int:
        return self.allowed

    def words(self, tokens: int) -> str:
        return f"{tokens} tokens"


class FakeSampler:
    is_complete = False
    processor = None

    def __init__(self, *, needs_host: bool) -> None:
        self.needs_host = needs_host

    def accept(self, token_id: int) -> None: ...


class FakeLookup:
    """Proposes tokens of which some are right."""

    def __init__(self, sequence: Sequence, source: random.Random) -> None:
        self._sequence, self._source = sequence, source

    def follow(self, completion: list[int]) -> None: ...

    def propose(self, most: int, cost: float) -> list[int]:
        context = self._sequence.group.prompt_ids + self._sequence.token_ids
        for _ in range(self._source.randint(0, most)):
            is_right = self._source.random() < 0.7
            context.append(next_token(context, self._sequence.index) if is_right else self._source.randrange(5))
        return context[self._sequence.num_tokens :]


class FakeDevice:
    """Runs steps: remembers which token was written to each place, and checks what every token attends to.

    The next token is a function of the whole context. Beside the token, a place has the adapter, the rotary
    frequencies and the feature of an image that its keys were computed with.
    """

    def __init__(self, block_size: int, recompute_length: float, *, joins_images: bool = False) -> None:
        self.fails: Callable[[Step], bool] = lambda _: False
        """Whether a step fails after it has written its tokens."""
        self.is_nan: Callable[[Iterable[tuple[int, Any, Any]]], bool] = lambda _: False
        """Whether a full block, of which it is given the tokens and their kinds, has NaN."""
        self.is_blind: Callable[[ImageInput], bool] = lambda _: False
        """Whether the vision tower fails on an image."""
        self.towers: list[ImageInput] = []
        """The images whose features were computed, in order."""
        self.features: dict[int, bytes] = {}
        """Digests of the images whose features are kept, by number."""
        self.sequences: dict[int, Sequence] = {}
        self.num_computed = Counter[SequenceGroup]()
        """Tokens computed of each group, in the order of their first steps."""
        self._block_size = block_size
        self._recompute_length = recompute_length
        self._joins_images = joins_images
        self._contents: dict[int, dict[int, Any]] = {}  # by block and place
        self._states: dict[int, list[tuple[int, Any]]] = {}  # by slot: the tokens that it has seen, and their kinds
        self._generated: dict[int, list[int]] = {}  # by sequence, those in flight included
        self._adapters: dict[int, str | None] = {}
        self._sent: set[int] = set()  # images that have been in a step, and were not dropped since
        self._inflight: StepOutput | None = None

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id], self._generated[sequence.id] = sequence, []

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._contents.pop(block, None)

    def drop_images(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self._sent.remove(number)  # each is named once
            self.features.pop(number, None)

    def compute_image(self, image: ImageInput) -> None:
        self._sent.add(image.number)
        if self.is_blind(image):
            raise RuntimeError("the tower failed")
        if image.digest not in self.features.values():
            self.towers.append(image)
        self.features[image.number] = image.digest

    def run(self, step: Step) -> Iterator[StepOutput]:
        """As the executor does."""
        pending, self._inflight = self._inflight, None
        launched = self._launch(step, pending) if step.ranges else None
        if step.stays_inflight:
            self._inflight = launched
        if pending:
            yield pending
        if launched and not step.stays_inflight:
            yield launched

    def lose_inflight(self) -> None:
        self._inflight = None

    def _launch(self, step: Step, pending: StepOutput | None) -> StepOutput:
        for number in step.finished:
            self._adapters.pop(number, None)
        self._adapters.update((new.sequence_id, new.adapter) for new in step.admitted)
        read = [dict(self._contents[source]) for source, _ in step.block_copies]
        targets = [target for _, target in step.block_copies]
        assert len(set(targets)) == len(targets)
        self._contents.update(zip(targets, read, strict=True))
        states = {target: list(self._states[source]) for source, target in step.slot_copies}
        assert len(states) == len(step.slot_copies)
        self._states.update(states)
        for part in step.ranges:
            self._write(part, pending)
        if self.fails(step):
            raise RuntimeError("boom")
        kept = [(part.kept_slot, self._states[part.slot]) for part in step.ranges if part.kept_slot >= 0]
        assert len({slot for slot, _ in kept}) == len(kept)
        self._states.update((slot, list(state)) for slot, state in kept)
        tokens: dict[int, SampledToken] = {}
        further: dict[int, list[SampledToken]] = {}
        for part in step.ranges:
            end = part.end - part.num_drafted
            self._check(part, end)
            for number in part.samples:
                tokens[number] = token = self._sample(number, end)
            if part.num_drafted:
                further[number] = []
                for at, proposed in enumerate(part.token_ids[-part.num_drafted :], end + 1):
                    if token.token_id != proposed:
                        break
                    self._check(part, at)
                    token = self._sample(number, at)
                    further[number].append(token)
        scores: Any = {part.sequence_id: list(range(part.start, part.start + part.num_scored)) for part in step.ranges}
        finite = frozenset(block for block in step.full_blocks if not self.is_nan(self._contents[block].values()))
        return StepOutput(step, tokens, scores, finite, further)

    def _context(self, number: int) -> list[int]:
        return self.sequences[number].group.prompt_ids + self._generated[number]

    def _kind(self, part: TokenRange) -> tuple[str | None, bool]:
        return self._adapters[part.sequence_id], part.context_length >= self._recompute_length

    def _features(self, part: TokenRange) -> list[tuple[bytes, int] | None]:
        """The feature that each token's keys are to be computed with: of which image, and which one."""
        images = self.sequences[part.sequence_id].group.images
        features: list[tuple[bytes, int] | None] = [None] * part.end
        for image in images.images if images else ():
            for at, place in enumerate(image.places.tolist()):
                if place < part.end:
                    features[place] = image.digest, at
        return features

    def _read_features(self, part: TokenRange) -> list[tuple[bytes, int] | None]:
        """Those of a range's tokens, read from what is kept: `KeyError` if it is not."""
        images = self.sequences[part.sequence_id].group.images
        if images is None:
            assert part.images == ()
            assert part.positions is None
            return [None] * part.num_tokens
        by_number = {image.number: image for image in images.images}
        features: list[tuple[bytes, int] | None] = [None] * part.num_tokens
        for number in part.images:
            places = by_number[number].places.tolist()
            inside = [(at, place) for at, place in enumerate(places) if part.start <= place < part.end]
            assert inside
            assert not self._joins_images or len(inside) == len(places)
            for at, place in inside:
                features[place - part.start] = self.features[number], at
        if images.positions is None:
            assert part.positions is None
        else:
            behind = [int(images.positions.max()) + 1 + at for at in range(part.end)]
            expected = [[*axis, *behind][part.start : part.end] for axis in images.positions.tolist()]
            assert part.positions is not None
            assert part.positions.tolist() == expected
        return features

    def _write(self, part: TokenRange, pending: StepOutput | None) -> None:
        assert len(part.block_table) == -(-part.end // self._block_size)
        token_ids, kind = part.token_ids, self._kind(part)
        if not token_ids:
            assert pending is not None
            assert not self.sequences[part.sequence_id].sampler.needs_host
            token_ids = [pending.tokens[part.sequence_id].token_id]
        assert len(token_ids) == part.num_tokens > 0
        written = [(token, kind, feature) for token, feature in zip(token_ids, self._read_features(part), strict=True)]
        for position, content in enumerate(written, part.start):
            block, place = divmod(position, self._block_size)
            self._contents.setdefault(part.block_table[block], {})[place] = content
        if part.slot >= 0:
            before = self._states[part.slot] if part.start else []
            self._states[part.slot] = before + written
        self.num_computed[self.sequences[part.sequence_id].group] += part.num_tokens

    def _check(self, part: TokenRange, end: int) -> None:
        """The whole sequence is in the blocks of its table, as this sequence would compute it."""
        read = [self._contents[block].get(place) for block in part.block_table for place in range(self._block_size)]
        expected = self._context(part.sequence_id)[:end]
        features = self._features(part)[:end]
        assert read[:end] == [(token, self._kind(part), each) for token, each in zip(expected, features, strict=True)]
        assert part.slot < 0 or self._states[part.slot] == read[:end]
        assert not part.samples or self._kind(part)[1] == (end >= self._recompute_length)

    def _sample(self, number: int, end: int) -> SampledToken:
        """A token that is sampled again after a failure is the same."""
        sequence, context = self.sequences[number], self._context(number)[:end]
        token = next_token(context, sequence.index)
        self._generated[number][end - len(sequence.group.prompt_ids) :] = [token]
        return SampledToken(token)


class PreemptObserver(Observer):
    """Notes the number of running sequences in each preemption."""

    def __init__(self) -> None:
        self.preempted: list[int] = []

    def on_preempt(self, num_sequences: int) -> None:
        self.preempted.append(num_sequences)


class Simulation:
    """Requests, a scheduler, and steps after which every block is where it should be."""

    def __init__(
        self,
        max_tokens: int = 1000,
        max_sequences: int = 4,
        *,
        block_size: int = 1,
        max_kept: int = 1000,
        slot_tokens: int = 0,
        num_kept_states: int = 0,
        kept_state_tokens: int = 4096,
        spare_image_tokens: int = 4096,
        refuses: Callable[[SequenceGroup], bool] = lambda _: False,
        needs_host: Callable[[SequenceGroup], bool] = lambda _: False,
        lookup: Callable[[Sequence], Any] = lambda _: None,
        max_memory_wait_s: float = 0.0,
        eos_ids: frozenset[int] = frozenset(),
        **traits: Any,
    ) -> None:
        self.budget, self.queue, self.observer = FakeBudget(max_tokens), WaitingQueue(0.0), PreemptObserver()
        model = ModelTraits(traits.pop("chunk_sizes", CHUNK_SIZES), **traits)
        self.device = FakeDevice(block_size, model.recompute_length, joins_images=model.joins_images)
        budget: Any = self.budget
        self.memory = BlockMemory(
            budget,
            max_tokens // block_size,
            block_size,
            max_kept=max_kept,
            slot_tokens=slot_tokens,
            give_back=self.device.give_back,
            states=StatePool(max_sequences, num_kept_states),
        )
        self.outcomes: dict[SequenceGroup, Outcome] = {}
        self.scheduler = Scheduler(
            self.memory,
            self.queue,
            model,
            max_sequences=max_sequences,
            start=self._start,
            observer=self.observer,
            config=EngineConfig(
                max_memory_wait_s=max_memory_wait_s,
                kept_state_tokens=kept_state_tokens,
                spare_image_tokens=spare_image_tokens,
            ),
        )
        self.recovery = Recovery(self.scheduler, self.memory)
        self.last = Step()
        """The step before."""
        self._max_sequences = max_sequences
        self._refuses, self._needs_host, self._eos_ids, self._lookup = refuses, needs_host, eos_ids, lookup
        self._arrival_numbers = itertools.count(1)

    def _start(self, group: SequenceGroup) -> None:
        if self._refuses(group):
            group.finish(HfTritonError("invalid_parameter", "refused"))
            return
        sampler: Any = FakeSampler(needs_host=self._needs_host(group))
        group.start(lambda _: sampler, self._eos_ids, self.observer.on_admit(group), next(self._arrival_numbers))
        for sequence in group.sequences:
            self.device.add(sequence)
            sequence.lookup = self._lookup(sequence)

    def submit(
        self,
        *prompts: int | list[int],
        max_new_tokens: int = 20,
        priority: int = 0,
        adapter: Any = None,
        images: PromptImages | None = None,
        **params: Any,
    ) -> list[SequenceGroup]:
        """Queue one request with these prompts; a number stands for a prompt of that length, unlike any other."""
        sampling = SamplingParams(max_new_tokens, **params)
        groups = []
        for prompt in prompts:
            token_ids = [next(UNLIKE), *[3] * (prompt - 1)] if isinstance(prompt, int) else prompt
            groups.append(SequenceGroup(token_ids, sampling, priority=priority, adapter=adapter, images=images))
            groups[-1].listener = Functions(on_finish=partial(self.outcomes.__setitem__, groups[-1]))
        self.queue.add(groups)
        return groups

    def step(self) -> list[int]:
        """The tokens of each range that a step computes; of decoding sequences first."""
        self.last = self.scheduler.schedule()
        self.device.drop_images(self.last.dropped_images)
        for image in self.last.images:
            try:
                self.device.compute_image(image)
            except RuntimeError:
                for group in self.scheduler.features.users(image):
                    group.finish(HfTritonError("generation_failed", "the tower failed"))
        try:
            for output in self.device.run(self.last):
                self.scheduler.update(output)
        except RuntimeError as error:
            self.device.lose_inflight()
            self.recovery.recover(self.last, error)
        self.check()
        return [part.num_tokens for part in self.last.ranges]

    def steps(self, count: int) -> list[list[int]]:
        return [self.step() for _ in range(count)]

    def see(self, *parts: int | bytes, has_positions: bool = False, **options: Any) -> SequenceGroup:
        """Queue a prompt of so many tokens of text, and of images, of which each byte is a feature."""
        token_ids: list[int] = []
        images: list[ImageInput] = []
        for part in parts:
            if isinstance(part, bytes):
                places = np.arange(len(token_ids), len(token_ids) + len(part))
                images.append(ImageInput(places, {}, part.ljust(32, b".")))
                token_ids += [PLACEHOLDER] * len(part)
            else:
                token_ids += [3] * part
        positions = np.stack([np.arange(len(token_ids)), np.arange(len(token_ids)) // 2]) if has_positions else None
        (group,) = self.submit(token_ids, images=PromptImages(tuple(images), {}, positions), **options)
        return group

    def rest(self) -> None:
        """Let go of what an idle engine does; nothing is left."""
        self.device.drop_images(self.scheduler.features.take_dropped(is_idle=True))
        assert not self.device.features

    def finish(self, max_steps: int = 2000) -> list[list[int]]:
        """Step until every group has its outcome; no block is held then."""
        steps: list[list[int]] = []
        while len(self.queue) or self.scheduler.is_busy:
            steps.append(self.step())
            assert len(steps) <= max_steps, "groups without an outcome"
        assert self.memory.pool.num_held == 0
        assert not self.memory.pool.states._passing
        return steps

    def check(self) -> None:
        """A sequence holds the blocks of its tokens and no more; each block knows its holders."""
        pool, scheduler = self.memory.pool, self.scheduler
        held = [block for sequence in scheduler.running for block in sequence.blocks]
        assert pool._references == Counter([*held, *(source for source, _ in scheduler._notes.block_copies)])
        proposed = {part.sequence_id: part.num_drafted for step in scheduler._unread for part in step.ranges}
        for sequence in scheduler.running:
            num_tokens = sequence.num_computed + proposed.get(sequence.id, 0)
            assert len(sequence.blocks) == self.memory.num_blocks(num_tokens)
        assert not any(sequence.blocks for sequence in scheduler.waiting)
        assert pool.num_touched == pool.num_held + pool.num_kept + len(pool._empty) <= pool.num_blocks
        assert len(scheduler.running) <= self._max_sequences
        states = pool.states
        assert sorted([*states._free, *states._reserved, *states._kept.values()]) == list(
            range(self._max_sequences, self._max_sequences + states.num_touched)
        )
        assert states._reserved == {
            tokens.kept_slot for step in scheduler._unread for tokens in step.ranges if tokens.kept_slot >= 0
        }
        assert all(pool.find(digest) is not None for digest in states._kept)

    @property
    def computed(self) -> list[SequenceGroup]:
        """Groups in the order of their first steps."""
        return list(self.device.num_computed)

    def token_ids(self, group: SequenceGroup) -> list[list[int]]:
        outcome = self.outcomes[group]
        assert isinstance(outcome, list), outcome
        return [completion.token_ids for completion in outcome]

    def lengths(self, group: SequenceGroup) -> list[int]:
        return [len(token_ids) for token_ids in self.token_ids(group)]

    def error_code(self, group: SequenceGroup) -> str:
        outcome = self.outcomes[group]
        assert isinstance(outcome, HfTritonError), outcome
        return outcome.code


UNLIKE = itertools.count(VOCABULARY)
