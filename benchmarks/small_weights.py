# SPDX-License-Identifier: Apache-2.0
"""The continuous engine on a CPU with weights of float32, bfloat16, 8 and 4 bits, in turns, for one client and for 16.

A Llama of random parameters, each kind in this process: 34 million in two or three minutes, or with `--large` 150
million in some minutes each. A request has 32 prompt tokens and 32 new ones. Figures are medians of tokens per second
of wall time, and the bytes of all weights. A processor without instructions for bfloat16 leaves it out.
"""

from __future__ import annotations

import random
import statistics
import time

import click
import torch
import transformers
from engine import VOCABULARY, apart, build_model
from inside import Request, run_requests
from transformers import LlamaConfig, LlamaForCausalLM

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.runner.cpu import accelerate, small_layers
from hf_triton.runner.dtypes import has_instructions

KINDS = {"float32": None, "bfloat16": None, "int8": 8, "int4": 4}
CLIENTS = (1, 16)
NUM_TOKENS = 32


def build(kind: str, *, is_large: bool) -> LlamaForCausalLM:
    """A model as the server runs it with such weights; those of 8 and 4 bits round bfloat16."""
    config = build_model().config
    if is_large:
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
        config = LlamaConfig(**(config.to_dict() | sizes | {"num_key_value_heads": 8, "head_dim": 64}))
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    if kind != "float32":
        model.to(torch.bfloat16)
    if (bits := KINDS[kind]) is not None:
        small = small_layers()
        if small is None:
            raise click.ClickException("this processor has no kernel for weights of few bits")
        small.make_small(model, bits)
    accelerate(model)
    return model


def measure(model: LlamaForCausalLM, num_clients: int) -> float:
    """Tokens per second of one round."""
    source = random.Random(0)
    count = 4 if num_clients == 1 else 2 * num_clients
    requests: list[Request] = [([source.randrange(VOCABULARY) for _ in range(32)], NUM_TOKENS) for _ in range(count)]
    engine = apart(lambda: ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=num_clients)))
    try:
        started_s = time.perf_counter()
        run_requests(engine, requests, num_clients)
        return count * NUM_TOKENS / (time.perf_counter() - started_s)
    finally:
        engine.close()


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds; medians are shown.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
@click.option("--large", is_flag=True, help="A model of 150 million parameters.")
def main(rounds: int, threads: int, large: bool) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    kinds = [kind for kind in KINDS if kind != "bfloat16" or has_instructions(torch.bfloat16)]
    if len(kinds) < len(KINDS):
        print("bfloat16 is left out: this processor has no instructions for it, and computes it slowly")
    models = {kind: apart(lambda kind=kind: build(kind, is_large=large)) for kind in kinds}  # type: ignore[misc]
    figures: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):
        for kind, model in models.items():
            for num_clients in CLIENTS:
                rate = measure(model, num_clients)
                if number:  # the first round warms up
                    figures.setdefault((kind, num_clients), []).append(rate)
    print(f"{'weights':12}{'MB':>10}" + "".join(f"{f'{count} clients':>14}" for count in CLIENTS))
    for kind, model in models.items():
        rates = "".join(f"{statistics.median(figures[kind, count]):>14.1f}" for count in CLIENTS)
        print(f"{kind:12}{model.get_memory_footprint() / 1e6:>10.1f}{rates}")


if __name__ == "__main__":
    main()
