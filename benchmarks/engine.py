# SPDX-License-Identifier: Apache-2.0
"""The rolling engine beside `model.generate`, in one process and one run: `python benchmarks/engine.py`.

A Llama of 34 million random parameters (float32, eos off, so that lengths are exact). Figures are tokens per CPU second
of this process, which a busy machine disturbs less than wall time does, and ratios to `generate` in the same run. Set
OMP_NUM_THREADS to what the server would have.

    equal   32 requests, 32 prompt tokens, 32 new ones
    mixed   64 requests, 8-128 prompt tokens, 8-192 new ones, in arrival order
    single  one request of 64 new tokens, alone
"""

from __future__ import annotations

import json
import os
import platform
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hf_triton.engine.interface import Outcome, Sequence
from hf_triton.engine.rolling import RollingEngine
from hf_triton.generation import SamplingPlan

VOCABULARY = 8192
Request = tuple[list[int], int]
"""A prompt's tokens, and how many new ones to write."""


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def build_requests() -> dict[str, list[Request]]:
    source = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [source.randrange(VOCABULARY) for _ in range(length)]

    lengths = [8, 16, 32, 64, 128, 192]
    return {
        "equal": [(prompt(32), 32) for _ in range(32)],
        "mixed": [(prompt(source.randrange(8, 129)), source.choice(lengths)) for _ in range(64)],
        "single": [(prompt(32), 64)],
    }


def generate(model: LlamaForCausalLM, requests: list[Request], width: int) -> None:
    """`model.generate` in padded batches, each as long as its longest request."""
    for start in range(0, len(requests), width):
        batch = requests[start : start + width]
        longest = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        steps = max(count for _, count in batch)
        with torch.inference_mode():
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)


def roll(engine: RollingEngine, requests: list[Request], width: int) -> None:
    """The engine, with `width` requests in flight."""
    room, done = threading.Semaphore(width), threading.Semaphore(0)

    def finish(_: Outcome) -> None:
        room.release()
        done.release()

    for prompt, count in requests:
        room.acquire()
        engine.submit(Sequence(prompt, SamplingPlan(count), finish))
    for _ in requests:
        done.acquire()


def tokens_per_cpu_s(work: Callable[[], None], requests: list[Request]) -> float:
    started = time.process_time()
    work()
    return sum(count for _, count in requests) / (time.process_time() - started)


def measure(model: LlamaForCausalLM, name: str, requests: list[Request], width: int) -> dict[str, object]:
    engine = RollingEngine(model, max_rows=width)
    try:
        reference = tokens_per_cpu_s(lambda: generate(model, requests, width), requests)
        rolling = tokens_per_cpu_s(lambda: roll(engine, requests, width), requests)
    finally:
        engine.close()
    return {
        "requests": name,
        "width": width,
        "generate": round(reference, 1),
        "rolling": round(rolling, 1),
        "ratio": round(rolling / reference, 3),
    }


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds; the median of the ratios is shown.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, out: Path | None) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model, requests = build_model(), build_requests()
    cases = [("equal", 16), ("mixed", 16), ("mixed", 32), ("single", 1)]
    rows = [measure(model, name, requests[name], width) for _ in range(rounds) for name, width in cases]
    print(f"{'requests':<10}{'width':>6}{'generate':>12}{'rolling':>12}{'ratio':>9}   (tokens per CPU second)")
    for name, width in cases:
        own = [row for row in rows if (row["requests"], row["width"]) == (name, width)]
        median = sorted(own, key=lambda row: float(str(row["ratio"])))[len(own) // 2]
        print(f"{name:<10}{width:>6}{median['generate']:>12}{median['rolling']:>12}{median['ratio']:>9}")
    if out is not None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cpu": platform.processor()}
        out.write_text(json.dumps({"versions": versions, "threads": torch.get_num_threads(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
