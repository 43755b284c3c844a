# SPDX-License-Identifier: Apache-2.0
"""The continuous engine on one model of a real shape, in bfloat16.

    python benchmarks/gpu/engine.py llama-3-8b --out FOLDER

    start     seconds until the engine takes requests: memory, kernels, captured graphs; again with warm kernel caches
    decode    steps of N sequences of C cached tokens, and nothing else; `drawn`: with top_p
    prompt    one prompt of 2,048 tokens
    equal     64 requests of one length, all at once, as peers.py has them
    mix       requests of log-normal lengths, N in flight; `grammar`: a tenth of them constrained; `prefixes`: each
              begins with one of four prefixes of 512 tokens
    profile   kernels of a layer, and microseconds of a decoding step by class
    mix, 1024 the mixes once more with steps of up to 1,024 tokens beside decoding sequences, in place of 512

`of_bound` is the part of what the card reaches in the same run: bytes read (weights, keys, values) at a copy's
bandwidth, or operations at a large product's speed.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from figures import Figures, copy_bytes_per_s, matmul_flops, read_options, release
from loads import Meter, Request, decoding, mixed_requests, random_prompts, run_requests
from models import CONFIGS, build_decoder, num_layer_weights, weight_bytes

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.options import EngineOptions
from hf_triton.runner.cuda import fuse
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.device_step import step_sizes
from hf_triton.runner.model_runner import ModelRunner
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams

CLASSES = {
    "attention": ("attend", "attention", "combine", "fmha", "flash"),
    "matmul": ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "matmul"),
    "norm, rotary, activation": ("norm", "rotary", "silu", "gelu", "mul"),
    "copy": ("memcpy", "memset", "copy", "cat", "index"),
    "sampling": ("argmax", "sample", "draw", "softmax", "reduce", "sort", "topk"),
}
"""Groups of kernels, by a part of their names; the first that fits."""


LARGE_STEPS = ChunkSizes(1024, 1024)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    decodes: tuple[tuple[int, int], ...] = ((1, 512), (16, 1024), (64, 1024), (256, 512))
    drawn: tuple[int, int] = (64, 1024)
    num_steps: int = 48
    prompt_tokens: int = 2048
    equal: tuple[int, int, int] = (64, 384, 128)
    """Requests, tokens of each prompt, new ones."""
    mixes: tuple[tuple[int, int], ...] = ((64, 640), (256, 1400))
    """Requests in flight, and in all: some 20 s of an H100 with an 8B, and a tail."""
    max_mixed_tokens: int = 2048
    prefix_tokens: int = 512
    max_num_seqs: int = 256
    max_cache_tokens: int = 200_000
    max_new_tokens: int = 512
    """Tokens of sequences that are cancelled before."""


SMALL = Plan(
    decodes=((1, 16), (4, 70)),
    drawn=(2, 16),
    num_steps=4,
    prompt_tokens=100,
    equal=(4, 20, 8),
    mixes=((4, 12),),
    max_mixed_tokens=24,
    prefix_tokens=64,
    max_num_seqs=4,
    max_cache_tokens=8192,
)


@dataclass
class Run:
    """A model in its engine, and the card's bounds."""

    figures: Figures
    model: Any
    name: str
    engine: ContinuousBatchingEngine
    meter: Meter
    plan: Plan
    bandwidth: float
    flops: float

    def prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        return random_prompts(count, num_tokens, self.model.config.vocab_size, seed=num_tokens)

    def mixed(self, count: int, seed: int, **kinds: Any) -> list[Request]:
        return mixed_requests(count, self.model.config.vocab_size, seed, max_tokens=self.plan.max_mixed_tokens, **kinds)

    def decode(self, count: int, num_tokens: int, params: SamplingParams, name: str = "decode") -> None:
        """Steps of `count` sequences of about `num_tokens` tokens."""
        load = f"{count} x {num_tokens}"
        with self.figures.attempt(model=self.name, name=name, load=load):
            with decoding(self.engine, self.meter, self.prompts(count, num_tokens), params):
                self.meter.wait(3)
                seen = self.meter.wait(self.plan.num_steps)
            step_s = statistics.median(seen.intervals_s)
            read_tokens = statistics.mean(seen.read_tokens)
            per_token = sum(blocks.bytes_per_token for blocks in self.engine.runner.cache.blocks())
            bound_s = (weight_bytes(self.model) + per_token * read_tokens) / self.bandwidth
            self.figures.add(
                model=self.name,
                name=name,
                load=load,
                tokens_per_s=count / step_s,
                step_ms=1000 * step_s,
                of_bound=bound_s / step_s,
                mean_tokens=read_tokens / count,
            )

    def prompt(self, num_tokens: int) -> None:
        """One prompt after the other, alone."""
        with self.figures.attempt(model=self.name, name="prompt", load=f"1 x {num_tokens}"):
            prompts = self.prompts(4, num_tokens)
            times = [
                run_requests(self.engine, [Request(each, SamplingParams(1))], 1)["ttft_p50_ms"] for each in prompts
            ]
            took_s = statistics.median(times[1:]) / 1000
            operations = 2 * num_layer_weights(self.model) * num_tokens  # the head is computed for the last token alone
            self.figures.add(
                model=self.name,
                name="prompt",
                load=f"1 x {num_tokens}",
                tokens_per_s=num_tokens / took_s,
                ttft_p50_ms=1000 * took_s,
                of_bound=operations / took_s / self.flops,
            )

    def mix(self, name: str, width: int, requests: list[Request], load: str | None = None) -> None:
        """All requests, `width` in flight."""
        load = load or f"{width} in flight"
        with self.figures.attempt(model=self.name, name=name, load=load):
            self.meter.clear()
            times = run_requests(self.engine, requests, width)
            seen = self.meter.seen
            self.figures.add(
                model=self.name,
                name=name,
                load=load,
                **times,
                held_over_live=seen.num_held / seen.num_live,
                preempted=seen.num_preempted,
                reused_tokens=seen.num_reused,
                steps=seen.num_steps,
            )

    def profile(self, count: int, num_tokens: int, params: SamplingParams) -> None:
        """Kernels of steps that decode."""
        load = f"{count} x {num_tokens}"
        with self.figures.attempt(model=self.name, name="profile", load=load):
            with decoding(self.engine, self.meter, self.prompts(count, num_tokens), params):
                self.meter.wait(3)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    num_steps = len(self.meter.wait(self.plan.num_steps).intervals_s)
            self.figures.add(
                model=self.name, name="profile", load=load, **kernels(profile, num_steps, self._num_layers())
            )

    def _num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)


