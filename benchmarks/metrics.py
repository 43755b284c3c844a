# SPDX-License-Identifier: Apache-2.0
"""What metrics cost: one server, two folders of one checkpoint, metrics on and off: `python benchmarks/metrics.py`.

Useful tokens per second of wall time, the two taking turns; the ratio is on to off within a round, and its median is
shown with its quartiles, because machines are shared and noisy. A step of the tiny checkpoint takes about a
millisecond: for a useful model the cost is smaller.

    many   one request of 256 prompts, 32 new tokens each, 32 sequences at a time: every token is recorded
    short  256 requests of one prompt and one new token, 16 at a time: most figures for the fewest tokens
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click
import numpy as np
import tritonclient.grpc as grpcclient
from folders import make_folder, save, take_turns

from hf_triton.testing import TritonServer, build_tiny_checkpoint

NUM_PROMPTS = 256
WIDTH = 16


def infer(client: grpcclient.InferenceServerClient, model: str, texts: list[str], num_new: int) -> None:
    tensor = grpcclient.InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object))
    client.infer(model, [tensor], parameters={"max_new_tokens": num_new})


def many(client: grpcclient.InferenceServerClient, model: str) -> int:
    infer(client, model, [f"prompt {number}" for number in range(NUM_PROMPTS)], 32)
    return NUM_PROMPTS * 32


def short(client: grpcclient.InferenceServerClient, model: str) -> int:
    with ThreadPoolExecutor(WIDTH) as pool:
        list(pool.map(lambda number: infer(client, model, [f"prompt {number}"], 1), range(NUM_PROMPTS)))
    return NUM_PROMPTS


CASES: dict[str, Callable[[grpcclient.InferenceServerClient, str], int]] = {"many": many, "short": short}


def tokens_per_s(client: grpcclient.InferenceServerClient, case: str, model: str) -> float:
    started_s = time.perf_counter()
    num_tokens = CASES[case](client, model)
    return num_tokens / (time.perf_counter() - started_s)


@click.command()
@click.option("--rounds", type=click.IntRange(2), default=15, show_default=True, help="Rounds of each case.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, out: Path | None) -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        checkpoint = build_tiny_checkpoint(Path(folder) / "checkpoint", "llama", eos_token_id=None)
        make_folder(repository, "on", checkpoint, metrics="true", enable_prefix_caching="false")
        make_folder(repository, "off", checkpoint, metrics="false", enable_prefix_caching="false")
        with TritonServer(repository) as server, grpcclient.InferenceServerClient(server.grpc_url) as client:
            figures = take_turns(CASES, ("on", "off"), rounds, partial(tokens_per_s, client))
    print(f"{'tokens/s':<8}{'off':>9}{'on':>9}{'ratio':>8}{'quartiles':>16}")
    for case, found in figures.items():
        low, middle, high = statistics.quantiles([each["on"] / each["off"] for each in found], n=4)
        off, on = (statistics.median(each[name] for each in found) for name in ("off", "on"))
        print(f"{case:<8}{off:>9.0f}{on:>9.0f}{middle:>8.3f}{f'{low:.3f}-{high:.3f}':>16}")
    if out is not None:
        save(figures, out)


if __name__ == "__main__":
    main()
