# SPDX-License-Identifier: Apache-2.0
"""Whether tiny models of many families give the tokens of `generate` on this device, eagerly and captured.

    python benchmarks/gpu/equality.py --out FOLDER

Greedy completions of 24 prompts in company, beside `generate` of each alone: in float32, where each must be equal, and
in bfloat16, where rounding may part some. The exit status is 1 if a completion in float32 differs.
"""

from __future__ import annotations

import random
import tempfile
from argparse import Namespace
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import torch
from figures import Figures, read_options
from loads import Listener

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.sequence import Outcome, SequenceGroup
from hf_triton.runner.cuda import fuse
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import load

FAMILIES = ("llama", "falcon", "qwen3", "gemma3", "gpt-oss", "mixtral", "deepseek-v3", "qwen3-next")
SMALL = ("llama", "falcon")
NUM_PROMPTS, MAX_TOKENS = 24, 40
VOCAB_SIZE = 300
"""The smallest of theirs."""
MODES: tuple[Literal["eager", "auto"], ...] = ("eager", "auto")

Item = tuple[list[int], int]
"""A prompt, and the number of new tokens."""


def build(family: str, dtype: torch.dtype, device: torch.device) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = load(family, Path(folder))
    return model.to(device, dtype)


def items(count: int) -> list[Item]:
    """Some begin alike."""
    source = random.Random(0)
    shared = [source.randrange(3, VOCAB_SIZE) for _ in range(MAX_TOKENS)]
    prompts = [[source.randrange(3, VOCAB_SIZE) for _ in range(source.randrange(1, MAX_TOKENS))] for _ in range(count)]
    return [
        ((shared if number % 3 == 0 else []) + each, source.randrange(1, 24)) for number, each in enumerate(prompts)
    ]


@torch.inference_mode()
def alone(model: Any, item: Item) -> list[int]:
    ids = torch.tensor([item[0]], device=model.device)
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=item[1], do_sample=False, pad_token_id=0)
    tokens: list[int] = output[0, len(item[0]) :].tolist()
    return tokens


def in_company(engine: ContinuousBatchingEngine, given: list[Item]) -> list[list[int]]:
    answers = [Future[Outcome]() for _ in given]
    engine.submit(
        [
            SequenceGroup(prompt, SamplingParams(count), listener=Listener(answer.set_result))
            for (prompt, count), answer in zip(given, answers, strict=True)
        ]
    )
    outcomes = [answer.result(timeout=60) for answer in answers]
    return [[] if not isinstance(outcome, list) else outcome[0].token_ids for outcome in outcomes]


def compare(model: Any, mode: Literal["eager", "auto"], given: list[Item], expected: list[list[int]]) -> dict[str, Any]:
    """Equal completions, and whether steps were captured."""
    way = find_way(model).way
    if way is None:
        raise RuntimeError("the continuous engine does not run this model")
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=8, max_cache_tokens=1024, decoding=mode), way)
    with closing(engine):
        found = in_company(engine, given)
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    return {"equal": equal, "of": len(given), "is_captured": engine.runner._graphs is not None}


def main(options: Namespace) -> None:
    figures, num_wrong = Figures("equality", options.out), 0
    given = items(6 if options.small else NUM_PROMPTS)
    for dtype in (torch.float32, torch.bfloat16):
        for family in SMALL if options.small else FAMILIES:
            names = {"model": family, "load": str(dtype).removeprefix("torch.")}
            with figures.attempt(**names):
                model = build(family, dtype, options.device)
                expected = [alone(model, item) for item in given]
                fuse(model)
                for mode in MODES[:1] if options.small else MODES:
                    found = compare(model, mode, given, expected)
                    figures.add(**names, name=mode, **found)
                    num_wrong += (found["of"] - found["equal"]) * (dtype == torch.float32)
    if num_wrong:
        raise SystemExit(f"{num_wrong} completions in float32 differ")


if __name__ == "__main__":
    main(read_options(__doc__))
