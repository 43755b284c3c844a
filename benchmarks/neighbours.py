# SPDX-License-Identifier: Apache-2.0
"""What a model on a CPU loses to another model in the same server: `python benchmarks/neighbours.py`.

A Llama of 34 million parameters (`benchmarks/engine.py`), random weights, torch's own number of threads. A
completion of 60 tokens is requested again and again; shown is its time as a multiple of its time alone, the median over
rounds in which two ways take turns: `shared` as models are served, `each alone` with models that do not see each other.

    two busy  another model generates the same
    loading   another model is loading; the slowest completion
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
import torch
from engine import build_model
from folders import make_folder, take_turns
from server import save

from hf_triton.testing import TritonServer

NUM_TOKENS = 60
NUM_ALONE = 5
ISOLATED = """from pathlib import Path

from hf_triton.runner.cpu import threads

threads.SHARED = Path("/nowhere")
"""


def post(server: TritonServer, path: str, body: object) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


def ask(server: TritonServer, model: str) -> float:
    """Seconds of one completion."""
    began_s = time.perf_counter()
    post(server, f"models/{model}/generate", {"text_input": "w1 w2 w3", "max_new_tokens": NUM_TOKENS})
    return time.perf_counter() - began_s


def times_of_alone(server: TritonServer, path: str, body: object) -> list[float]:
    """Times of completions while the server answers another request, as multiples of one alone."""
    alone_s = statistics.median(ask(server, "a") for _ in range(NUM_ALONE))
    other = threading.Thread(target=post, args=(server, path, body))
    other.start()
    times = []
    while other.is_alive():
        times.append(ask(server, "a") / alone_s)
    return times


def two_busy(server: TritonServer) -> float:
    ask(server, "b")
    body = {"text_input": "w1 w2 w3", "max_new_tokens": 3 * NUM_TOKENS}
    return statistics.median(times_of_alone(server, "models/b/generate", body))


def loading(server: TritonServer) -> float:
    post(server, "repository/models/b/unload", {})
    time.sleep(1)  # until its process has ended
    return max(times_of_alone(server, "repository/models/b/load", {}))


CASES: dict[str, Callable[[TritonServer], float]] = {"two busy": two_busy, "loading": loading}


def make_repository(folder: Path, checkpoint: Path, *, are_shared: bool) -> Path:
    for name in ("a", "b"):
        make_folder(folder, name, checkpoint, enable_prefix_caching="false", exclude_input_in_output="true")
        if not are_shared:
            file = folder / name / "1" / "model.py"
            head, _, rest = file.read_text().partition("import hf_triton\n")
            file.write_text(f"{head}import hf_triton\n{ISOLATED}{rest}")
    return folder


@click.command()
@click.option(
    "--rounds", default=3, show_default=True, help="Rounds; each way is measured once in each, after one to warm up."
)
def main(rounds: int) -> None:
    """Measure, and print a table."""
    print(f"{torch.get_num_threads()} threads; times of a completion as multiples of one alone")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = save(build_model(), folder / "checkpoint")
        servers = {}
        for way, are_shared in (("shared", True), ("each alone", False)):
            repository = make_repository(folder / way.replace(" ", "_"), checkpoint, are_shared=are_shared)
            arguments = ["--model-control-mode=explicit", "--load-model=*"]
            servers[way] = stack.enter_context(TritonServer(repository, arguments=arguments, exit_on_error=True))
        figures = take_turns(CASES, list(servers), rounds, lambda case, way: CASES[case](servers[way]))
    for way in servers:
        medians = (f"{case} {statistics.median(row[way] for row in rows):5.1f}" for case, rows in figures.items())
        print(f"{way:12}", *medians, sep="  ")


if __name__ == "__main__":
    main()
