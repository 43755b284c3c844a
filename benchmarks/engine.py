# SPDX-License-Identifier: Apache-2.0
"""The continuous engine beside `model.generate` and a bare forward loop, in one process and one run: `make bench`.

A Llama of 34 million random parameters (float32, eos off, so that lengths are exact). All figures are useful tokens per
second of wall time; what counts is their ratio within a round, because machines are shared and noisy.

    equal   16 requests at a time, 32 prompt tokens, 32 new ones
    mixed   64 requests, 8-128 prompt tokens, 8-192 new ones, in order of arrival, 16 or 32 at a time
    single  one request of 128 new tokens, alone

`generate` runs padded batches in order of arrival, each as long as its longest request. `bare` is a loop of the model's
forward and an argmax, as wide and as long as the engine's steps were on average, without prefill. Both run the model as
transformers loads it. The engine runs it as the server does, with packed linear layers
(`hf_triton/runner/cpu/layer_packing.py`); so do `generate, packed` and `bare, packed`, the upper bound of any engine.
`bare, packed, prompts` adds the time to prefill each prompt by itself.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
import transformers
from folders import processor
from inside import Request, run_requests
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.runner.calling import cache_name
from hf_triton.runner.cpu import accelerate
from hf_triton.runner.padding import pad
from hf_triton.runner.step import Step

VOCABULARY = 8192
BARE_STEPS = 40
CASES = (("equal", 16), ("mixed", 16), ("mixed", 32), ("single", 1))

Result = TypeVar("Result")


def build_model(context_length: int = 1024) -> LlamaForCausalLM:
    """The model of all benchmarks on a CPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=context_length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def build_packed_model(context_length: int = 1024, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The same, as the server runs it."""
    model = build_model(context_length).to(dtype)
    accelerate(model)
    return model


def build_requests() -> dict[str, list[Request]]:
    source = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [source.randrange(VOCABULARY) for _ in range(length)]

    lengths = [8, 16, 32, 64, 128, 192]
    return {
        "equal": [(prompt(32), 32) for _ in range(16)],
        "mixed": [(prompt(source.randrange(8, 129)), source.choice(lengths)) for _ in range(64)],
        "single": [(prompt(32), 128)],
    }


def generate(model: LlamaForCausalLM, requests: list[Request], width: int) -> None:
    """`model.generate` in padded batches."""
    for start in range(0, len(requests), width):
        batch = requests[start : start + width]
        input_ids, attention_mask = pad([prompt for prompt, _ in batch], 0, torch.device("cpu"), at_left=True)
        with torch.inference_mode():
            model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max(count for _, count in batch),
                do_sample=False,
                pad_token_id=0,
            )


class Widths:
    """How wide an engine's steps are."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self._run = engine.runner.run
        engine.runner.run = self.run  # type: ignore[method-assign]

    def run(self, step: Step, *newest: Any) -> torch.Tensor:
        decodes = [part for part in step.ranges if part.is_decode]
        if decodes:
            self.rows.append(len(decodes))
            self.columns.append(max(part.end for part in decodes))
        return self._run(step, *newest)


@torch.inference_mode()
def bare_step_s(model: LlamaForCausalLM, rows: int, columns: int) -> float:
    """Seconds of one step of a bare loop."""
    cache = DynamicCache()
    start = max(1, columns - BARE_STEPS // 2)
    model(input_ids=torch.zeros(rows, start, dtype=torch.int64), **{cache_name(model): cache}, logits_to_keep=1)
    newest = torch.zeros(rows, 1, dtype=torch.int64)
    started = time.perf_counter()
    for _ in range(BARE_STEPS):
        newest = model(input_ids=newest, **{cache_name(model): cache}, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return (time.perf_counter() - started) / BARE_STEPS


@torch.inference_mode()
def reading_s(model: LlamaForCausalLM, requests: list[Request]) -> float:
    """Seconds to prefill every prompt by itself."""
    started = time.perf_counter()
    for prompt, _ in requests:
        model(input_ids=torch.tensor([prompt]), **{cache_name(model): DynamicCache()}, logits_to_keep=1)
    return time.perf_counter() - started


def apart(work: Callable[[], Result]) -> Result:
    """Run work in a thread that ends, so that its OpenMP threads end too and do not slow down the next work."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    apart(work)
    return time.perf_counter() - started


def measure(plain: LlamaForCausalLM, model: LlamaForCausalLM, requests: list[Request], width: int) -> dict[str, float]:
    """One round of one case: tokens per second of each way."""
    engine = apart(lambda: ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=width)))
    widths = Widths(engine)
    try:
        generate_s = seconds(lambda: generate(plain, requests, width))
        packed_s = seconds(lambda: generate(model, requests, width))
        continuous_s = seconds(lambda: run_requests(engine, requests, width))
    finally:
        engine.close()
    num_tokens = sum(count for _, count in requests)
    rows, columns = statistics.mean(widths.rows), statistics.mean(widths.columns)
    # The first token of every sequence comes from prefill, without a step.
    num_steps = (num_tokens - len(requests)) / rows
    plain_bare_s = num_steps * apart(lambda: bare_step_s(plain, round(rows), round(columns)))
    bare_s = num_steps * apart(lambda: bare_step_s(model, round(rows), round(columns)))
    return {
        "generate": num_tokens / generate_s,
        "generate, packed": num_tokens / packed_s,
        "continuous": num_tokens / continuous_s,
        "bare": num_tokens / plain_bare_s,
        "bare, packed": num_tokens / bare_s,
        "bare, packed, prompts": num_tokens / (bare_s + apart(lambda: reading_s(model, requests))),
        "mean rows": rows,
        "mean columns": columns,
    }


def table(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Each way's median tokens per second by case, and the medians of the rounds' ratios."""
    rows: dict[str, dict[str, float]] = {}
    for case in rounds[0]:
        figures = [each[case] for each in rounds]
        row = {name: statistics.median(each[name] for each in figures) for name in figures[0]}
        for bound in ("generate", "generate, packed", "bare", "bare, packed", "bare, packed, prompts"):
            row[f"continuous / {bound}"] = statistics.median(each["continuous"] / each[bound] for each in figures)
        row["continuous / continuous equal"] = statistics.median(
            each[case]["continuous"] / each["equal 16"]["continuous"] for each in rounds
        )
        row["continuous / generate equal"] = statistics.median(
            each[case]["continuous"] / each["equal 16"]["generate"] for each in rounds
        )
        rows[case] = row
    return rows


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Bars of tokens per second, a group for each case."""
    from matplotlib.figure import Figure

    ways = ("generate", "generate, packed", "continuous", "bare", "bare, packed, prompts", "bare, packed")
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, way in enumerate(ways):
        axes.bar(
            [place + 0.14 * number for place in range(len(rows))], [row[way] for row in rows.values()], 0.14, label=way
        )
    axes.set_xticks([place + 0.35 for place in range(len(rows))], list(rows))
    axes.set_ylabel("tokens a second")
    axes.legend()
    figure.savefig(path)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds; medians are shown.")
@click.option("--threads", default=2, show_default=True, help="Threads of torch.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for engine.json and engine.png.")
def main(rounds: int, threads: int, out: Path | None) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    plain, model, requests = apart(build_model), apart(build_packed_model), build_requests()
    for name, width in CASES:  # warm up
        measure(plain, model, requests[name][:width], width)
    figures = [
        {f"{name} {width}": measure(plain, model, requests[name], width) for name, width in CASES}
        for _ in range(rounds)
    ]
    rows = table(figures)
    names = list(next(iter(rows.values())))
    print(f"{'':34}" + "".join(f"{case:>12}" for case in rows))
    for name in names:
        digits = 2 if "/" in name else 1
        print(f"{name:34}" + "".join(f"{row[name]:>12.{digits}f}" for row in rows.values()))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        machine = {"cpu": processor(), "cores": os.cpu_count(), "threads": threads}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        content = {"machine": machine, "versions": versions, "medians": rows, "rounds": figures}
        (out / "engine.json").write_text(json.dumps(content, indent=1))
        draw(rows, out / "engine.png")


if __name__ == "__main__":
    main()
