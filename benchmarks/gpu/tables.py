# SPDX-License-Identifier: Apache-2.0
"""Tables of the figures that `run.sh` wrote: `python benchmarks/gpu/tables.py figures.jsonl` prints them and the goals.

docs/performance.md has those of the files in `results/`, one for each run on a GPU, unchanged (`make docs`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NOTHING = "Nothing has been measured on a GPU yet."

Record = Mapping[str, Any]
"""A line of a file of figures."""

NAMES = ("model", "name", "load")
SPEED = ("tokens_per_s", "step_ms", "ttft_p50_ms", "itl_p99_ms", "of_bound", "held_over_live", "preempted")
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "The continuous engine": ("engine", SPEED),
    "Its start": ("engine", ("start_s", "probe_s", "capture_s", "graphs", "eager_because", "reserved_gb")),
    "Kernels of its decoding steps": ("engine", ("kernels_per_layer", "kernels_per_step", "step_us")),
    "Transformers on the same card": ("peers", SPEED[:2]),
    "Completions equal to those of `generate`": ("equality", ("equal", "of", "is_captured")),
    "Attention of one layer": ("attention", ("us", "tb_per_s", "of_copy", "tflops", "error", "rows_us", "sdpa_us")),
    "Encoders": ("encoder", ("texts_per_s", "of_padded", "alone_ms", "distance")),
}
"""By heading: the part of the run, and the figures of a row; a record without any is in no row."""

LLAMA, MIX = ("engine", "llama-3-8b"), ("mix", "64 in flight")
AT_LEAST = {
    (*LLAMA, "decode", "1 x 512", "tokens_per_s"): 145,
    (*LLAMA, "decode", "16 x 1024", "tokens_per_s"): 2050,
    (*LLAMA, "decode", "64 x 1024", "tokens_per_s"): 6100,
    (*LLAMA, "decode", "256 x 512", "tokens_per_s"): 15000,
    (*LLAMA, *MIX, "tokens_per_s"): 5500,
    ("engine", "qwen3-0.6b", "decode", "1 x 512", "tokens_per_s"): 600,
    ("attention", "llama-3-8b", None, "64 x 1024 + 1", "of_copy"): 0.75,
    ("attention", "llama-3-8b", None, "1 x 0 + 2048", "tflops"): 250,
}
AT_MOST = {
    (*LLAMA, *MIX, "ttft_p50_ms"): 60,
    (*LLAMA, *MIX, "held_over_live"): 1.03,
    (*LLAMA, "start, warm", None, "start_s"): 15,
    (*LLAMA, "profile", "1 x 512", "kernels_per_layer"): 17,
}
"""Goals on an H100, by part, names and figure."""


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tables(records: Iterable[Record]) -> str:
    """Markdown of one run: the machine, the tables, and what failed."""
    records = list(records)
    lines = []
    for machine in (each for each in records if each["part"] == "machine"):
        versions = ", ".join(
            f"{name} {_cell(value)}" for name, value in machine.items() if name not in ("part", "card")
        )
        lines += [f"**{machine['card']}**: {versions}.", ""]
    for heading, (part, columns) in TABLES.items():
        lines += _table(heading, [each for each in records if each["part"] == part], columns)
    for reason in ("failed", "skipped"):
        for each in (each for each in records if reason in each):
            names = " ".join(str(each[name]) for name in ("part", *NAMES, "way") if name in each)
            lines.append(f"* {reason}: {names}: {each[reason]}")
    return "\n".join(lines).strip()


def _table(heading: str, records: list[Record], columns: tuple[str, ...]) -> list[str]:
    """Nothing if there is no row; columns that are empty are left out."""
    rows = [each for each in records if any(column in each for column in columns)]
    used = [column for column in (*NAMES, *columns) if any(each.get(column) is not None for each in rows)]
    if not rows:
        return []
    lines = [
        f"{heading}:",
        "",
        f"| {' | '.join(column.replace('_', ' ') for column in used)} |",
        "|---" * len(used) + "|",
    ]
    return [*lines, *(f"| {' | '.join(_cell(each.get(column)) for column in used)} |" for each in rows), ""]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def goals(records: Iterable[Record]) -> str:
    """A line for each goal: reached, missed, or not measured."""
    measured: dict[tuple[Any, ...], Any] = {}
    for record in records:
        names = record["part"], *(record.get(name) for name in NAMES)
        measured.update({(*names, figure): value for figure, value in record.items()})
    lines = []
    for bounds, sign in ((AT_LEAST, 1), (AT_MOST, -1)):
        for names, bound in bounds.items():
            value = measured.get(names)
            verdict = "not measured" if value is None else "reached" if sign * (value - bound) >= 0 else "MISSED"
            what = " ".join(str(name) for name in names if name is not None)
            lines.append(f"{verdict}: {what} {'>=' if sign > 0 else '<='} {bound}: {_cell(value)}")
    return "\n".join(lines)


def document(folder: Path = RESULTS) -> str:
    """The tables of all runs in a folder, the last one first."""
    runs = [tables(read(path)) for path in sorted(folder.glob("*.jsonl"), reverse=True)]
    return "\n\n".join(runs) or NOTHING


if __name__ == "__main__":
    run = read(Path(sys.argv[1]))
    print(tables(run), goals(run), sep="\n\n")
