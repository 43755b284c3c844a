# SPDX-License-Identifier: Apache-2.0
"""An optimized folder beside what it could cost at least: `python benchmarks/graph.py FOLDER FOLDER_optimized`.

Milliseconds of a request of one text, tokenized beforehand, by all ways in turns; shown are medians, and the medians
and quartiles of the rounds' ratios to the first. Set OMP_NUM_THREADS to what the server would have.

    graph     the engine with the folder that `hf-triton optimize` wrote for ONNX Runtime
    by hand   ONNX Runtime called with the same graph, as users write it: from token ids to the mean of the states
    session   the same call alone
    torch     the engine with the folder that was optimized
    bare      its transformers model, as it is loaded
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime
import torch
from folders import take_turns

from hf_triton.folders.candidates import Candidate, Measured
from hf_triton.folders.graph_folder import PLACE

NUM_RUNS = 20


def by_hand(folder: Path, num_tokens: int) -> dict[str, Callable[[], Any]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(folder / PLACE / "model.onnx"), options)
    names = [each.name for each in session.get_inputs()]

    def inputs(tokens: list[int]) -> dict[str, Any]:
        ids = np.array([tokens])
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        return {name: values[name] for name in names}

    def embed(tokens: list[int]) -> Any:
        given = inputs(tokens)
        mask = given["attention_mask"][..., None]
        mean = (session.run(None, given)[0] * mask).sum(1) / mask.sum(1)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    tokens = [5] * num_tokens
    given = inputs(tokens)
    return {"by hand": lambda: embed(tokens), "session": lambda: session.run(None, given)}


def bare(folder: Path, num_tokens: int) -> Callable[[], Any]:
    _, checkpoint, _ = Candidate(folder).load()
    ids = torch.full((1, num_tokens), 5)
    return lambda: checkpoint.model(input_ids=ids, attention_mask=torch.ones_like(ids))


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument("optimized", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=16, show_default=True, help="Of the text.")
@click.option("--rounds", default=15, show_default=True, help="Rounds; medians are shown.")
@torch.inference_mode()
def main(folder: Path, optimized: Path, tokens: int, rounds: int) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    texts = ["the old harbour", "a lighthouse"]
    engines = {"graph": Measured(Candidate(optimized), texts), "torch": Measured(Candidate(folder), texts)}
    others = {**by_hand(optimized, tokens), "bare": bare(folder, tokens)}

    def take(_: str, way: str) -> float:
        if way in engines:
            return 1000 * statistics.median(engines[way].times_s((1, tokens), NUM_RUNS))
        times_s = []
        for _ in range(NUM_RUNS):
            began_s = time.perf_counter()
            others[way]()
            times_s.append(time.perf_counter() - began_s)
        return 1000 * statistics.median(times_s)

    ways = ("graph", "by hand", "session", "torch", "bare")
    figures = take_turns(["one text"], ways, rounds, take)["one text"]
    print(f"{'':<10}{'ms':>8}{'times graph':>14}{'quartiles':>14}")
    for way in ways:
        low, ratio, high = statistics.quantiles([each[way] / each["graph"] for each in figures], n=4)
        median_ms = statistics.median(each[way] for each in figures)
        print(f"{way:<10}{median_ms:>8.2f}{ratio:>14.2f}{f'{low:.2f}-{high:.2f}':>14}")


if __name__ == "__main__":
    main()
