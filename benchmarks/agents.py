# SPDX-License-Identifier: Apache-2.0
"""Agents that share a system prompt, in the continuous engine: `python benchmarks/agents.py`.

1, 8 and 64 agents of 20 turns, each as fast as it is answered. Their prompts begin with the same 8,000 tokens, and go
on with the agent's own conversation: each turn adds 64 tokens, a tool's result, and the 32 that the model wrote. The
Llama of `benchmarks/engine.py`, or a hybrid of `benchmarks/hybrid.py`: random weights, float32, packed linear layers,
and a KV cache that holds all of it.

    computed     tokens of prompts that the model computed, in a turn; the first of all agents computes the prefix
    cached       the share of prompts that the prefix cache had
    first token  time from a turn's request to its first token, in milliseconds, p50 and p99
    gap          time between two tokens of a sequence, p50 and p99
    held         the longest gap of one agent that decodes alone, while another prompt of 8,000 tokens is computed that
                 no cache has; beside its median gap
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import hybrid
import torch
import transformers
from engine import VOCABULARY, build_packed_model
from folders import save

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.sequence import Completion, Outcome, SequenceGroup, SequenceListener
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import TokenLogprobs

LLAMA: Final = "Llama"
HELD_AFTER: Final = 16
"""Tokens of the agent that decodes alone, before the long prompt arrives."""


@dataclass(frozen=True)
class Load:
    """What the agents do."""

    agents: Sequence[int] = (1, 8, 64)
    turns: int = 20
    num_prefix: int = 8000
    num_added: int = 64
    num_new: int = 32
    num_held: int = 128
    """New tokens of the agent that decodes beside a long prompt."""

    @property
    def context_length(self) -> int:
        return self.num_prefix + max(self.turns * (self.num_added + self.num_new), self.num_held) + 1

    @property
    def max_cache_tokens(self) -> int:
        own = self.context_length - self.num_prefix + 128  # blocks are filled in part
        return 2 * self.num_prefix + (max(self.agents) + 2) * own


SMALL: Final = Load(agents=(1, 2), turns=3, num_prefix=256, num_added=16, num_new=8, num_held=48)


class Turn(SequenceListener):
    """One request, and when its tokens came."""

    def __init__(self, engine: ContinuousBatchingEngine, prompt_ids: list[int], num_new: int) -> None:
        self.times_s: list[float] = []
        self.has_begun = threading.Event()
        self._outcome: Outcome | None = None
        self._has_ended = threading.Event()
        self.prompt_ids = prompt_ids
        self.started_s = time.perf_counter()
        engine.submit([SequenceGroup(prompt_ids, SamplingParams(num_new), listener=self, listens_to_tokens=True)])

    def on_token(self, row: int, index: int, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        self.times_s.append(time.perf_counter())
        if len(self.times_s) == HELD_AFTER:
            self.has_begun.set()
        return False

    def on_finish(self, row: int, outcome: Outcome) -> None:
        self._outcome = outcome
        self.has_begun.set()
        self._has_ended.set()

    def completion(self) -> Completion:
        self._has_ended.wait()
        if not isinstance(self._outcome, list):
            raise RuntimeError(str(self._outcome))
        return self._outcome[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times_s)]


def tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(count)]


def run_agent(engine: ContinuousBatchingEngine, load: Load, prefix: list[int], seed: int) -> list[Turn]:
    """One agent's turns, one after the other."""
    source, conversation, turns = random.Random(seed), prefix, []
    for _ in range(load.turns):
        turns.append(Turn(engine, conversation + tokens(source, load.num_added), load.num_new))
        conversation = turns[-1].prompt_ids + turns[-1].completion().token_ids
    return turns


def figures_of(turns: Sequence[Turn]) -> dict[str, float]:
    first_ms = [1e3 * (turn.times_s[0] - turn.started_s) for turn in turns]
    gaps_ms = [1e3 * gap for turn in turns for gap in turn.gaps_s]
    num_prompt = sum(len(turn.prompt_ids) for turn in turns)
    num_cached = sum(turn.completion().num_cached for turn in turns)
    return {
        "computed": (num_prompt - num_cached) / len(turns),
        "cached %": 100 * num_cached / num_prompt,
        "first p50": percentile(first_ms, 50),
        "first p99": percentile(first_ms, 99),
        "gap p50": percentile(gaps_ms, 50),
        "gap p99": percentile(gaps_ms, 99),
    }


def percentile(values: Sequence[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


def measure(engine: ContinuousBatchingEngine, load: Load, num_agents: int) -> dict[str, float]:
    """So many agents at a time, with a prefix that no earlier ones have had."""
    prefix = tokens(random.Random(-num_agents), load.num_prefix)
    with ThreadPoolExecutor(num_agents) as pool:
        seeds = range(1000 * num_agents, 1000 * num_agents + num_agents)
        agents = list(pool.map(lambda seed: run_agent(engine, load, prefix, seed), seeds))
    return figures_of([turn for turns in agents for turn in turns])


def measure_held(engine: ContinuousBatchingEngine, load: Load) -> dict[str, float]:
    """One agent that decodes while a long prompt is computed."""
    source = random.Random(1)
    decoding = Turn(engine, tokens(source, load.num_added), load.num_held)
    decoding.has_begun.wait()
    Turn(engine, tokens(source, load.num_prefix), 1).completion()
    decoding.completion()
    gaps_ms = [1e3 * gap for gap in decoding.gaps_s]
    return {"held": max(gaps_ms), "gap p50": statistics.median(gaps_ms)}


def build(name: str, load: Load) -> Any:
    return build_packed_model(load.context_length) if name == LLAMA else hybrid.build(name)


@click.command()
@click.option("--model", default=LLAMA, show_default=True, type=click.Choice([LLAMA, *hybrid.MODELS]))
@click.option("--agents", multiple=True, type=int, help="Agents at a time, in place of 1, 8 and 64; may be repeated.")
@click.option("--small", is_flag=True, help="A load of seconds, to see that it runs.")
@click.option("--no-prefix-cache", is_flag=True, help="Compute each prompt as a whole.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(model: str, agents: tuple[int, ...], small: bool, no_prefix_cache: bool, out: Path | None) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    load = SMALL if small else Load()
    load = replace(load, agents=agents or load.agents)
    options = EngineOptions(
        max_num_seqs=max(load.agents) + 2,
        context_length=load.context_length,
        max_cache_tokens=load.max_cache_tokens,
        enable_prefix_caching=not no_prefix_cache,
    )
    engine = ContinuousBatchingEngine(build(model, load), options)
    figures: dict[str, list[dict[str, float]]] = {}
    try:
        measure_held(engine, SMALL)  # compiles kernels
        for num_agents in load.agents:
            figures[f"{num_agents} agents"] = [measure(engine, load, num_agents)]
            show(f"{num_agents} agents", figures[f"{num_agents} agents"][0])
        figures["beside a long prompt"] = [measure_held(engine, load)]
        show("beside a long prompt", figures["beside a long prompt"][0])
    finally:
        engine.close()
    if out is not None:
        save(figures, out)


def show(case: str, figures: dict[str, float]) -> None:
    print(f"{case:<22}", *(f"{name} {value:9.1f}" for name, value in figures.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
