# SPDX-License-Identifier: Apache-2.0
"""Times at load what a proposed token costs beside a decoding step, for some numbers of sequences."""

from __future__ import annotations

import logging
import time
from typing import Final

from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.prompt_lookup import ProposalCosts
from hf_triton.runner.faults import is_memory
from hf_triton.runner.model_runner import ModelRunner
from hf_triton.runner.step import Step, TokenRange

logger = logging.getLogger(__name__)

NUMBERS: Final = 1, 4, 16, 64, 256
"""Sequences that are timed, as far as so many run; the more there are, the more a proposed token costs."""
NUM_RUNS: Final = 3
"""The fastest counts."""
LONG_S: Final = 1.0
"""Seconds after which a step is not run again."""
START: Final = 3
"""Tokens in front of those that a trial computes."""


def find_costs(runner: ModelRunner, max_num_seqs: int, num_proposed: int, config: EngineConfig) -> ProposalCosts:
    """Time steps of a token of each sequence beside steps with proposals, up to the number for which none pays.

    None pays either for a number whose step finds no memory.
    """
    if config.proposal_cost is not None:
        return ProposalCosts(num_proposed, [(max_num_seqs, config.proposal_cost)])
    costs: list[tuple[int, float]] = []
    for number in (*[number for number in NUMBERS if number < max_num_seqs], max_num_seqs):
        try:
            alone_s, proposing_s = (_step_s(runner, number, count) for count in (0, num_proposed))
            costs.append((number, max(0.0, proposing_s / alone_s - 1) / num_proposed))
        except Exception as error:
            if not is_memory(error):
                raise
            costs.append((number, 1.0))
        if costs[-1][1] >= 1:
            break
    runner.give_back([0])
    words = ", ".join(f"{cost:.2f} for {number}" for number, cost in costs)
    logger.info("prompt lookup: the part of a decoding step that a proposed token costs, by sequences: %s", words)
    return ProposalCosts(num_proposed, costs)


def _step_s(runner: ModelRunner, num_sequences: int, num_proposed: int) -> float:
    """The seconds of a step; all sequences write to the first block, which holds nothing yet."""
    end = START + 1 + num_proposed
    table = [0] * -(-end // runner.block_size)
    part = TokenRange(0, START, end, list(range(START, end)), table, end, samples=(0,), num_drafted=num_proposed)
    step, times = Step((part,) * num_sequences), []
    for _ in range(NUM_RUNS):
        started_s = time.perf_counter()
        runner.run(step).argmax(-1).tolist()
        times.append(time.perf_counter() - started_s)
        if times[-1] > LONG_S:
            break
    return min(times)
