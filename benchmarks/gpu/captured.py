# SPDX-License-Identifier: Apache-2.0
"""Says which architectures' steps are captured as CUDA graphs on this card, and why others' are not.

    python benchmarks/gpu/captured.py --out FOLDER

One small model of each kind in bfloat16, random weights, with the head and state sizes of published ones. `graphs` are
captured when the engine starts; of `steps`, which two requests take, `replays` were graphs.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from figures import Figures, read_options
from loads import Meter, Request, random_prompts, run_requests

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.runner.cuda import fuse
from hf_triton.runner.lora.model_adapters import Adapters
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams
from tests.support.adapters import save_lora
from tests.support.architectures import BASE, CONTINUOUS, build

HEADS: dict[str, Any] = {"head_dim": 64}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "qwen3": HEADS,
    "qwen3-moe": HEADS,
    "mixtral": HEADS,
    "gpt-oss": HEADS,
    "qwen3-next": {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "granite4": {"mamba_d_head": 64, "mamba_d_state": 128},
    "mamba2": {"head_dim": 64, "state_size": 128},
    "deepseek-v3": LATENT,
}
"""What differs from the tiny models of the tests beside the width, by family."""
WIDTH: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
DENSE = {"llama": ("LlamaConfig", BASE), "qwen3": ("Qwen3Config", BASE)}
NUM_REQUESTS, NUM_PROMPT, NUM_NEW = 2, 24, 16


def model_of(family: str) -> Any:
    config, arguments = (DENSE | CONTINUOUS)[family]
    return build(config, arguments | WIDTH | SIZES[family])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many graphs are captured and replayed meanwhile, by whichever code."""
    counts, graph, replay = Counter[str](), torch.cuda.graph, torch.cuda.CUDAGraph.replay

    def count_graph(*arguments: Any, **options: Any) -> Any:
        counts["graphs"] += 1
        return graph(*arguments, **options)

    def count_replay(captured: torch.cuda.CUDAGraph) -> None:
        counts["replays"] += 1
        replay(captured)

    torch.cuda.graph, torch.cuda.CUDAGraph.replay = count_graph, count_replay  # type: ignore[assignment, misc, method-assign]
    try:
        yield counts
    finally:
        torch.cuda.graph, torch.cuda.CUDAGraph.replay = graph, replay  # type: ignore[misc, method-assign]


def measure(model: Any, adapter: Path | None = None) -> dict[str, Any]:
    """Start an engine, and run requests in it: with an adapter, if there is one."""
    way = find_way(model).way
    if way is None:
        return {"eager_because": "the continuous engine does not run this model"}
    meter, began_s = Meter(), time.perf_counter()
    with counted() as counts:
        adapters = None if adapter is None else Adapters(model)  # graphs are made for adapters like those at load
        chosen = None if adapters is None or adapter is None else adapters.load(adapter)
        engine = ContinuousBatchingEngine(
            model, EngineOptions(max_num_seqs=8, max_cache_tokens=4096, adapters=adapters, observer=meter), way
        )
        with closing(engine):
            start_s, graphs = time.perf_counter() - began_s, counts["graphs"]
            meter.attach(engine)
            counts.clear()
            prompts = random_prompts(NUM_REQUESTS, NUM_PROMPT, model.config.vocab_size)
            requests = [Request(prompt, SamplingParams(NUM_NEW), adapter=chosen) for prompt in prompts]
            run_requests(engine, requests, NUM_REQUESTS)
    if model.device.type != "cuda":
        reason = f"the model is on {model.device}"
    else:
        reason = "; ".join(engine.slower) or (None if counts["replays"] else "no sentence says why")
    return {
        "start_s": start_s,
        "graphs": graphs if counts["replays"] else 0,
        "steps": meter.seen.num_steps,
        "replays": counts["replays"],
        "eager_because": reason,
    }


def main(options: Namespace) -> None:
    figures = Figures("captured", options.out)
    for family in SIZES:
        with figures.attempt(model=family):
            model = model_of(family).to(options.device, torch.bfloat16)
            fuse(model)
            figures.add(model=family, **measure(model))
    name = "llama, each request with a LoRA adapter"
    with figures.attempt(model=name), tempfile.TemporaryDirectory() as folder:
        adapter = save_lora(model_of("llama"), Path(folder), target_modules="all-linear")
        model = model_of("llama").to(options.device, torch.bfloat16)
        fuse(model)
        figures.add(model=name, **measure(model, adapter))


if __name__ == "__main__":
    main(read_options(__doc__))
