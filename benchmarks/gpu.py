# SPDX-License-Identifier: Apache-2.0
"""The continuous engine on a GPU beside `model.generate`, transformers' paged manager and the memory's bandwidth.

    python benchmarks/gpu.py --model llama-2-7b --model falcon-7b --out figures/

Models have their real shapes and random weights, made on the device: nothing is downloaded. All sequences have the same
number of prompt tokens and of new ones, greedy, without an end token. Figures are tokens per second of a second run,
after one that warms up:

    engine     all sequences submitted at once, prefill and decoding
    generate   the same by `model.generate`, eager
    paged      the same by `model.generate_batch`, transformers' continuous batching
    decode     the engine's steps alone, model and sampler, while all sequences run
    bound      the maximum of `decode`: weights, keys and values read once per step, at the bandwidth of a copy
"""

from __future__ import annotations

import gc
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from transformers import AutoModelForCausalLM, FalconConfig, GenerationConfig, LlamaConfig, PretrainedConfig

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.sequence import Outcome, SequenceGroup
from hf_triton.runner.model_runner import BLOCK_SIZES
from hf_triton.runner.step import Step
from hf_triton.runner.way_probe import probe_ways
from hf_triton.sampling.params import SamplingParams

COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
NUM_COPIES = 20
LARGEST_BLOCK = max(BLOCK_SIZES.values())
"""Tokens: a sequence may leave as many of its last block unused."""
NO_END: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def configs() -> dict[str, PretrainedConfig]:
    """The models' own configs, as in their `config.json`."""
    return {
        "llama-2-7b": LlamaConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=4096,
            **NO_END,
        ),
        "falcon-7b": FalconConfig(
            vocab_size=65024,
            hidden_size=4544,
            num_hidden_layers=32,
            num_attention_heads=71,
            multi_query=True,
            parallel_attn=True,
            new_decoder_architecture=False,
            alibi=False,
            bias=False,
            **NO_END,
        ),
        "tiny": LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **NO_END,
        ),
    }


