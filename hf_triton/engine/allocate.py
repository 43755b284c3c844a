# SPDX-License-Identifier: Apache-2.0
"""Sizes the KV cache at load: on a CPU it grows with demand into free memory, elsewhere it is allocated at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.state_pool import StatePool
from hf_triton.errors import CheckpointError
from hf_triton.runner.budget import TokenBudget
from hf_triton.runner.faults import is_memory
from hf_triton.runner.gpu_memory import LoadMemory
from hf_triton.runner.images import image_memory
from hf_triton.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def allocate_cache(runner: ModelRunner, options: EngineOptions) -> BlockMemory:
    """Size the KV cache and allocate it; on a CPU its memory is touched when it is needed.

    Raises:
        CheckpointError: The device has not enough memory.
    """
    max_cache_tokens, max_num_seqs = options.max_cache_tokens, options.max_num_seqs
    if max_cache_tokens is not None and not runner.cache.has_keys:
        logger.warning("the setting max_cache_tokens does nothing for a model without keys and values")
        max_cache_tokens = None
    if runner.device.type == "cpu":
        if options.gpu_part.is_set:
            logger.warning("the setting gpu_memory_fraction does nothing on a CPU")
        return _grow_on_demand(runner, max_cache_tokens, options)
    bytes_per_token, slot_tokens = runner.memory_per_token()
    memory, num_tokens, num_kept = _divide(runner, options, max_cache_tokens, bytes_per_token, slot_tokens)
    num_blocks = max(1, num_tokens // runner.block_size)
    budget = TokenBudget(bytes_per_token, num_blocks * runner.block_size)
    size = f"a KV cache of {budget.words(budget.most)}"
    logger.info("%s: %s", size, memory.describe())
    try:
        runner.allocate(num_blocks, max_num_seqs + num_kept)
    except Exception as error:
        if is_memory(error):
            raise memory.error(size) from error
        raise
    states = StatePool(max_num_seqs, num_kept)
    return BlockMemory(budget, num_blocks, runner.block_size, max_kept=num_blocks, is_fixed=True, states=states)


def _divide(
    runner: ModelRunner,
    options: EngineOptions,
    max_cache_tokens: int | None,
    bytes_per_token: Mapping[torch.device, int],
    slot_tokens: int,
) -> tuple[LoadMemory, int, int]:
    """The memory of a GPU, and the tokens of the KV cache and the kept states that it has room for."""
    beside = (options.max_num_seqs + 1) * slot_tokens
    sample, images = options.image_sample, None
    if sample is not None and runner.device.type == "cuda":
        images = image_memory(runner.model, sample, options.context_length)
    memory = LoadMemory(runner.model, bytes_per_token, options.gpu_part, beside, images=images)
    if max_cache_tokens is not None:
        return memory, max_cache_tokens, _num_kept(runner, options, max_cache_tokens, slot_tokens)
    num_tokens = _cache_tokens(memory, runner, options)
    num_kept = _num_kept(runner, options, num_tokens, slot_tokens)
    if not num_kept:
        return memory, num_tokens, 0
    kept = beside + num_kept * slot_tokens
    with_kept = LoadMemory(runner.model, bytes_per_token, options.gpu_part, kept, images=images)
    try:
        left = _cache_tokens(with_kept, runner, options)
    except CheckpointError:
        left = 0
    if left < min(num_tokens, options.context_length):
        logger.info("the prefix cache keeps no states: too few tokens would be left of the KV cache")
        return memory, num_tokens, 0
    return with_kept, min(num_tokens, left), num_kept


def _cache_tokens(memory: LoadMemory, runner: ModelRunner, options: EngineOptions) -> int:
    return memory.cache_tokens(options.max_num_seqs, options.context_length, fills_part=runner.cache.has_keys)


def _num_kept(runner: ModelRunner, options: EngineOptions, num_tokens: int, slot_tokens: int) -> int:
    """States of prefixes that the prefix cache may keep beside a KV cache of so many tokens."""
    if not slot_tokens or not options.enable_prefix_caching or runner.way.prefills_whole:
        return 0
    share = options.prefix_state_fraction * (num_tokens + options.max_num_seqs * slot_tokens)
    return int(share / slot_tokens)


def _grow_on_demand(runner: ModelRunner, max_cache_tokens: int | None, options: EngineOptions) -> BlockMemory:
    config, max_num_seqs = options.config, options.max_num_seqs
    bytes_per_token, slot_tokens = runner.memory_per_token()
    budget = TokenBudget(bytes_per_token, max_cache_tokens)
    num_blocks = max(1, budget.most // runner.block_size)
    kept_bytes = max(config.min_kept_bytes, runner.model.get_memory_footprint())
    kept_tokens = kept_bytes // sum(bytes_per_token.values())
    num_states = _num_kept(runner, options, budget.most, slot_tokens)
    runner.allocate(num_blocks, max_num_seqs)
    return BlockMemory(
        budget,
        num_blocks,
        runner.block_size,
        max_kept=min(kept_tokens // runner.block_size, int(num_blocks * config.prefix_cache_fraction)),
        slot_tokens=slot_tokens if max_cache_tokens is None else 0,
        give_back=runner.give_back,
        states=StatePool(max_num_seqs, min(num_states, kept_tokens // max(1, slot_tokens))),
        trim_states=lambda: runner.trim_slots(max_num_seqs),
    )
