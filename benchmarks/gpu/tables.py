# SPDX-License-Identifier: Apache-2.0
"""Tables of the figures that `run.py` wrote: `python benchmarks/gpu/tables.py figures.jsonl` prints them and the goals.

docs/performance.md has some rows of the files in `results/`, which keep every figure (`make docs`).
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
SPEED = (
    "tokens_per_s",
    "steady_tokens_per_s",
    "tail_s",
    "step_ms",
    "ttft_p50_ms",
    "itl_p99_ms",
    "of_bound",
    "held_over_live",
    "preempted",
)
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "The continuous engine": ("engine", SPEED),
    "Its start": ("engine", ("start_s", "probe_s", "capture_s", "graphs", "eager_because", "reserved_gb")),
    "Captured steps of architectures": ("captured", ("graphs", "steps", "replays", "start_s", "eager_because")),
    "Through tritonserver and the gateway": ("served", ("tokens_per_s", "of_engine", "ttft_p50_ms")),
    "Kernels of its decoding steps": ("engine", ("kernels_per_layer", "kernels_per_step", "step_us")),
    "Transformers on the same card": ("peers", ("tokens_per_s", "step_ms")),
    "Completions equal to those of `generate`": ("equality", ("equal", "of", "is_captured")),
    "Attention of one layer": ("attention", ("us", "tb_per_s", "of_copy", "tflops", "error", "rows_us", "sdpa_us")),
    "Encoders": ("encoder", ("texts_per_s", "of_padded", "alone_ms", "distance")),
}
"""The part of the run and the figures of a row, by heading; a record without any is in no row."""

LLAMA, MIX = ("engine", "llama-3-8b"), ("mix", "64 in flight")
AT_LEAST = {
    (*LLAMA, "decode", "1 x 512", "tokens_per_s"): 145,
    (*LLAMA, "decode", "16 x 1024", "tokens_per_s"): 2050,
    (*LLAMA, "decode", "64 x 1024", "tokens_per_s"): 6300,
    (*LLAMA, "decode", "256 x 512", "tokens_per_s"): 15800,
    (*LLAMA, *MIX, "steady_tokens_per_s"): 6500,
    (*LLAMA, "mix", "256 in flight", "steady_tokens_per_s"): 12000,
    ("engine", "qwen3-0.6b", "decode", "1 x 512", "tokens_per_s"): 600,
    ("attention", "llama-3-8b", None, "64 x 1024 + 1", "of_copy"): 0.75,
    ("attention", "llama-3-8b", None, "1 x 0 + 2048", "tflops"): 200,
}
AT_MOST = {
    (*LLAMA, *MIX, "ttft_p50_ms"): 60,
    (*LLAMA, *MIX, "held_over_live"): 1.03,
    (*LLAMA, "start, warm", None, "start_s"): 15,
    (*LLAMA, "prompt", "1 x 2048", "ttft_p50_ms"): 65,
    ("engine", "qwen3-0.6b", "prompt", "1 x 2048", "ttft_p50_ms"): 20,
    (*LLAMA, "profile", "1 x 512", "kernels_per_layer"): 14,
}
"""Goals on an H100, by part, names and figure."""

PACKAGES = ("python", "torch", "triton", "transformers", "numpy", "commit")
"""What the document says of the machine beside the card."""
READER: tuple[tuple[str, str, tuple[str, str, str]], ...] = (
    ("Llama-3-8B, tokens", "1 sequence of 512", ("llama-3-8b", "decode", "1 x 512")),
    ("", "64 of 1,024", ("llama-3-8b", "decode", "64 x 1024")),
    ("", "256 of 512", ("llama-3-8b", "decode", "256 x 512")),
    ("", "mixed lengths, 64 in flight", ("llama-3-8b", "mix", "64 in flight")),
    ("", "mixed lengths, 256 in flight", ("llama-3-8b", "mix", "256 in flight")),
    ("Qwen3-0.6B, tokens", "1 sequence of 512", ("qwen3-0.6b", "decode", "1 x 512")),
    ("", "64 of 1,024", ("qwen3-0.6b", "decode", "64 x 1024")),
    ("", "256 of 512", ("qwen3-0.6b", "decode", "256 x 512")),
    ("", "mixed lengths, 256 in flight", ("qwen3-0.6b", "mix", "256 in flight")),
    ("Falcon-7B, tokens", "1 sequence of 512", ("falcon-7b", "decode", "1 x 512")),
    ("", "64 of 1,024", ("falcon-7b", "decode", "64 x 1024")),
    ("all-MiniLM-L6-v2, texts", "4,096 in float16", ("minilm", "float16", "4096 texts")),
)
"""The rows of the document: words for a model and a load, and the names of their records."""


def read(path: Path) -> list[Record]:
    """The lines of a file; none: it is not there yet."""
    if not path.exists():
        return []
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


def report(records: Iterable[Record]) -> str:
    """All tables of one run, and the goals."""
    records = list(records)
    return f"{tables(records)}\n\n{goals(records)}"


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
    """Rows for a reader, each of the last run that has its figure, and the machines of these runs."""
    runs = [read(path) for path in sorted(folder.glob("*.jsonl"))]
    if not runs:
        return NOTHING
    head = "| what | load | card | per second | times transformers | CUDA graphs |\n|---|---|---|---|---|---|"
    found = [_reader_row(what, load, names, runs[::-1]) for what, load, names in READER]
    rows = [row for row, _ in found]
    equal, machine = _equality(runs)
    rows.append(f"| completions equal to those of `generate` | {equal} | {_card(machine)} | - | - | - |")
    used = {_card(each): each for each in [*(each for _, each in found), machine] if each}
    return "\n".join([*(f"* **{name}**: {_versions(each)}." for name, each in used.items()), "", head, *rows])


def _machine(run: Iterable[Record]) -> Record:
    return next((each for each in run if each["part"] == "machine"), {})


def _card(machine: Record) -> str:
    """A card and the day of its run."""
    return f"{str(machine['card']).removeprefix('NVIDIA ')}, {machine.get('date')}" if machine else "-"


def _versions(machine: Record) -> str:
    return ", ".join(f"{name} {machine[name]}" for name in PACKAGES if name in machine)


def _reader_row(what: str, load: str, names: tuple[str, str, str], runs: list[list[Record]]) -> tuple[str, Record]:
    """A row of the first run that has its figure, and that run's machine."""
    model, _, of_load = names
    for run in runs:
        by_names = {(each["part"], each.get("model"), each.get("name"), each.get("load")): each for each in run}
        found = by_names.get(("engine", *names)) or by_names.get(("encoder", *names), {})
        speed = found.get("steady_tokens_per_s") or found.get("tokens_per_s") or found.get("texts_per_s")
        if speed is not None:
            peer = by_names.get(("peers", model, "rows", of_load), {}).get("tokens_per_s")
            times = found.get("of_padded") or (speed / peer if peer else None)
            graphs = by_names.get(("engine", model, "start", None), {}).get("graphs")
            beside, machine = f"{times:.2f}" if times else "-", _machine(run)
            return f"| {what} | {load} | {_card(machine)} | {speed:,.0f} | {beside} | {_cell(graphs)} |", machine
    return f"| {what} | {load} | - | not measured | - | - |", {}


def _equality(runs: list[list[Record]]) -> tuple[str, Record]:
    """How many completions are equal, by dtype, in the run that compared most, and its machine."""
    counts = []
    for run in runs:
        found: dict[str, list[int]] = {}
        for each in (each for each in run if each["part"] == "equality" and "equal" in each):
            total = found.setdefault(each["load"], [0, 0])
            total[0], total[1] = total[0] + each["equal"], total[1] + each["of"]
        counts.append((found, _machine(run)))
    most, machine = max(counts, key=lambda pair: sum(of for _, of in pair[0].values()))
    text = ", ".join(f"{dtype} {equal} of {of}" for dtype, (equal, of) in most.items())
    return (text, machine) if text else ("not measured", {})


if __name__ == "__main__":
    print(report(read(Path(sys.argv[1]))))
