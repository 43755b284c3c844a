# SPDX-License-Identifier: Apache-2.0
"""Decode attention on a CPU, with and without our forms of it: `python benchmarks/attention.py`.

Milliseconds of a decoding step of models as wide as Falcon-7B (71 heads, one of keys and values), Llama-2-7B (32 and
32) and Llama-3-8B (32 and 8), with few layers and random weights: as transformers has it and with
`hf_triton/runner/cpu/attention.py`, in turn. The minimum of each counts, because machines are shared. The sequences
have between a tenth of the columns and all of them.
"""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from typing import Any

import click
import torch
import transformers
from hf_triton.runner.decode import Decoder
from hf_triton.runner.kv_cache import KVCache
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, PretrainedConfig

from hf_triton.runner.calling import Forward
from hf_triton.runner.cpu import accelerate

VOCABULARY = 8192
ROWS = (1, 8, 32)
CASES = (
    ("falcon", torch.float32),
    ("falcon", torch.bfloat16),
    ("llama-2", torch.float32),
    ("llama-2", torch.bfloat16),
    ("llama-2", torch.float16),
    ("llama-3", torch.float32),
    ("llama-3", torch.bfloat16),
)


def build_model(name: str, num_layers: int, dtype: torch.dtype) -> Any:
    """One of the models with fewer layers and a smaller vocabulary, packed as the server packs it."""
    torch.manual_seed(0)
    config: PretrainedConfig
    if name == "falcon":
        config = FalconConfig(hidden_size=4544, num_attention_heads=71, num_hidden_layers=num_layers)
    elif name == "llama-2":
        config = LlamaConfig(num_hidden_layers=num_layers)
    else:
        config = LlamaConfig(num_hidden_layers=num_layers, num_key_value_heads=8, intermediate_size=14336)
    config.vocab_size = VOCABULARY
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    accelerate(model)
    return model


class Steps:
    """Running sequences, and the seconds of their steps."""

    def __init__(self, model: Any, rows: int, columns: int, *, is_fast: bool) -> None:
        forward, source = Forward(model), random.Random(0)
        if not is_fast:
            forward._attention = nullcontext()  # type: ignore[assignment]
        self._decoder = Decoder(forward, "eager")
        self._memory = KVCache(forward.device)
        prefilled, _ = forward.prefill([source.randrange(VOCABULARY) for _ in range(columns)])
        for row in range(rows):
            self._memory.add(prefilled, 0, source.randrange(columns // 10, columns) if row else columns)
        self._newest = torch.arange(rows)
        self.seconds: list[float] = []

    def step(self) -> None:
        started = time.perf_counter()
        self._decoder.step(self._memory, self._newest)
        self.seconds.append(time.perf_counter() - started)


@click.command()
@click.option(
    "--layers",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Layers of each model; the real ones have 32.",
)
@click.option(
    "--columns", type=click.IntRange(10), default=300, show_default=True, help="Tokens of the longest sequence."
)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Repetitions of each way.")
@click.option("--threads", default=2, show_default=True, help="Threads of torch.")
def main(layers: int, columns: int, steps: int, threads: int) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    print(f"{'':26}{'as it is':>10}{'fast':>10}{'ratio':>8}")
    for name, dtype in CASES:
        model = build_model(name, layers, dtype)
        for rows in ROWS:
            with torch.inference_mode():
                ways = [Steps(model, rows, columns, is_fast=is_fast) for is_fast in (False, True)]
                for _ in range(steps):
                    for way in ways:
                        way.step()
            plain_ms, fast_ms = (1000 * min(way.seconds) for way in ways)
            case = f"{name} {str(dtype).removeprefix('torch.')} {rows} rows"
            print(f"{case:26}{plain_ms:>10.1f}{fast_ms:>10.1f}{plain_ms / fast_ms:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
