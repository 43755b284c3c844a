# SPDX-License-Identifier: Apache-2.0
"""A model in ranks, whose rank 0 is this process."""

from pathlib import Path
from typing import Any

from hf_triton.engine.choose import build_engine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.options import EngineOptions
from hf_triton.hub.pretrained import load_config, load_model, silence_transformers
from hf_triton.hub.ranks import describe, start_ranks
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.ranks.processes import Ranks
from hf_triton.settings import ModelSettings


def load_in_ranks(folder: Path, size: int = 2) -> tuple[Ranks, Any]:
    """The other ranks, and this one's part of a model."""
    silence_transformers()
    settings = ModelSettings(huggingface_model=str(folder), tensor_parallel_size=size)
    ranks = start_ranks(folder, folder, settings)
    with ranks.loading():
        model = load_model(folder, load_config(folder, settings), settings, {"": "cpu"}).eval()
        ranks.check_equal(describe(model), "as its part of the model")
    return ranks, model


def start_small_engine(model: Any, ranks: Ranks | None = None, **options: Any) -> Any:
    """An engine whose sequences outgrow its cache, computed in small chunks; a step ahead of what is read."""
    config = EngineConfig(block_size=16, chunk_sizes=ChunkSizes(48, 24), runs_ahead=True)
    engine_options = {"max_num_seqs": 6, "max_cache_tokens": 256, "ranks": ranks, "config": config} | options
    return build_engine(model, "auto", EngineOptions(**engine_options))


def process_ids(ranks: Ranks) -> list[int]:
    return [process.pid for process in ranks._processes.values()]
