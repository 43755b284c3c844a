# SPDX-License-Identifier: Apache-2.0
"""Model folders for the benchmarks over a server, and rounds in which two ways take turns."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]

Figures = dict[str, list[dict[str, float]]]
"""A figure of each way for each round, by case."""


def processor() -> str:
    """The processor's architecture and the instruction set that torch uses: `x86_64 AVX512`."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def make_folder(repository: Path, name: str, checkpoint: Path, config: str = "", **settings: object) -> None:
    """A folder like falcon7b/ for another checkpoint."""
    folder = repository / name
    shutil.copytree(ROOT / "falcon7b" / "1", folder / "1")
    values = {"huggingface_model": str(checkpoint), **settings}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
    (folder / "config.pbtxt").write_text("\n".join(['backend: "python"', config, *lines]))


def take_turns(cases: Iterable[str], ways: Sequence[str], rounds: int, take: Callable[[str, str], float]) -> Figures:
    """Measure every case by every way, in turns that change with each round; the first round warms up."""
    figures: Figures = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case, found in figures.items():
            figure = {way: take(case, way) for way in (ways if number % 2 else reversed(ways))}
            if number:
                found.append(figure)
    return figures


def show_two(figures: Figures, ways: Sequence[str]) -> None:
    """Print each case's medians of two ways, and the ratio of the second to the first with its quartiles."""
    first, second = ways
    print(f"{'':<15}{first:>10}{second:>10}{'ratio':>8}{'quartiles':>16}")
    for case, found in figures.items():
        low, middle, high = statistics.quantiles([each[second] / each[first] for each in found], n=4)
        one, two = (statistics.median(each[way] for each in found) for way in ways)
        print(f"{case:<15}{one:>10.2f}{two:>10.2f}{middle:>8.3f}{f'{low:.3f}-{high:.3f}':>16}")


def save(figures: Figures, out: Path) -> None:
    """Write the figures as JSON, with the machine and the versions."""
    versions = {
        "torch": torch.__version__,
        "cpu": processor(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    out.write_text(json.dumps({"versions": versions, "rounds": figures}, indent=1))
