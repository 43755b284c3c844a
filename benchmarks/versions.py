# SPDX-License-Identifier: Apache-2.0
"""Two versions of the engine in turns: `OMP_NUM_THREADS=1 python benchmarks/versions.py OLD NEW`.

OLD and NEW are checkouts, each with its own `hf_triton/` and `benchmarks/engine.py`. Each runs in a process of its own,
with the same packed model, one thread, and in each round the same new prompts. Shown are the medians of the rounds'
ratios, old to new: above 1, the new one is faster.

    equal     16 requests of 32 tokens and 32 new ones
    mixed     64 requests of 8 to 128 tokens and 8 to 192 new ones, 16 in flight
    single    one request of 32 tokens and 128 new ones
    many      64 prompts of 8 to 64 tokens and 32 new ones, in one request
    prefix    32 requests that share 512 of their 528 tokens, and 16 new ones, 16 in flight
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click

CASES = ("equal", "mixed", "single", "many", "prefix")
NUM_SLOTS = 16
WARM_UP = -1


def requests_of(case: str, seed: int, vocabulary: int) -> tuple[list[tuple[list[int], int]], int]:
    """Prompts and numbers of new tokens, and how many are in flight; 0: all are one request."""
    source = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [source.randrange(vocabulary) for _ in range(length)]

    if case == "equal":
        return [(prompt(32), 32) for _ in range(16)], 16
    if case == "mixed":
        return [(prompt(source.randrange(8, 129)), source.choice([8, 16, 32, 64, 128, 192])) for _ in range(64)], 16
    if case == "single":
        return [(prompt(32), 128)], 1
    if case == "many":
        return [(prompt(source.randrange(8, 65)), 32) for _ in range(64)], 0
    shared = prompt(512)
    return [(shared + prompt(16), 16) for _ in range(32)], 16


def serve(tree: Path) -> None:
    """Run the cases that standard input asks for, as a line of JSON each, with the engine of `tree`."""
    sys.path.insert(0, str(tree / "benchmarks"))
    import inside
    import torch
    from engine import VOCABULARY, build_model

    from hf_triton.engine.continuous import ContinuousBatchingEngine
    from hf_triton.engine.sequence import SequenceGroup
    from hf_triton.runner.cpu.layer_packing import pack
    from hf_triton.sampling.params import SamplingParams

    torch.set_num_threads(1)
    model = build_model(context_length=2048)
    pack(model, "all")

    def start() -> Any:
        """Start an engine; older ones take their options one by one."""
        engine: Any = ContinuousBatchingEngine
        if importlib.util.find_spec("hf_triton.engine.options") is None:
            return engine(model, max_num_seqs=NUM_SLOTS)
        from hf_triton.engine.options import EngineOptions

        return engine(model, EngineOptions(max_num_seqs=NUM_SLOTS))

    def take(put: Callable[[Any], None]) -> dict[str, Any]:
        """What passes outcomes on; groups had callbacks before they had a listener."""
        return {"listener": inside.OnFinish(put)} if hasattr(inside, "OnFinish") else {"on_finish": put}

    def run_together(engine: Any, requests: list[tuple[list[int], int]]) -> None:
        outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine.submit(
            [SequenceGroup(prompt, SamplingParams(count), **take(outcomes.put)) for prompt, count in requests]
        )
        for _ in requests:
            if not isinstance(outcome := outcomes.get(), list):
                raise outcome

    print("ready", flush=True)
    for line in sys.stdin:
        case, seed = json.loads(line)
        requests, width = requests_of(case, seed, VOCABULARY)
        with closing(start()) as engine:
            inside.run_requests(engine, [([1, 2, 3], 2)], 1)
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            if width:
                inside.run_requests(engine, requests, width)
            else:
                run_together(engine, requests)
            figures = {"s": time.perf_counter() - started_s, "cpu s": time.process_time() - started_cpu_s}
        print(json.dumps(figures), flush=True)


class Version:
    """The process of one checkout."""

    def __init__(self, tree: Path) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", tree],
            stdin=pipe,
            stdout=pipe,
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            text=True,
        )
        if self._read() != "ready":
            raise click.ClickException(f"{tree} has no engine that this script knows: its error is above")

    def run(self, case: str, seed: int) -> dict[str, float]:
        """Seconds and processor seconds of a case."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps((case, seed)) + "\n")
        self._process.stdin.flush()
        figures: dict[str, float] = json.loads(self._read())
        return figures

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


@click.command()
@click.argument("trees", nargs=-1, type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@click.option("--rounds", default=5, show_default=True, help="Rounds; medians are shown.")
@click.option("--cases", default=",".join(CASES), show_default=True, help="Which cases.")
@click.option("--serve", "is_worker", is_flag=True, hidden=True)
def main(trees: tuple[Path, ...], rounds: int, cases: str, is_worker: bool) -> None:
    """Measure two checkouts, and print a table."""
    if is_worker:
        serve(*trees)
        return
    if len(trees) != 2:
        raise click.UsageError("name two checkouts, the old one first")
    versions = [Version(tree) for tree in trees]
    for case in cases.split(","):
        for version in versions:
            version.run(case, WARM_UP)
        figures = []
        for number in range(rounds):
            order = versions if number % 2 else versions[::-1]
            by_version = {version: version.run(case, number) for version in order}
            figures.append([by_version[version] for version in versions])
        for name in figures[0][0]:
            ratios = [old[name] / new[name] for old, new in figures]
            old_s, new_s = (statistics.median(each[side][name] for each in figures) for side in (0, 1))
            print(
                f"{case:8}{name:6}{old_s:9.3f}{new_s:9.3f}   old / new {statistics.median(ratios):.2f}"
                f" ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    for version in versions:
        version.close()


if __name__ == "__main__":
    main()
