# SPDX-License-Identifier: Apache-2.0
"""What prefix caching saves and costs: `python benchmarks/prefixes.py`.

The same requests go through an engine with a prefix cache and through one without, in the same run. CPU seconds of this
process; the ratio is those without to those with. The model is that of `engine.py`. Set OMP_NUM_THREADS to what the
server would have.

    system        32 requests, 512 prompt tokens in common and 32 of their own, 16 new ones, 8 in flight
    conversation  8 turns, one after the other: 64 more tokens of the user's after each answer of 32
    distinct      32 requests, 544 prompt tokens, nothing in common, 16 new ones, 8 in flight
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from engine import VOCABULARY, build_packed_model
from folders import processor
from inside import OnFinish
from transformers.cache_utils import DynamicCache

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.sequence import Outcome, SequenceGroup
from hf_triton.errors import HfTritonError
from hf_triton.runner.calling import cache_name
from hf_triton.sampling.params import SamplingParams

WIDTH = 8
TokenLists = list[list[int]]


@dataclass(frozen=True)
class Figures:
    """Figures of one workload, without and with the prefix cache."""

    requests: str
    cpu_s: tuple[float, float]
    prompt_tokens: tuple[int, int]
    """Computed prompt tokens."""
    num_equal: int
    """Completions that are the same with both; float32 rounds by the shape of the batch."""
    num_completions: int

    @property
    def ratio(self) -> float:
        return self.cpu_s[0] / self.cpu_s[1]


class PromptCounter:
    """Counts the prompt tokens that a model computes: those of calls with a prefill's own cache."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.num_tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(kwargs[cache_name(model)], DynamicCache):
            self.num_tokens += kwargs["input_ids"].numel()


def random_tokens(source: random.Random, length: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(length)]


def complete(engine: ContinuousBatchingEngine, prompts: TokenLists, num_new: int) -> TokenLists:
    """Complete the prompts, `WIDTH` of them in flight.

    Raises:
        HfTritonError: One was refused.
    """
    outcomes: dict[int, Outcome] = {}
    room = threading.Semaphore(WIDTH)

    def finish(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        room.release()

    for number, prompt in enumerate(prompts):
        room.acquire()
        engine.submit([SequenceGroup(prompt, SamplingParams(num_new), listener=OnFinish(partial(finish, number)))])
    for _ in range(WIDTH):
        room.acquire()
    return [_text(outcomes[number]) for number in range(len(prompts))]


def _text(outcome: Outcome) -> list[int]:
    if isinstance(outcome, HfTritonError):
        raise outcome
    return outcome[0].token_ids


def system(engine: ContinuousBatchingEngine) -> TokenLists:
    source = random.Random(0)
    common = random_tokens(source, 512)
    return complete(engine, [common + random_tokens(source, 32) for _ in range(32)], 16)


def conversation(engine: ContinuousBatchingEngine) -> TokenLists:
    source = random.Random(0)
    history: list[int] = []
    answers: TokenLists = []
    for _ in range(8):
        prompt = history + random_tokens(source, 64)
        answers += complete(engine, [prompt], 32)
        history = prompt + answers[-1]
    return answers


def distinct(engine: ContinuousBatchingEngine) -> TokenLists:
    source = random.Random(0)
    return complete(engine, [random_tokens(source, 544) for _ in range(32)], 16)


WORKLOADS: dict[str, Callable[[ContinuousBatchingEngine], TokenLists]] = {
    work.__name__: work for work in (system, conversation, distinct)
}


def measure(model: transformers.PreTrainedModel, counter: PromptCounter, name: str) -> Figures:
    cpu_s, prompt_tokens, completions = [], [], []
    for enable_prefix_caching in (False, True):
        engine = ContinuousBatchingEngine(
            model, EngineOptions(max_num_seqs=WIDTH, enable_prefix_caching=enable_prefix_caching)
        )
        try:
            counter.num_tokens, started_s = 0, time.process_time()
            completions.append(WORKLOADS[name](engine))
            cpu_s.append(time.process_time() - started_s)
            prompt_tokens.append(counter.num_tokens)
        finally:
            engine.close()
    num_equal = sum(one == other for one, other in zip(*completions, strict=True))
    return Figures(name, (cpu_s[0], cpu_s[1]), (prompt_tokens[0], prompt_tokens[1]), num_equal, len(completions[0]))


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds; the median of the ratios is shown.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, out: Path | None) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = build_packed_model()
    counter = PromptCounter(model)
    rows = [measure(model, counter, name) for _ in range(rounds) for name in WORKLOADS]
    print(f"{'':<14}{'CPU seconds':>18}{'':>8}{'prompt tokens':>20}{'equal':>10}")
    print(f"{'requests':<14}{'without':>9}{'with':>9}{'ratio':>8}{'without':>11}{'with':>9}{'equal':>10}")
    for name in WORKLOADS:
        own = sorted((row for row in rows if row.requests == name), key=lambda row: row.ratio)
        row = own[len(own) // 2]
        print(
            f"{name:<14}{row.cpu_s[0]:>9.2f}{row.cpu_s[1]:>9.2f}{row.ratio:>8.2f}"
            f"{row.prompt_tokens[0]:>11}{row.prompt_tokens[1]:>9}{f'{row.num_equal}/{row.num_completions}':>10}"
        )
    if out is not None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cpu": processor()}
        figures = [asdict(row) | {"ratio": row.ratio} for row in rows]
        out.write_text(
            json.dumps({"versions": versions, "threads": torch.get_num_threads(), "rows": figures}, indent=1)
        )


if __name__ == "__main__":
    main()
