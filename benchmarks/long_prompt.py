# SPDX-License-Identifier: Apache-2.0
"""What a long prompt does to running sequences: `python benchmarks/long_prompt.py`.

Four sequences of 300 tokens are decoding when a prompt of 8,000 tokens arrives. It is prefilled at once, in chunks of
512 tokens, and in the engine's own chunks, which get shorter as attention gets longer, in the same run. Measured are
the gaps between two tokens of a running sequence. Wall time, which a busy machine disturbs, except for `cpu`. The model
is that of `engine.py`.

    longest  the longest gap between two tokens of a running sequence, seconds
    cpu      the longest gap in CPU seconds of the engine's thread
    prefill  the median gap during the prefill; none if no sequence got a token meanwhile
    median   the median gap of the whole run
    first    from the prompt's arrival to its first token, seconds
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import torch
import transformers
from engine import VOCABULARY, build_packed_model
from folders import processor

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.sequence import Outcome, SequenceGroup, SequenceListener
from hf_triton.errors import HfTritonError
from hf_triton.runner import device
from hf_triton.sampling.params import SamplingParams

NUM_RUNNING = 4
NUM_TOKENS = 300
NUM_TOKENS_BEFORE = 50
"""Tokens of each running sequence when the long prompt arrives."""
PROMPT_TOKENS = 8000
WAIT_S = 600.0


@dataclass(frozen=True)
class Figures:
    """Gaps of one run."""

    chunks: str
    longest_s: float
    longest_cpu_s: float
    prefill_s: float | None
    median_s: float
    first_s: float


class Generation(SequenceListener):
    """A running sequence, and when its tokens came."""

    def __init__(self, prompt: list[int], max_new_tokens: int) -> None:
        self.times_s: list[float] = []
        self.cpu_times_s: list[float] = []
        self._came = threading.Condition()
        self._outcome: Outcome | None = None
        self.sequence = SequenceGroup(prompt, SamplingParams(max_new_tokens), listener=self, listens_to_tokens=True)

    def on_token(self, row: int, index: int, token_id: int, logprobs: object) -> bool:
        with self._came:
            self.times_s.append(time.perf_counter())
            self.cpu_times_s.append(time.thread_time())
            self._came.notify()
        return False

    def on_finish(self, row: int, outcome: Outcome) -> None:
        with self._came:
            self._outcome = outcome
            self._came.notify()

    def wait_for(self, num_tokens: int) -> None:
        """Return when the sequence has this many tokens.

        Raises:
            HfTritonError: It was refused.
        """
        with self._came:
            if not self._came.wait_for(lambda: len(self.times_s) >= num_tokens or self._outcome is not None, WAIT_S):
                raise TimeoutError(f"no token {num_tokens} within {WAIT_S:.0f} s")
        if isinstance(self._outcome, HfTritonError):
            raise self._outcome


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(length)]


@contextmanager
def chunks_of(num_tokens: int) -> Iterator[None]:
    """Make the engine prefill this many tokens at a time."""
    before = device.CHUNK_SIZES["cpu"]
    device.CHUNK_SIZES["cpu"] = replace(
        before, max_tokens=num_tokens, max_tokens_decoding=num_tokens, long_context=math.inf
    )
    try:
        yield
    finally:
        device.CHUNK_SIZES["cpu"] = before


def measure(model: transformers.PreTrainedModel, chunks: str) -> Figures:
    source = random.Random(0)
    running = [Generation(random_prompt(source, 32), NUM_TOKENS) for _ in range(NUM_RUNNING)]
    late = Generation(random_prompt(source, PROMPT_TOKENS), 8)
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=NUM_RUNNING + 1))
    try:
        engine.submit([generation.sequence for generation in running])
        for generation in running:
            generation.wait_for(NUM_TOKENS_BEFORE)
        arrived_s = time.perf_counter()
        engine.submit([late.sequence])
        late.wait_for(1)
        for generation in running:
            generation.wait_for(NUM_TOKENS)
    finally:
        engine.close()
    first_s = late.times_s[0]
    pairs = [pair for generation in running for pair in itertools.pairwise(generation.times_s)]
    gaps = [after - before for before, after in pairs]
    cpu_gaps = [
        after - before for generation in running for before, after in itertools.pairwise(generation.cpu_times_s)
    ]
    prefill = [after - before for before, after in pairs if arrived_s < after < first_s]
    return Figures(
        chunks,
        longest_s=max(gaps),
        longest_cpu_s=max(cpu_gaps),
        prefill_s=statistics.median(prefill) if prefill else None,
        median_s=statistics.median(gaps),
        first_s=first_s - arrived_s,
    )


@click.command()
@click.option("--threads", default=1, show_default=True, help="Threads that torch computes with.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(threads: int, out: Path | None) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = build_packed_model(context_length=PROMPT_TOKENS + 1000)
    with chunks_of(PROMPT_TOKENS):
        rows = [measure(model, "one")]
    with chunks_of(512):
        rows.append(measure(model, "512"))
    rows.append(measure(model, "engine"))
    print(f"{'chunks':>6}{'longest':>10}{'cpu':>10}{'prefill':>10}{'median':>10}{'first':>10}   (seconds)")
    for row in rows:
        prefill = "none" if row.prefill_s is None else f"{row.prefill_s:.3f}"
        print(
            f"{row.chunks:>6}{row.longest_s:>10.3f}{row.longest_cpu_s:>10.3f}{prefill:>10}"
            f"{row.median_s:>10.3f}{row.first_s:>10.2f}"
        )
    if out is not None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cpu": processor()}
        figures = {"versions": versions, "threads": threads, "rows": [asdict(row) for row in rows]}
        out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
