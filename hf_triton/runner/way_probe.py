# SPDX-License-Identifier: Apache-2.0
"""Probe a model at load: which way it runs steps is tried, by logits beside those of `generate`.

Exceptions alone do not show it: several models run another way without one, and are wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import torch

from hf_triton.runner.faults import described, is_fatal, is_memory
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.reference import NUM_STEPS, check_numbers, greedy_logits, make_prompt, same_logits
from hf_triton.runner.step import Step, TokenRange

logger = logging.getLogger(__name__)

WAYS: Final = (Way(), Way(calls_torch=True), Way(gathers=True))
"""In the order in which they are tried."""
SHORT, LONG = (3, 1), (11, 3)
"""Length and seed of the probe's prompts."""
BLOCK_SIZE: Final = 4
"""Of the probe: its sequences have several blocks."""


def probe_ways(model: Any) -> Way | None:
    """The first way in which a model's logits, in company and in chunks, are those that it has alone in `generate`.

    None: no way is right.

    Raises:
        CheckpointError: They are NaN.
    """
    short, long = make_prompt(model, *SHORT), make_prompt(model, *LONG)
    expected_short, expected_long = greedy_logits(model, [short]), greedy_logits(model, [long])
    check_numbers(model, expected_short, expected_long)
    for way in WAYS:
        try:
            with torch.inference_mode():
                if not same_logits(model, expected_short, _logits_in_company(model, way, short, long)):
                    continue
                ends = 0, len(long) // 2, len(long)
                if same_logits(model, expected_long[:1], _logits_of_chunks(model, way, long, ends)):
                    return way
                # A preempted sequence is recomputed with its output, in one forward. A model whose tokens attend to
                # later ones (Gemma 3 with bidirectional attention) fails here.
                context = short + expected_short[:-1, 0].argmax(-1).tolist()
                recomputed = _logits_of_chunks(model, way, context, (0, len(context)))
                if same_logits(model, expected_short[-1:], recomputed):
                    return replace(way, prefills_whole=True)
        except Exception as error:  # a model may do anything in its forward
            if is_memory(error) or is_fatal(error):
                raise
            logger.debug("the model does not run as %s (%s)", way, described(error))
    return None


def _new_runner(model: Any, way: Way) -> ModelRunner:
    runner = ModelRunner(model, way, block_size=BLOCK_SIZE)
    runner.allocate(2 * _num_blocks(LONG[0] + NUM_STEPS))
    return runner


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def _range(number: int, start: int, token_ids: list[int], *, samples: bool = True) -> TokenRange:
    """Tokens of one of two sequences, each with blocks of its own."""
    num_blocks = _num_blocks(LONG[0] + NUM_STEPS)
    end = start + len(token_ids)
    table = list(range(number * num_blocks, number * num_blocks + _num_blocks(end)))
    return TokenRange(number, start, end, token_ids, table, end, samples=(number,) if samples else (), slot=number)


def _logits_in_company(model: Any, way: Way, short: list[int], long: list[int]) -> torch.Tensor:
    """The logits of a short prompt's first tokens beside a longer one, `[NUM_STEPS, 1, vocabulary]` on the CPU."""
    runner = _new_runner(model, way)
    logits = runner.run(Step((_range(0, 0, long),)))
    newest = [int(logits.argmax(-1))]
    logits = runner.run(Step((_range(0, len(long), newest), _range(1, 0, short))))
    steps = [logits[1:]]
    for number in range(NUM_STEPS - 1):
        first, second = logits.argmax(-1).tolist()
        ranges = _range(0, len(long) + 1 + number, [first]), _range(1, len(short) + number, [second])
        logits = runner.run(Step(ranges))
        steps.append(logits[1:])
    return torch.stack(steps).float().cpu()


def _logits_of_chunks(model: Any, way: Way, context: list[int], ends: Sequence[int]) -> torch.Tensor:
    """The logits that follow a context computed in chunks, `[1, 1, vocabulary]` float32 on the CPU."""
    runner = _new_runner(model, way)
    for start, end in pairwise(ends):
        logits = runner.run(Step((_range(0, start, context[start:end], samples=end == len(context)),)))
    return logits.unsqueeze(0).float().cpu()
