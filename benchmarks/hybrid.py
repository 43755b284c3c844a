# SPDX-License-Identifier: Apache-2.0
"""Hybrid models in the continuous engine beside the batch engine: `python benchmarks/hybrid.py`.

64 requests of mixed lengths (`mixed` of `engine.py`), 16 in flight, to models of 24 to 39 million random parameters in
float32 with packed linear layers: three of four layers are convolutions, state space or linear attention; the fourth is
attention. Falcon-Mamba is state space of Mamba's first kind throughout, and has layers that cannot be packed. Useful
tokens per second of wall time in one run; what counts is the ratio. `batch` is the engine that takes up to 16 waiting
requests and runs `generate` to the end of the longest.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, Final

import click
import torch
import transformers
from engine import VOCABULARY, build_requests
from folders import processor
from inside import run_requests

from hf_triton.engine.choose import EngineName, build_engine
from hf_triton.engine.options import EngineOptions
from hf_triton.runner.cpu import accelerate

WIDTH: Final = 16
CONTEXT_LENGTH: Final = 1024
SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "LFM2": ("Lfm2Config", {"layer_types": (["conv"] * 3 + ["full_attention"]) * 2}),
    "Granite 4": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": (["mamba"] * 3 + ["attention"]) * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 1536,
            "mamba_n_heads": 16,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
        },
    ),
    "Qwen3.5": (
        "Qwen3_5TextConfig",
        {
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "head_dim": 64,
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "Falcon-Mamba": ("FalconMambaConfig", {"state_size": 16, "num_hidden_layers": 12}),
}
ENGINES: Final[tuple[EngineName, EngineName]] = ("batch", "continuous")


def build(name: str) -> Any:
    """A model with random weights, as the server runs it."""
    config_name, arguments = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **arguments})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    accelerate(model)
    return model


def measure(model: Any, wanted: EngineName, num_requests: int) -> float:
    """Useful tokens per second."""
    requests = build_requests()["mixed"][:num_requests]
    engine = build_engine(model, wanted, EngineOptions(max_num_seqs=WIDTH, context_length=CONTEXT_LENGTH))
    try:
        started_s = time.perf_counter()
        run_requests(engine, requests, WIDTH)
        return sum(count for _, count in requests) / (time.perf_counter() - started_s)
    finally:
        engine.close()


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds; the median of the ratios is shown.")
@click.option("--requests", default=64, show_default=True, help="How many of the requests to send.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, requests: int, out: Path | None) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    print(f"{'tokens a second':<16}{'batch':>9}{'continuous':>9}{'ratio':>8}")
    figures: dict[str, list[dict[str, float]]] = {}
    for name in MODELS:
        model = build(name)
        found = [{engine: measure(model, engine, requests) for engine in ENGINES} for _ in range(rounds)]
        batch, continuous = (statistics.median(each[engine] for each in found) for engine in ENGINES)
        ratio = statistics.median(each["continuous"] / each["batch"] for each in found)
        print(f"{name:<16}{batch:>9.1f}{continuous:>9.1f}{ratio:>8.2f}", flush=True)
        figures[name] = found
    if out is not None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cpu": processor()}
        out.write_text(
            json.dumps({"versions": versions, "threads": torch.get_num_threads(), "rows": figures}, indent=1)
        )


if __name__ == "__main__":
    main()
