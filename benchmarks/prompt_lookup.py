# SPDX-License-Identifier: Apache-2.0
"""The engine with `prompt_lookup` beside the engine without, in turns, on text that repeats its prompt and other text.

The Llama of `engine.py` (34 million random parameters) repeats nothing by itself, so what it writes is given: it
computes all of its forward, and then one logit is raised by the token alone, so that a request's completion is a fixed
text. What is measured is the engine and the model's time, not how often a real model repeats its prompt. A round takes
about four minutes.

    edit     the prompt of 256 tokens again, every 40th one replaced, as when a file is edited
    summary  12 tokens of its own, then 20 quoted from the prompt, by turns
    random   text in which no two tokens stand twice
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from typing import Any

import click
import torch
import transformers
from engine import VOCABULARY, apart, build_packed_model
from inside import Request, run_requests
from transformers import LlamaForCausalLM

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import Observer

NUM_PROMPT, NUM_NEW = 256, 256
NUM_KEPT, NUM_OWN, NUM_QUOTED = 40, 12, 20
CASES = ("edit", 1), ("summary", 1), ("random", 1), ("edit", 32), ("random", 32)


class Writing:
    """What follows each token, in the text that a model is to write."""

    def __init__(self, kind: str, source: random.Random) -> None:
        ids = source.sample(range(VOCABULARY), VOCABULARY)
        self.prompt, others = ids[:NUM_PROMPT], iter(ids[NUM_PROMPT:])
        self.following = torch.tensor(ids).roll(-1)[torch.tensor(ids).argsort()]  # one round of all tokens
        if kind == "edit":
            text = [next(others) if at % NUM_KEPT == 0 else token for at, token in enumerate(self.prompt, 1)]
        elif kind == "summary":
            text = []
            for at in range(0, NUM_PROMPT - NUM_QUOTED, NUM_QUOTED):
                text += [next(others) for _ in range(NUM_OWN)] + self.prompt[at : at + NUM_QUOTED]
        else:
            text = list(others)
        for token, behind in zip([self.prompt[-1], *text], text, strict=False):
            self.following[token] = behind


def write(model: LlamaForCausalLM, following: torch.Tensor) -> None:
    """Let a model write what follows each token."""
    forward = type(model).forward

    @functools.wraps(forward)
    def writing(*args: Any, input_ids: torch.Tensor, logits_to_keep: Any = 0, **options: Any) -> Any:
        output = forward(model, *args, input_ids=input_ids, logits_to_keep=logits_to_keep, **options)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        tokens = input_ids if isinstance(kept, int) else input_ids[:, kept]
        output.logits.scatter_(-1, following[tokens].unsqueeze(-1), 1e4)
        return output

    model.forward = writing


class Counts(Observer):
    num_proposed = num_accepted = 0

    def on_proposal(self, num_proposed: int, num_accepted: int) -> None:
        self.num_proposed, self.num_accepted = self.num_proposed + num_proposed, self.num_accepted + num_accepted


def measure(model: LlamaForCausalLM, kind: str, width: int, num_proposed: int) -> tuple[float, Counts]:
    """Tokens per second of a case, without the load, and what was proposed."""
    text, counts = Writing(kind, random.Random(0)), Counts()
    write(model, text.following)
    options = EngineOptions(
        max_num_seqs=width, prompt_lookup=num_proposed, observer=counts, enable_prefix_caching=False
    )
    engine = apart(lambda: ContinuousBatchingEngine(model, options))
    requests: list[Request] = [(text.prompt, NUM_NEW)] * width
    try:
        run_requests(engine, [(text.prompt, 8)], 1)
        counts.num_proposed = counts.num_accepted = 0
        started_s = time.perf_counter()
        run_requests(engine, requests, width)
        return width * NUM_NEW / (time.perf_counter() - started_s), counts
    finally:
        engine.close()


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds; medians are shown.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
@click.option("--proposed", default=12, show_default=True, help="The setting prompt_lookup.")
@click.option("--dtype", default="float32", show_default=True, help="Of the weights.")
def main(rounds: int, threads: int, proposed: int, dtype: str) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = apart(lambda: build_packed_model(dtype=getattr(torch, dtype)))
    print(f"{'':12}{'without':>10}{'with':>10}{'ratio':>8}{'proposed':>10}{'accepted':>10}")
    for kind, width in CASES:
        measured: list[tuple[float, float]] = []
        for _ in range(rounds):
            (without, _), (with_, counts) = (measure(model, kind, width, count) for count in (0, proposed))
            measured.append((without, with_))
        ratio = statistics.median(with_ / without for without, with_ in measured)
        without, with_ = (statistics.median(way) for way in zip(*measured, strict=True))
        print(
            f"{kind:8}{width:4}{without:10.1f}{with_:10.1f}{ratio:8.2f}{counts.num_proposed:10}{counts.num_accepted:10}"
        )


if __name__ == "__main__":
    main()
