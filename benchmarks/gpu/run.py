# SPDX-License-Identifier: Apache-2.0
"""Measures everything on one GPU in one process, before a deadline, and prints the tables.

    python benchmarks/gpu/run.py --out FOLDER
    python benchmarks/gpu/run.py --out FOLDER attention falcon     those alone; `falcon`, `sweep`, `ranks` by name only
    python benchmarks/gpu/run.py --out FOLDER --small              all of it on little, on a CPU

Tasks run one after the other, those that tell most first. One that is on file as done is left out, so that a second
call goes on where the first one ended; so is one that needs more seconds than are left, and one that fails stops no
other. Figures go to `figures.jsonl` as soon as they are known. The exit status is 1 if a task failed.

Needs torch with CUDA, transformers and this repository; pytest for the tests and their models, peft for an adapter,
tritonserver and the gateway's packages for `served`, and gcc for Triton's kernels, which `compile_ahead.py --cache` may
have compiled before. torch and triton are the device's own: `machine`, always on file, names them and the lock's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import attention
import captured
import encoder
import engine
import equality
import figures
import fp8
import peers
import ranks
import sampling
import served
import tables

ROOT = Path(__file__).parents[2]
DEADLINE_S = 540.0


@dataclass(frozen=True)
class Task:
    """What is measured together."""

    name: str
    needs_s: float
    run: Callable[[argparse.Namespace], None]
    model: str = ""
    is_default: bool = True
    """Whether it runs without being named."""


def run_tests(options: argparse.Namespace) -> None:
    """The tests of a GPU, without the options of pyproject.toml, which ask for plugins."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--import-mode", "importlib", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "tests/gpu"], cwd=ROOT, timeout=options.left_s, check=False
    )
    if done.returncode:
        raise SystemExit(f"tests/gpu ended with {done.returncode}")


TASKS = (
    Task("machine", 15, figures.main),
    Task("llama", 190, engine.main, "llama-3-8b"),
    Task("captured", 60, captured.main),
    Task("qwen", 75, engine.main, "qwen3-0.6b"),
    Task("fp8", 60, fp8.main, "llama-3-8b"),
    Task("served", 75, served.main, "qwen3-0.6b"),
    Task("attention", 60, attention.main),
    Task("equality", 70, equality.main),
    Task("tests", 90, run_tests),
    Task("encoder", 30, encoder.main),
    Task("sampling", 30, sampling.main),
    Task("peers", 90, peers.main, "llama-3-8b"),
    Task("sweep", 60, attention.main_sweep, is_default=False),
    Task("falcon", 150, engine.main, "falcon-7b", is_default=False),
    Task("ranks", 120, ranks.main, "llama-3-8b", is_default=False),
)
LARGE_TASKS = frozenset({"qwen", "falcon", "tests"})
"""Models that `--small` leaves out: the same code as `llama`, and what needs a device."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(task.name for task in TASKS))
    parser.add_argument("--small", action="store_true", help="tiny loads on a CPU, to test the benchmark itself")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of figures.jsonl")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for all tasks")
    options, began_s = parser.parse_args(), time.monotonic()
    if unknown := set(options.tasks) - {task.name for task in TASKS}:
        parser.error(f"no task {', '.join(sorted(unknown))}")
    figures.check_options(parser, options)
    file, log = options.out / figures.FILE, figures.Figures("run", options.out)
    done = {each["name"] for each in tables.read(file) if each["part"] == "run" and "seconds" in each}
    has_failed = False
    for task in TASKS:
        wanted = task.name in ("machine", *options.tasks) if options.tasks else task.is_default or options.small
        if not wanted or task.name in done or (options.small and task.name in LARGE_TASKS):
            continue
        options.left_s = options.deadline - (time.monotonic() - began_s)
        if options.left_s < task.needs_s and not options.small:
            log.add(name=task.name, skipped=f"{options.left_s:.0f} s are left of {task.needs_s:.0f}")
            continue
        options.model, started_s = "tiny" if options.small else task.model, time.monotonic()
        print(f"== {task.name}", flush=True)
        try:
            task.run(options)
            log.add(name=task.name, seconds=time.monotonic() - started_s)
        except (Exception, SystemExit) as error:
            has_failed = True
            log.add(name=task.name, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        figures.release()
    print(tables.report(tables.read(file)))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
