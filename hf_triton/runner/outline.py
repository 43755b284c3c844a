# SPDX-License-Identifier: Apache-2.0
"""What a model's tokens take and compute, found without weights: its runner's steps run on torch's device `meta`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_triton.runner.attention import attention_configs
from hf_triton.runner.faults import described
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.step import Step, TokenRange
from hf_triton.runner.way_probe import WAYS

logger = logging.getLogger(__name__)

CONTEXTS: Final = 2, 34
"""Tokens of the sequences in which tokens are counted: the difference is that of attention. Windows are longer."""


@dataclass(frozen=True)
class Outline:
    """A model with a KV cache. An operation is a floating-point one; a multiplication and addition are two."""

    bytes_per_token: int
    """Keys and values of one token in all layers; of a model without keys, its id."""
    has_keys: bool
    slot_tokens: int
    """Tokens that take as much as the states of a sequence; 0: it has none."""
    token_flop: float
    """Operations of a token, without its attention and its logits."""
    logits_flop: float
    """Those of its logits."""
    attention_flop: float
    """Those of its attention to one other token."""
    expansion_flop: float
    """Those of a step for each cached token: of multi-head latent attention, which expands what it caches."""

    def prompt_flop(self, num_tokens: int, chunk_tokens: int) -> float:
        """Of a prompt that is computed in chunks of so many tokens, and of the logits behind it."""
        num_chunks = -(-num_tokens // chunk_tokens)
        expansions = self.expansion_flop * (num_chunks + 1) / 2
        token = self.token_flop + self.attention_flop * num_tokens / 2 + expansions
        return num_tokens * token + self.logits_flop

    def decoding_flop(self, context: float) -> float:
        """Of one generated token behind so many."""
        return self.token_flop + self.logits_flop + context * (self.attention_flop + self.expansion_flop)


def measure_outline(model: Any) -> Outline | None:
    """Run tokens through a model.

    Args:
        model: In eval mode, on the device `meta`; its configs are changed.

    Returns:
        None: without weights it runs in no way of the continuous engine.
    """
    for config in attention_configs(model):
        config._experts_implementation = "batched_mm"  # others read which experts are chosen
    for way in WAYS:
        try:
            with torch.device("meta"), torch.inference_mode():
                return _measure(model, way)
        except Exception as error:  # a model may do anything in its forward
            logger.debug("without weights, the model does not run as %s (%s)", way, described(error))
    return None


def _measure(model: Any, way: Way) -> Outline:
    runner = ModelRunner(model, way)
    bytes_per_token, slot_tokens = runner.memory_per_token()
    if not runner.cache.blocks() and not slot_tokens:
        raise TypeError("its forward keeps nothing in the cache")
    near, far = (_count(runner, end, 1) for end in CONTEXTS)
    attention = every_step = (far - near) / (CONTEXTS[1] - CONTEXTS[0])
    if way.gathers:  # a second token of a step attends to what the first has expanded
        near_two, far_two = (_count(runner, end, 2) for end in CONTEXTS)
        attention = (far_two - near_two) / (CONTEXTS[1] - CONTEXTS[0]) - every_step
    head = model.get_output_embeddings()
    logits = 0 if head is None else 2 * head.weight.numel()
    size = sum(bytes_per_token.values())
    token = near - CONTEXTS[0] * every_step - logits
    return Outline(size, runner.cache.has_keys, slot_tokens, token, logits, attention, every_step - attention)


def _count(runner: ModelRunner, end: int, num_tokens: int) -> int:
    """The operations of a step of the last tokens of a sequence."""
    blocks = list(range(-(-end // runner.block_size)))
    runner.allocate(len(blocks))
    with FlopCounterMode(display=False) as counter:
        runner.run(Step((TokenRange(0, end - num_tokens, end, [0] * num_tokens, blocks, end, samples=(0,), slot=0),)))
    return int(counter.get_total_flops())
