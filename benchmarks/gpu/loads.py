# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked, and what is seen of it meanwhile: prompts, clients, and a meter of its steps."""

from __future__ import annotations

import math
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.protocols import Observer
from hf_triton.engine.sequence import Outcome, SequenceGroup, SequenceListener
from hf_triton.errors import CancelledError
from hf_triton.runner.lora.model_adapters import Adapter
from hf_triton.runner.step import Step
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint

MAX_WAIT_S = 120.0
MEAN_PROMPT, MEAN_NEW, DEVIATION = 220, 190, 1.0
"""Tokens of ShareGPT's conversations, about, and the deviation of their logarithms."""


class Listener(SequenceListener):
    """Calls functions."""

    def __init__(
        self,
        finish: Callable[[Outcome], object],
        note: Callable[[], None] = lambda: None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._finish, self._note, self._asks = finish, note, is_cancelled

    def is_cancelled(self) -> bool:
        return self._asks()

    def on_token(self, row: int, index: int, token_id: int, logprobs: object) -> bool:
        self._note()
        return False

    def on_finish(self, row: int, outcome: Outcome) -> None:
        self._finish(outcome)


@dataclass(frozen=True)
class Request:
    """One prompt."""

    prompt: list[int]
    params: SamplingParams
    constraint: Callable[[], Constraint] | None = None
    adapter: Adapter | None = None


def random_prompts(count: int, num_tokens: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(vocabulary, (count, num_tokens), generator=generator).tolist()
    return prompts


def mixed_requests(
    count: int,
    vocabulary: int,
    seed: int,
    *,
    max_tokens: int,
    constrained: float = 0.0,
    prefixes: Sequence[list[int]] = (),
) -> list[Request]:
    """Prompts and completions of log-normal lengths.

    Args:
        count: How many.
        vocabulary: Token ids are below.
        seed: The same gives the same, so a second load of an engine needs another, or finds its prompts in the cache.
        max_tokens: Of a prompt or a completion.
        constrained: The part whose tokens a constraint restricts.
        prefixes: Every prompt begins with one of them.
    """
    source = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, min(max_tokens, round(source.lognormvariate(math.log(mean) - DEVIATION**2 / 2, DEVIATION))))

    def request(number: int) -> Request:
        prompt = [source.randrange(vocabulary) for _ in range(length(min(MEAN_PROMPT, max_tokens)))]
        prefix = prefixes[number % len(prefixes)] if prefixes else []
        is_constrained = source.random() < constrained
        params = SamplingParams(length(min(MEAN_NEW, max_tokens)))
        return Request(prefix + prompt, params, (lambda: Alternating(vocabulary)) if is_constrained else None)

    return [request(number) for number in range(count)]


class Alternating:
    """A constraint whose masks cost nothing: even tokens and odd ones in turn. A step must wait for its last token."""

    is_complete = False

    def __init__(self, vocabulary: int) -> None:
        self._masks = [np.full(-(-vocabulary // 8), bits, np.uint8) for bits in (0b01010101, 0b10101010)]

    def bitmask(self) -> npt.NDArray[np.uint8]:
        return self._masks[0]

    def accept(self, token_id: int) -> None:
        if token_id % 2 != int(self._masks[0][0] == 0b10101010):
            raise ValueError(f"token {token_id} was banned")
        self._masks.reverse()


@dataclass
class Seen:
    """What a meter has seen since it was cleared."""

    num_steps: int = 0
    intervals_s: list[float] = field(default_factory=list)
    """Times between the beginnings of two full steps in a row."""
    read_tokens: list[int] = field(default_factory=list)
    """Tokens whose keys and values a full step reads."""
    num_live: int = 0
    """Tokens of the sequences of all steps."""
    num_held: int = 0
    """Tokens of the blocks that all steps have held."""
    num_preempted: int = 0
    num_reused: int = 0
    """Tokens found in the prefix cache."""


class Meter(Observer):
    """Stands before an engine's runner. A step is full if so many sequences as expected decode, and nothing else."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._changed = threading.Condition()
        self._num_full = 0
        self._last_s: float | None = None

    def attach(self, engine: ContinuousBatchingEngine) -> None:
        self._pool, self._block_size = engine.memory.pool, engine.memory.block_size
        self._run = engine.runner.run
        engine.runner.run = self.run  # type: ignore[assignment, method-assign]

    def clear(self, num_full: int = 0) -> None:
        with self._changed:
            self.seen, self._num_full, self._last_s = Seen(), num_full, None

    def wait(self, num_full_steps: int) -> Seen:
        """What is seen in so many full steps, from now on."""
        self.clear(self._num_full)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.seen.intervals_s) >= num_full_steps, MAX_WAIT_S):
                raise TimeoutError(f"fewer than {num_full_steps} steps of all sequences in {MAX_WAIT_S:.0f} s")
            return self.seen

    def run(self, step: Step, *inflight: Any) -> torch.Tensor:
        now_s = time.perf_counter()
        with self._changed:
            seen = self.seen
            seen.num_steps += 1
            num_tokens = sum(part.end for part in step.ranges)
            seen.num_live += num_tokens
            seen.num_held += self._pool.num_held * self._block_size
            is_full = len(step.ranges) == self._num_full and all(part.is_decode for part in step.ranges)
            if is_full and self._last_s is not None:
                seen.intervals_s.append(now_s - self._last_s)
                seen.read_tokens.append(num_tokens)
                self._changed.notify_all()
            self._last_s = now_s if is_full else None
        return self._run(step, *inflight)

    def on_preempt(self, num_sequences: int) -> None:
        self.seen.num_preempted += num_sequences

    def on_prefix_hit(self, num_tokens: int) -> None:
        self.seen.num_reused += num_tokens


@contextmanager
def decoding(
    engine: ContinuousBatchingEngine, meter: Meter, prompts: list[list[int]], params: SamplingParams
) -> Iterator[None]:
    """All prompts decode. They are prefilled before, so that none has many tokens when the last one begins."""
    run_requests(engine, [Request(prompt, SamplingParams(1)) for prompt in prompts], len(prompts))
    is_over, outcomes = threading.Event(), queue.SimpleQueue[Outcome]()
    meter.clear(len(prompts))
    listener = Listener(outcomes.put, is_cancelled=is_over.is_set)
    engine.submit([SequenceGroup(prompt, params, listener=listener) for prompt in prompts])
    try:
        yield
    finally:
        is_over.set()
        ends = [outcomes.get(timeout=MAX_WAIT_S) for _ in prompts]
    for end in ends:
        if not isinstance(end, CancelledError):
            raise RuntimeError(f"a sequence ended before it was measured: {end}")


@dataclass
class Times:
    """Times of a request's tokens, by `time.perf_counter()`."""

    submitted_s: float
    tokens_s: list[float] = field(default_factory=list)

    def note(self) -> None:
        self.tokens_s.append(time.perf_counter())


def run_requests(engine: ContinuousBatchingEngine, requests: list[Request], width: int) -> dict[str, float]:
    """`width` requests in flight, until all have ended: tokens per second, and the clients' times.

    `steady_tokens_per_s` is that of the time in which `width` are in flight, each that ends followed by another one;
    what comes behind the last of these takes `tail_s`.

    Raises:
        HfTritonError: A request failed.
    """
    room, outcomes, times = threading.Semaphore(width), queue.SimpleQueue[Outcome](), list[Times]()
    full_s = None

    def finish(outcome: Outcome) -> None:
        outcomes.put(outcome)
        room.release()

    began_s = time.perf_counter()
    for number, each in enumerate(requests):
        if number == width:
            full_s = time.perf_counter()
        room.acquire()
        times.append(Times(time.perf_counter()))
        listener = Listener(finish, note=times[-1].note)
        engine.submit(
            [
                SequenceGroup(
                    each.prompt,
                    each.params,
                    listener=listener,
                    listens_to_tokens=True,
                    constraint=each.constraint,
                    adapter=each.adapter,
                )
            ]
        )
    for _ in requests:
        outcome = outcomes.get(timeout=MAX_WAIT_S)
        if not isinstance(outcome, list):
            raise outcome
    ended_s = time.perf_counter()
    steady = {}
    if full_s is not None:
        last_s = times[-1].submitted_s
        num_tokens = sum(full_s <= at <= last_s for each in times for at in each.tokens_s)
        steady = {"steady_tokens_per_s": num_tokens / (last_s - full_s), "tail_s": ended_s - last_s}
    gaps_s = [after - before for each in times for before, after in zip(each.tokens_s, each.tokens_s[1:], strict=False)]
    return {
        "tokens_per_s": sum(len(each.tokens_s) for each in times) / (ended_s - began_s),
        **steady,
        "ttft_p50_ms": 1000 * statistics.median(each.tokens_s[0] - each.submitted_s for each in times),
        "itl_p99_ms": 1000 * float(np.quantile(gaps_s, 0.99)) if gaps_s else 0.0,
    }
