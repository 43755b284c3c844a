# SPDX-License-Identifier: Apache-2.0
"""A stream door beside a folder that streams by itself: `python benchmarks/door.py`.

One server, one tiny checkpoint, two ways to stream over `/generate_stream`: `direct` is decoupled, `door` goes through
`plain_stream` to the engine in `plain`. The two take turns; the ratio is door to direct within a round, and its median
is shown with its quartiles, because machines are shared and noisy. A step of the checkpoint takes about a millisecond:
for a useful model the share of the cost is smaller.

    tokens/s  16 streams of 64 tokens at a time, 64 streams in all
    first ms  from a request to the first token of a lone stream
    whole ms  from a request to the end of a lone stream of 32 tokens
"""

from __future__ import annotations

import http.client
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from folders import ROOT, make_folder, save, show_two, take_turns

from hf_triton.testing import TritonServer, build_tiny_checkpoint

WAYS = {"direct": "direct", "door": "plain_stream"}
"""A way's name in the table, and its folder."""
WIDTH, NUM_STREAMS = 16, 64
ALONE = 20


def stream(server: TritonServer, model: str, text: str, num_tokens: int) -> tuple[float, float]:
    """Seconds from a request to its first event and to its end."""
    body = json.dumps({"text_input": text, "max_new_tokens": num_tokens})
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection = http.client.HTTPConnection(server.host, server.http_port)
    started_s = time.perf_counter()
    connection.request("POST", f"/v2/models/{model}/generate_stream", body, headers)
    with connection.getresponse() as answer:
        answer.readline()
        first_s = time.perf_counter()
        events = answer.read()
    ended_s = time.perf_counter()
    connection.close()
    if b'"error"' in events:
        raise RuntimeError(events.decode())
    return first_s - started_s, ended_s - started_s


def tokens_per_s(server: TritonServer, model: str) -> float:
    started_s = time.perf_counter()
    with ThreadPoolExecutor(WIDTH) as pool:
        list(pool.map(lambda number: stream(server, model, f"prompt {number}", 64), range(NUM_STREAMS)))
    return NUM_STREAMS * 64 / (time.perf_counter() - started_s)


def first_ms(server: TritonServer, model: str) -> float:
    return 1e3 * statistics.median(stream(server, model, f"prompt {number}", 2)[0] for number in range(ALONE))


def whole_ms(server: TritonServer, model: str) -> float:
    return 1e3 * statistics.median(stream(server, model, f"prompt {number}", 32)[1] for number in range(ALONE))


CASES: dict[str, Callable[[TritonServer, str], float]] = {
    "tokens/s": tokens_per_s,
    "first ms": first_ms,
    "whole ms": whole_ms,
}


@click.command()
@click.option("--rounds", type=click.IntRange(2), default=15, show_default=True, help="Rounds of each case.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, out: Path | None) -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        checkpoint = build_tiny_checkpoint(Path(folder) / "checkpoint", "llama", eos_token_id=None)
        make_folder(repository, "plain", checkpoint, enable_prefix_caching="false")
        decoupled = "model_transaction_policy { decoupled: true }"
        make_folder(repository, "direct", checkpoint, decoupled, stream="true", enable_prefix_caching="false")
        shutil.copytree(ROOT / "stream_door", repository / "plain_stream")
        with TritonServer(repository) as server:
            figures = take_turns(CASES, list(WAYS), rounds, lambda case, way: CASES[case](server, WAYS[way]))
    show_two(figures, list(WAYS))
    if out is not None:
        save(figures, out)


if __name__ == "__main__":
    main()