def kernels(profile: Any, num_steps: int, num_layers: int) -> dict[str, Any]:
    """Kernels of a layer (those that every layer has), and microseconds of a step by class."""
    events = [each for each in profile.key_averages() if each.device_type.name == "CUDA"]
    step_us: dict[str, float] = {}
    for event in events:
        name = event.key.lower()
        found = next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), "other")
        step_us[found] = round(step_us.get(found, 0.0) + event.self_device_time_total / num_steps, 1)
    return {
        "kernels_per_layer": sum(round(event.count / num_steps / num_layers) for event in events),
        "kernels_per_step": sum(event.count for event in events) / num_steps,
        "step_us": step_us,
        "kernels": {event.key[:80]: round(event.count / num_steps, 1) for event in events},
    }


@contextmanager
def timed_capture() -> Iterator[dict[str, Any]]:
    """How long an engine that starts meanwhile captures graphs, how many, or why none."""
    found: dict[str, Any] = {"eager_because": "the device is a CPU"}
    original = ModelRunner.capture

    def capture(runner: ModelRunner, max_sequences: int, *others: int) -> str | None:
        began_s = time.perf_counter()
        reason = original(runner, max_sequences, *others)
        found.update(capture_s=time.perf_counter() - began_s, eager_because=reason)
        found["graphs"] = 0 if reason else len(step_sizes(max_sequences))
        return reason

    ModelRunner.capture = capture  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        ModelRunner.capture = original  # type: ignore[method-assign]


