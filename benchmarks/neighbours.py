# SPDX-License-Identifier: Apache-2.0
"""What a model on a CPU loses to another one of the same server: `python benchmarks/neighbours.py`.

A Llama of 34 million parameters (`benchmarks/engine.py`), random weights, as many threads as torch takes. A text of 60
tokens is asked for again and again; shown is its time as a multiple of what it takes alone, the median over rounds, in
which two ways take turns: `shared` as models are served, `each alone` with models that do not see each other.

    two busy  another model writes the same
    loading   another model is being loaded; the longest text
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import click
import torch
from engine import build_model
from folders import make_folder
from server import save

from hf_triton.testing import TritonServer

NUM_TOKENS = 60
NUM_ALONE = 5
SEES_NOBODY = """from pathlib import Path

from hf_triton.runner import cores

cores.SHARED = Path("/nowhere")
"""


def post(server: TritonServer, path: str, body: object) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


def ask(server: TritonServer, model: str) -> float:
    """Seconds of a text."""
    began_s = time.perf_counter()
    post(server, f"models/{model}/generate", {"text_input": "w1 w2 w3", "max_new_tokens": NUM_TOKENS})
    return time.perf_counter() - began_s


def ask_beside(server: TritonServer, path: str, body: object) -> list[float]:
    """Seconds of each text while another request to the server is answered."""
    other = threading.Thread(target=post, args=(server, path, body))
    other.start()
    seconds = []
    while other.is_alive():
        seconds.append(ask(server, "a"))
    return seconds


def measure(server: TritonServer) -> dict[str, float]:
    """Times as multiples of one alone."""
    alone_s = statistics.median(ask(server, "a") for _ in range(NUM_ALONE))
    loading = ask_beside(server, "repository/models/b/load", {})
    ask(server, "b")
    two = ask_beside(server, "models/b/generate", {"text_input": "w1 w2 w3", "max_new_tokens": 3 * NUM_TOKENS})
    post(server, "repository/models/b/unload", {})
    time.sleep(1)  # the unloaded model's process ends
    return {"two busy": statistics.median(two) / alone_s, "loading": max(loading) / alone_s}


def make_repository(folder: Path, checkpoint: Path, *, are_shared: bool) -> Path:
    for name in ("a", "b"):
        make_folder(folder, name, checkpoint, share_prefixes="false", exclude_input_in_output="true")
        if not are_shared:
            file = folder / name / "1" / "model.py"
            head, _, rest = file.read_text().partition("import hf_triton\n")
            file.write_text(f"{head}import hf_triton\n{SEES_NOBODY}{rest}")
    return folder


@click.command()
@click.option("--rounds", default=3, show_default=True, help="In which each way is measured once.")
def main(rounds: int) -> None:
    """Print the times of a text beside another model."""
    print(f"{torch.get_num_threads()} threads; times of a text as multiples of one alone")
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = save(build_model(), Path(scratch) / "checkpoint")
        ways = {"shared": True, "each alone": False}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        arguments = ["--model-control-mode=explicit", "--load-model=a"]
        for number in range(rounds):
            for way in ways if number % 2 else reversed(ways):
                with tempfile.TemporaryDirectory() as folder:
                    repository = make_repository(Path(folder), checkpoint, are_shared=ways[way])
                    with TritonServer(repository, arguments=arguments, exit_on_error=True) as server:
                        ask(server, "a")
                        found[way].append(measure(server))
    for way, rows in found.items():
        figures = (f"{case} {statistics.median(row[case] for row in rows):5.1f}" for case in rows[0])
        print(f"{way:12}", *figures, sep="  ")


if __name__ == "__main__":
    main()
