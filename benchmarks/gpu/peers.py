# SPDX-License-Identifier: Apache-2.0
"""What else runs such a model on the same card, at loads of engine.py.

    python benchmarks/gpu/peers.py llama-3-8b --out FOLDER

    rows      `generate`, eager: torch's attention (SDPA) over rows of equal lengths
    paged     `generate_batch`, transformers' continuous batching
    compiled  `generate` with a static cache, compiled by torch

A decoding step's time is what more tokens take, divided by their number.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from figures import Figures, read_options, wall_s
from loads import random_prompts
from models import CONFIGS, build_decoder
from transformers import GenerationConfig

DECODES = ((1, 512), (64, 1024), (16, 1024), (256, 512))
EQUAL = 64, 384, 128
"""Requests, tokens of each prompt, new ones."""
SMALL_DECODES, SMALL_EQUAL = ((1, 16), (4, 70)), (4, 20, 8)
NUM_STEPS = 32


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], num_new: int, **options: Any) -> None:
    input_ids = torch.tensor(prompts, device=model.device)
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
        **options,
    )


def generate_batch(model: Any, prompts: list[list[int]], num_new: int) -> None:
    """Transformers' continuous batching, with `num_new` tokens for each prompt.

    Raises:
        RuntimeError: Some are missing.
    """
    settings: dict[str, Any] = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(**settings)  # type: ignore[no-untyped-call]
    outputs = model.generate_batch(prompts, generation_config=config)
    lengths = {len(each.generated_tokens) for each in outputs.values()}
    if len(outputs) != len(prompts) or lengths != {num_new}:
        raise RuntimeError(f"{len(outputs)} completions of {lengths} tokens")


class Peers:
    """One model, run by transformers."""

    def __init__(self, figures: Figures, model: Any, name: str) -> None:
        self.figures, self.model, self.name = figures, model, name

    def prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        return random_prompts(count, num_tokens, self.model.config.vocab_size)

    def decode(self, way: str, count: int, num_tokens: int, **options: Any) -> None:
        """Steps of `generate`, after one run that warms up or compiles."""
        names = {"model": self.name, "name": way, "load": f"{count} x {num_tokens}"}
        with self.figures.attempt(**names):
            prompts, num_short = self.prompts(count, num_tokens), 4
            num_long = num_short + NUM_STEPS

            def run_s(num_new: int) -> float:
                return wall_s(lambda: generate(self.model, prompts, num_new, **options), self.model.device)

            warm_up_s = run_s(num_long)
            step_s = (run_s(num_long) - run_s(num_short)) / NUM_STEPS
            self.figures.add(**names, tokens_per_s=count / step_s, step_ms=1000 * step_s, warm_up_s=warm_up_s)

    def equal(self, count: int, num_tokens: int, num_new: int) -> None:
        """All requests at once, prompts included."""
        for way, run in (("rows", generate), ("paged", generate_batch)):
            names = {"model": self.name, "name": way, "load": f"{count} x ({num_tokens} + {num_new})"}
            if way == "paged" and self.model.device.type == "cpu":
                self.figures.add(**names, skipped="it takes all memory of a CPU")
                continue
            with self.figures.attempt(**names):
                prompts = self.prompts(count, num_tokens)
                took_s = min(wall_s(lambda: run(self.model, prompts, num_new), self.model.device) for _ in range(2))  # noqa: B023
                self.figures.add(**names, tokens_per_s=count * num_new / took_s)


def main(options: Namespace) -> None:
    figures = Figures("peers", options.out)
    peers = Peers(figures, build_decoder(options.model, options.device), options.model)
    decodes = SMALL_DECODES if options.small else DECODES
    for load in decodes[:2]:
        peers.decode("rows", *load)
    peers.equal(*(SMALL_EQUAL if options.small else EQUAL))
    if options.small:
        figures.add(model=options.model, name="compiled", skipped="torch compiles for a CPU with a C++ compiler alone")
    else:
        for load in decodes[:2]:
            peers.decode("compiled", *load, cache_implementation="static")
    for load in decodes[2:]:
        peers.decode("rows", *load)


if __name__ == "__main__":
    main(read_options(__doc__, tuple(CONFIGS)))