def build_model(name: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(configs()[name], dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = None
    return model


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of a second run; the first warms up."""
    work()
    finish(device)
    started = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - started


def bytes_per_s(device: torch.device) -> float:
    """Bytes that a large copy reads and writes in a second."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(NUM_COPIES):
            target.copy_(source)

    return 2 * NUM_COPIES * source.numel() / seconds(copy, device)


def weight_bytes(model: Any) -> int:
    """Bytes of the parameters that a step reads: all but the input embedding, of which it reads a few rows."""
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    total = sum(each.numel() * each.element_size() for each in model.parameters())
    return int(total if is_tied else total - embedding.numel() * embedding.element_size())


class Steps:
    """Stands before the engine's runner: notes when full steps begin, and what they read of keys and values."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self._run = engine.runner.run
        self._cache = engine.runner.cache
        self.full = 0
        """Sequences in a step that counts."""
        self.intervals_s: list[float] = []
        self.read_bytes: list[int] = []
        self._last_s: float | None = None
        engine.runner.run = self.run  # type: ignore[method-assign]

    def expect(self, num_sequences: int) -> None:
        self.full = num_sequences
        self.intervals_s, self.read_bytes, self._last_s = [], [], None

    def run(self, step: Step, *inflight: Any) -> torch.Tensor:
        now = time.perf_counter()
        is_full = len(step.ranges) == self.full and all(part.is_decode for part in step.ranges)
        if is_full:
            if self._last_s is not None:
                self.intervals_s.append(now - self._last_s)
            per_token = sum(blocks.bytes_per_token for blocks in self._cache.blocks())
            self.read_bytes.append(per_token * sum(part.end for part in step.ranges))
        self._last_s = now if is_full else None
        return self._run(step, *inflight)


def run_engine(engine: ContinuousBatchingEngine, prompts: list[list[int]], num_new: int) -> None:
    done = threading.Semaphore(0)
    outcomes: list[Outcome] = []

    def on_finish(outcome: Outcome) -> None:
        outcomes.append(outcome)
        done.release()

    engine.submit([SequenceGroup(prompt, SamplingParams(num_new), on_finish=on_finish) for prompt in prompts])
    for _ in prompts:
        done.acquire()
    for outcome in outcomes:
        if not isinstance(outcome, list):
            raise outcome
        if len(outcome[0].token_ids) != num_new:
            raise RuntimeError(f"a completion has {len(outcome[0].token_ids)} tokens instead of {num_new}")


@torch.inference_mode()
def run_generate(model: Any, prompts: list[list[int]], num_new: int) -> None:
    input_ids = torch.tensor(prompts, device=model.device)
    mask = torch.ones_like(input_ids)
    model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False, pad_token_id=0)


def run_paged(model: Any, prompts: list[list[int]], num_new: int) -> None:
    settings: dict[str, Any] = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(**settings)  # type: ignore[no-untyped-call]
    outputs = model.generate_batch(prompts, generation_config=config, persistent_manager=True)
    lengths = {len(each.generated_tokens) for each in outputs.values()}
    if len(outputs) != len(prompts) or lengths != {num_new}:
        raise RuntimeError(f"{len(outputs)} completions of {lengths} tokens")


def measure_engine(
    model: Any, batches: dict[int, list[list[int]]], num_new: int, bandwidth: float
) -> dict[int, dict[str, float]]:
    """`engine`, `decode` and `bound` of every batch."""
    rows: dict[int, dict[str, float]] = {}
    way = probe_ways(model)
    if way is None:
        raise RuntimeError("the continuous engine does not run this model")
    num_sequences, longest = max(batches), max(len(prompt) for prompts in batches.values() for prompt in prompts)
    engine = ContinuousBatchingEngine(
        model,
        way=way,
        max_num_seqs=num_sequences,
        max_cache_tokens=num_sequences * (longest + num_new + LARGEST_BLOCK),  # leaves memory to the other ways
        enable_prefix_caching=False,
    )
    steps, weights = Steps(engine), weight_bytes(model)
    try:
        for size, prompts in batches.items():
            steps.expect(size)
            whole_s = seconds(lambda prompts=prompts: run_engine(engine, prompts, num_new), model.device)  # type: ignore[misc]
            bound_s = (weights + statistics.mean(steps.read_bytes)) / bandwidth
            decode_s = statistics.median(steps.intervals_s)
            rows[size] = {"engine": size * num_new / whole_s, "decode": size / decode_s, "bound": size / bound_s}
    finally:
        engine.close()
    return rows


def measure(name: str, device: torch.device, sizes: list[int], lengths: tuple[int, int]) -> Any:
    """All figures of a model, by batch size, and why some are missing."""
    num_prompt, num_new = lengths
    bandwidth = bytes_per_s(device)
    model = build_model(name, device)
    batches = {
        size: torch.randint(model.config.vocab_size, (size, num_prompt), generator=torch.Generator()).tolist()
        for size in sizes
    }
    rows, missing = measure_engine(model, batches, num_new, bandwidth), dict[str, str]()
    for way, run in (("generate", run_generate), ("paged", run_paged)):
        for size, prompts in batches.items():
            release(device)
            try:
                whole_s = seconds(lambda run=run, prompts=prompts: run(model, prompts, num_new), device)  # type: ignore[misc]
            except Exception as error:  # out of memory, no such method, no kernel for this device
                missing[f"{way} {size}"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            else:
                rows[size][way] = size * num_new / whole_s
            if way == "paged" and hasattr(model, "destroy_cached_continuous_batching_manager"):
                model.destroy_cached_continuous_batching_manager()  # it was built for this batch
    for row in rows.values():
        for way, base in (("engine", "generate"), ("engine", "paged"), ("decode", "bound")):
            if base in row:
                row[f"{way} / {base}"] = row[way] / row[base]
    return {
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "weight_gb": weight_bytes(model) / 1e9,
        "rows": rows,
        "missing": missing,
    }


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def show(name: str, figures: Any) -> None:
    names = ("engine", "generate", "paged", "engine / generate", "engine / paged", "decode", "bound", "decode / bound")
    print(
        f"\n{name}: {figures['weight_gb']:.2f} GB of weights, {figures['bandwidth_gb_per_s']:.0f} GB/s; tokens a second"
    )
    print("batch " + "".join(f"{each:>19}" for each in names))
    for size, row in figures["rows"].items():
        cells = (f"{row[each]:.{2 if '/' in each else 0}f}" if each in row else "-" for each in names)
        print(f"{size:<6}" + "".join(f"{cell:>19}" for cell in cells))
    for what, why in figures["missing"].items():
        print(f"no {what}: {why}")


@click.command()
@click.option("--model", "models", type=click.Choice(list(configs())), multiple=True, default=("llama-2-7b",))
@click.option("--device", default="cuda", show_default=True)
@click.option("--batch", "sizes", type=int, multiple=True, default=(1, 8, 32, 64, 128), show_default=True)
@click.option("--prompt-tokens", default=128, show_default=True)
@click.option("--new-tokens", default=128, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for gpu.json.")
def main(
    models: tuple[str, ...],
    device: str,
    sizes: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    out: Path | None,
) -> None:
    """Measure, and print a table for each model."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    where, lengths = torch.device(device), (prompt_tokens, new_tokens)
    found = {}
    for name in models:
        found[name] = measure(name, where, sorted(sizes), lengths)
        show(name, found[name])
        release(where)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        kind = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        content = {"device": kind, "versions": versions, "prompt": prompt_tokens, "new": new_tokens, "models": found}
        (out / "gpu.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
