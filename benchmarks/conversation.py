# SPDX-License-Identifier: Apache-2.0
"""The second turn of a long conversation with hybrid models: `python benchmarks/conversation.py --tokens 20000`.

The models of `hybrid.py`. The first turn is a prompt of so many tokens; the second is the first with its answer and 64
tokens more. With the prefix cache the second begins where states were kept; without it computes all again. Shown are
the tokens that each turn computes, what `cached_tokens` says, and the seconds to its first token.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any, Final

import click
import hybrid
import torch
import transformers
from engine import VOCABULARY

from hf_triton.engine.choose import build_engine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import Observer
from hf_triton.engine.sequence import Completion, SequenceGroup, SequenceListener
from hf_triton.sampling.params import SamplingParams

ANSWER_TOKENS: Final = 32
NEW_TOKENS: Final = 64


class Answer(SequenceListener):
    """Waits for one answer, and notes when its first token came."""

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self.first_s = 0.0
        self.outcome: Any = None

    def on_token(self, row: int, index: int, token_id: int, logprobs: Any) -> bool:
        self.first_s = self.first_s or time.perf_counter()
        return False

    def on_finish(self, row: int, outcome: Any) -> None:
        self.outcome = outcome
        self._is_done.set()

    def wait(self) -> Completion:
        self._is_done.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        completion: Completion = self.outcome[0]
        return completion


def ask(engine: Any, prompt: list[int]) -> tuple[Completion, float]:
    """The answer to a prompt, and the seconds to its first token."""
    answer, started_s = Answer(), time.perf_counter()
    engine.submit([SequenceGroup(prompt, SamplingParams(ANSWER_TOKENS), listener=answer, listens_to_tokens=True)])
    completion = answer.wait()
    return completion, answer.first_s - started_s


def converse(model: Any, num_tokens: int, *, is_cached: bool) -> list[tuple[int, int, float]]:
    """Prompt tokens computed, cached tokens, and seconds to the first token, of two turns."""
    options = EngineOptions(
        max_num_seqs=4, context_length=2 * num_tokens, enable_prefix_caching=is_cached, observer=Observer()
    )
    engine = build_engine(model, "continuous", options)
    source = random.Random(0)
    prompt = [source.randrange(VOCABULARY) for _ in range(num_tokens)]
    turns = []
    try:
        for _ in range(2):
            completion, first_s = ask(engine, prompt)
            turns.append((len(prompt) - completion.num_cached, completion.num_cached, first_s))
            more = [source.randrange(VOCABULARY) for _ in range(NEW_TOKENS)]
            prompt = [*prompt, *completion.token_ids, *more]
    finally:
        engine.close()
    return turns


@click.command()
@click.option("--tokens", default=2000, show_default=True, help="Tokens of the first turn's prompt.")
@click.option("--models", default=",".join(hybrid.MODELS), show_default=True, help="Which of the models.")
def main(tokens: int, models: str) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    hybrid.SIZES["max_position_embeddings"] = 2 * tokens
    print(f"{'model':<14}{'prefix cache':<14}{'turn':>5}{'computed':>10}{'cached':>9}{'seconds':>10}")
    for name in models.split(","):
        model = hybrid.build(name)
        for is_cached in (True, False):
            for turn, (computed, cached, first_s) in enumerate(converse(model, tokens, is_cached=is_cached), 1):
                words = "with" if is_cached else "without"
                print(f"{name:<14}{words:<14}{turn:>5}{computed:>10}{cached:>9}{first_s:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
