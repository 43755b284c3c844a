# SPDX-License-Identifier: Apache-2.0
"""Sizes the KV cache at load: on a CPU it grows with demand into free memory, elsewhere it is allocated at once."""

from __future__ import annotations

import logging

from hf_triton.engine.block_memory import BlockMemory
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.options import EngineOptions
from hf_triton.runner.budget import TokenBudget
from hf_triton.runner.faults import is_memory
from hf_triton.runner.gpu_memory import LoadMemory
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
        return _grow_on_demand(runner, max_cache_tokens, options.config, max_num_seqs)
    bytes_per_token, slot_tokens = runner.memory_per_token()
    memory = LoadMemory(runner.model, bytes_per_token, options.gpu_part, (max_num_seqs + 1) * slot_tokens)
    if max_cache_tokens is None:
        max_cache_tokens = memory.cache_tokens(max_num_seqs, options.context_length, fills_part=runner.cache.has_keys)
    num_blocks = max(1, max_cache_tokens // runner.block_size)
    budget = TokenBudget(bytes_per_token, num_blocks * runner.block_size)
    size = f"a KV cache of {budget.words(budget.most)}"
    logger.info("%s: %s", size, memory.describe())
    try:
        runner.allocate(num_blocks, max_num_seqs)
    except Exception as error:
        if is_memory(error):
            raise memory.error(size) from error
        raise
    return BlockMemory(budget, num_blocks, runner.block_size, max_kept=num_blocks, is_fixed=True)


def _grow_on_demand(
    runner: ModelRunner, max_cache_tokens: int | None, config: EngineConfig, max_num_seqs: int
) -> BlockMemory:
    bytes_per_token, slot_tokens = runner.memory_per_token()
    budget = TokenBudget(bytes_per_token, max_cache_tokens)
    num_blocks = max(1, budget.most // runner.block_size)
    kept_bytes = max(config.min_kept_bytes, runner.model.get_memory_footprint(return_buffers=False))
    kept = kept_bytes // (sum(bytes_per_token.values()) * runner.block_size)
    runner.allocate(num_blocks, max_num_seqs)
    return BlockMemory(
        budget,
        num_blocks,
        runner.block_size,
        max_kept=min(kept, int(num_blocks * config.prefix_cache_fraction)),
        slot_tokens=slot_tokens if max_cache_tokens is None else 0,
        give_back=runner.give_back,
    )