@contextmanager
def started(
    figures: Figures, model: Any, name: str, plan: Plan, start: str, chunk_sizes: ChunkSizes | None = None
) -> Iterator[tuple[ContinuousBatchingEngine, Meter]]:
    """An engine, whose start is a figure."""
    began_s = time.perf_counter()
    way = find_way(model).way
    if way is None:
        raise RuntimeError("the continuous engine does not run this model")
    probed_s = time.perf_counter()
    meter = Meter()
    with timed_capture() as captured:
        engine = ContinuousBatchingEngine(
            model,
            EngineOptions(
                max_num_seqs=plan.max_num_seqs,
                max_cache_tokens=plan.max_cache_tokens,
                observer=meter,
                config=EngineConfig(chunk_sizes),
            ),
            way,
        )
    meter.attach(engine)
    figures.add(
        model=name,
        name=start,
        start_s=time.perf_counter() - began_s,
        probe_s=probed_s - began_s,
        **captured,
        reserved_gb=torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0,
    )
    try:
        yield engine, meter
    finally:
        engine.close()


def main(options: Namespace) -> None:
    figures, device, plan = Figures("engine", options.out), options.device, SMALL if options.small else Plan()
    began_s = time.perf_counter()
    model = build_decoder(options.model, device)
    fuse(model)
    figures.add(
        model=options.model, name="weights", build_s=time.perf_counter() - began_s, gb=weight_bytes(model) / 1e9
    )
    bounds = copy_bytes_per_s(device), matmul_flops(device)
    greedy = SamplingParams(plan.max_new_tokens)
    with started(figures, model, options.model, plan, "start") as (engine, meter):
        measure(Run(figures, model, options.model, engine, meter, plan, *bounds), greedy)
    del engine, meter  # which holds the engine's runner
    release()
    if device.type != "cuda":
        figures.add(model=options.model, name="profile", skipped="kernels are those of a CUDA device")
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        pass  # graphs that are captured before the first profile show no kernels
    with started(figures, model, options.model, plan, "start, warm", LARGE_STEPS) as (engine, meter):
        run = Run(figures, model, options.model, engine, meter, plan, *bounds)
        for count, num_tokens in (plan.decodes[0], plan.drawn):
            run.profile(count, num_tokens, greedy)
        for width, count in plan.mixes:
            run.mix("mix, 1024", width, run.mixed(count, width))


def measure(run: Run, greedy: SamplingParams) -> None:
    """All loads, those that decide most first."""
    plan = run.plan
    for count, num_tokens in plan.decodes:
        run.decode(count, num_tokens, greedy)
    for width, count in plan.mixes:
        run.mix("mix", width, run.mixed(count, width))
    run.prompt(plan.prompt_tokens)
    drawn = SamplingParams(plan.max_new_tokens, do_sample=True, temperature=0.8, top_p=0.9, seed=0)
    run.decode(*plan.drawn, drawn, "decode, drawn")
    width, count = plan.mixes[0]
    run.mix("mix, grammar", width, run.mixed(count, 1, constrained=0.1))
    run.mix("mix, prefixes", width, run.mixed(count, 2, prefixes=run.prompts(4, plan.prefix_tokens)))
    num_requests, num_prompt, num_new = plan.equal
    equal = [Request(prompt, SamplingParams(num_new)) for prompt in run.prompts(num_requests, num_prompt)]
    run.mix("equal", num_requests, equal, f"{num_requests} x ({num_prompt} + {num_new})")


if __name__ == "__main__":
    main(read_options(__doc__, tuple(CONFIGS)))
