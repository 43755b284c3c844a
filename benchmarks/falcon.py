# SPDX-License-Identifier: Apache-2.0
"""What Falcon's attention by fused kernels saves: `python benchmarks/falcon.py`.

Milliseconds of a decoding step of a model as wide as Falcon-7B (71 heads, one of keys and values) with few layers and
random weights, as it is and with `hf_triton/runner/multi_query.py`, in turn; the least of each counts, as the machines
are shared. The rows have between a tenth of the columns and all of them.
"""

from __future__ import annotations

import random
import time

import click
import torch
import transformers
from transformers import FalconConfig, FalconForCausalLM

from hf_triton.runner.cache import KeyValueRows
from hf_triton.runner.decode import Decoder
from hf_triton.runner.forward import Forward
from hf_triton.runner.heap import keep_freed_memory
from hf_triton.runner.packing import pack

VOCABULARY = 8192
ROWS = (1, 8, 32)


def build_model(num_layers: int, dtype: torch.dtype) -> FalconForCausalLM:
    """Falcon-7B but for its number of layers and its vocabulary, packed as the server does."""
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=VOCABULARY, hidden_size=4544, num_attention_heads=71, num_hidden_layers=num_layers, bias=False
    )
    model = FalconForCausalLM._from_config(config, dtype=dtype).eval()
    pack(model)
    return model


class Steps:
    """Running rows, and the seconds of their steps."""

    def __init__(self, model: FalconForCausalLM, rows: int, columns: int, *, is_fused: bool) -> None:
        forward, source = Forward(model), random.Random(0)
        if not is_fused:
            forward._multi_query = None
        self._decoder = Decoder(forward, "eager")
        self._memory = KeyValueRows(forward.device)
        for row in range(rows):
            length = source.randrange(columns // 10, columns) if row else columns
            prefilled, _ = forward.prefill([source.randrange(VOCABULARY) for _ in range(length)])
            self._memory.add(prefilled, 0, length)
        self._newest = torch.arange(rows)
        self.seconds: list[float] = []

    def step(self) -> None:
        started = time.perf_counter()
        self._decoder.step(self._memory, self._newest)
        self.seconds.append(time.perf_counter() - started)


@click.command()
@click.option("--layers", default=3, show_default=True, help="Of the model; Falcon-7B has 32.")
@click.option("--columns", default=300, show_default=True, help="Tokens of the longest row.")
@click.option("--steps", default=10, show_default=True, help="Of each way.")
@click.option("--threads", default=2, show_default=True, help="Threads of torch.")
def main(layers: int, columns: int, steps: int, threads: int) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    keep_freed_memory()
    print(f"{'':16}{'as it is':>12}{'fused':>12}{'ratio':>8}")
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(layers, dtype)
        for rows in ROWS:
            with torch.inference_mode():
                ways = [Steps(model, rows, columns, is_fused=is_fused) for is_fused in (False, True)]
                for _ in range(steps):
                    for way in ways:
                        way.step()
            plain_ms, fused_ms = (1000 * min(way.seconds) for way in ways)
            name = f"{str(dtype).removeprefix('torch.')}, {rows} rows"
            print(f"{name:18}{plain_ms:>10.1f}{fused_ms:>12.1f}{plain_ms / fused_ms:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
