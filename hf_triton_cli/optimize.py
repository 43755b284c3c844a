# SPDX-License-Identifier: Apache-2.0
"""`hf-triton optimize`: measures what else could compute an encoder, and writes a folder for the fastest."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click

from hf_triton.errors import ServerError
from hf_triton.folders.candidates import TEXTS, Candidate, Case, Child, Measured
from hf_triton.folders.comparison import MIN_GAIN, Row, judge, measure, noisiest, summary_rows, timing_rows
from hf_triton.folders.findings import device_of
from hf_triton.folders.folders import parse_config
from hf_triton.folders.graph_folder import GraphWriter
from hf_triton.folders.optimizable import available_providers, check_folder, machine_of, written_candidates
from hf_triton.folders.staging import publish, staging_folder
from hf_triton_cli.numbers import NUMBERS, SeveralNumbers
from hf_triton_cli.progress import show_download
from hf_triton_cli.shared_options import not_writable
from hf_triton_cli.tables import new_figure, show_table

NUM_SAMPLES: Final = 64
MAX_TEXTS: Final = 1000
"""Lines of a file that are read."""
SAMPLE: Final = """the ship lies in the old harbour while gulls cry over the pier and a child carries warm bread home
before rain falls on quiet streets where twelve people wait for news from another town about prices of grain this year
few know how far it is to go by train or why the letter came late but every morning someone asks again"""


@click.command(
    cls=SeveralNumbers,
    epilog="Example: hf-triton optimize model_repository/minilm --seq-len 16,128 --batch 1,8 --texts mine.txt",
)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), help="The folder to write.  [default: FOLDER_optimized]")
@click.option(
    "--seq-len",
    type=NUMBERS,
    default="16,128,384",
    show_default=True,
    metavar="N,N,...",
    help="Tokens of a text, up to the model's.",
)
@click.option(
    "--batch", type=NUMBERS, default="1,8,32", show_default=True, metavar="N,N,...", help="Texts of a request."
)
@click.option("--texts", "file", type=click.File(encoding="utf-8"), help="Your texts, one a line, to compare outputs.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=1e-3,
    show_default=True,
    help="How far an output may be from PyTorch's in float32.",
)
@click.option("--int8", is_flag=True, help="Try weights of 8 bits too, by a rule of their own; needs --texts.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="In which candidates take turns.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for JSON, a plot and a log.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
def optimize(
    folder: Path,
    into: Path | None,
    seq_len: Sequence[int],
    batch: Sequence[int],
    file: Any,
    tolerance: float,
    int8: bool,
    rounds: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure PyTorch, ONNX Runtime and OpenVINO on the model FOLDER of an encoder; write a folder for the fastest.

    On a GPU, where Triton places the folder unless instance_group says KIND_CPU, the others are PyTorch in float16 and
    ONNX Runtime's providers for CUDA and TensorRT.

    The folder serves on this machine without Hub and without the original weights. A candidate that differs from
    PyTorch by more than the tolerance is refused. Below a gain of 10 % PyTorch stays, and nothing is written. It needs
    pip install 'hf-triton[optimize]'.
    """
    folder = folder.resolve()
    target = (into or folder.with_name(f"{folder.name}_optimized")).absolute()
    if target.exists():
        raise click.UsageError(f"{target} exists: choose another folder with --into, or remove it")
    if int8 and file is None:
        raise click.UsageError("--int8 is judged by your own texts: give --texts FILE")
    texts = _read_texts(file) if file else _sample_texts()
    check_folder(folder, show_download)
    on_gpu = device_of(parse_config(folder)).type == "cuda"
    if int8 and on_gpu:
        raise click.UsageError("--int8 is for CPUs: leave it out, or set instance_group to KIND_CPU")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` sends it: nothing is left behind
    with ExitStack() as stack:
        try:
            work = stack.enter_context(staging_folder(target))
        except OSError as error:
            raise not_writable(target.parent, error) from None
        graphs = written_candidates(work, available_providers(), on_gpu=on_gpu, int8=int8)
        reference, *rows = _start(folder, graphs, _log(out), texts, stack, on_gpu=on_gpu)
        base = rows[0]
        lengths = sorted({min(num_tokens, base.facts["max_length"]) for num_tokens in seq_len})
        cases: list[Case] = [(num_texts, num_tokens) for num_tokens in lengths for num_texts in batch]
        click.echo(f"Measuring {len(cases) + 1} cases in {rounds} rounds ...", err=True)
        measure(rows, [*cases, TEXTS], rounds)
        expected = reference.call("outputs")
        _require(reference, base)
        for row in rows:
            outputs = row.call("outputs")
            if outputs is not None:
                judge(row, expected, outputs, math.inf if row is base else tolerance, base.facts["kind"])
        best = choose(rows)
        if best is not None:
            publish(best.candidate.folder, target)
        report = {
            "folder": str(folder),
            "machine": machine_of(base),
            "tolerance": tolerance,
            "timings": timing_rows(rows, base),
            "candidates": summary_rows(rows, base, len(texts)),
            "written": None if best is None else str(target),
        }
    _show(report, out, as_json=as_json)
    click.echo(conclusion(rows, best, target), err=as_json)


def _read_texts(file: Any) -> list[str]:
    try:
        texts = [line.strip() for line in islice(file, MAX_TEXTS) if line.strip()]
    except UnicodeDecodeError:
        texts = []
    if len(texts) < 2:
        raise click.BadParameter("must have two or more lines of UTF-8", param_hint="--texts")
    return texts


def _sample_texts() -> list[str]:
    """Texts of log-normal lengths, as requests have them: 2 to 250 words, half of them below 22."""
    rng, words = random.Random(0), SAMPLE.split()
    lengths = [min(250, max(2, round(rng.lognormvariate(3.1, 0.9)))) for _ in range(NUM_SAMPLES)]
    return [" ".join(rng.choices(words, k=length)) for length in lengths]


def _start(
    folder: Path,
    graphs: Mapping[str, tuple[str, Path, tuple[object, ...]]],
    log: Path,
    texts: Sequence[str],
    stack: ExitStack,
    *,
    on_gpu: bool,
) -> list[Row]:
    """Load the reference, PyTorch as the folder has it, and all others, their graphs written."""

    def start(row: Row) -> Row:
        if not row.refusal:
            row.child = stack.enter_context(closing(Child(log, Measured, row.candidate, texts)))
            row.facts |= row.call("facts") or {}
        return row

    rows = [
        start(Row("reference", Candidate(folder, {"dtype": "float32"}, way="alone"))),
        start(Row("pytorch", Candidate(folder, on_gpu=on_gpu))),
    ]
    _require(*rows)
    if rows[1].facts["way"] == "packed":
        rows.append(start(Row("pytorch, padded", Candidate(folder, way="padded", on_gpu=on_gpu))))
    with closing(Child(log, GraphWriter, folder)) as writer:
        for name, (method, target, others) in graphs.items():
            click.echo(f"Writing a folder for {name} ...", err=True)
            row = Row(name, Candidate(target, on_gpu=on_gpu), writer)
            row.facts["graph"] = row.call(method, target, *others)
            rows.append(start(row))
    return rows


def _require(*rows: Row) -> None:
    """Raise a ServerError for what nothing can be compared without."""
    for row in rows:
        if row.refusal:
            raise ServerError("server_failed", f"{row.candidate.folder.name} cannot be measured: {row.refusal}")


def choose(rows: Sequence[Row]) -> Row | None:
    """The fastest of those that were written, if it is worth it and the times tell."""
    base = rows[0]
    kept = [row for row in rows if not row.refusal and row.candidate.folder != base.candidate.folder]
    best = max(kept, key=lambda row: row.least_gain(base), default=None)
    if best is None or best.least_gain(base) < MIN_GAIN:
        return None
    return best if noisiest((base, best)) is None else None


def _log(out: Path | None) -> Path:
    """The file that the candidates' processes write to."""
    if out is None:
        return Path(os.devnull)
    out.mkdir(parents=True, exist_ok=True)
    return out / "optimize.log"


def conclusion(rows: Sequence[Row], best: Row | None, target: Path) -> str:
    """What was measured and written, in a sentence."""
    base = rows[0]
    if best is None:
        gains = {row.name: row.least_gain(base) for row in rows[1:] if not row.refusal}
        fastest = max(gains, key=lambda name: gains[name], default=None)
        stays = "PyTorch stays, and nothing is written"
        if fastest is None:
            return f"{stays}: all others are refused."
        [other] = [row for row in rows if row.name == fastest]
        if other.total_gain(base) >= MIN_GAIN and (noise := noisiest([base, other])):
            row, (num_texts, num_tokens) = noise
            times_ms = [1000 * time_s for time_s in row.samples_s((num_texts, num_tokens))]
            return (
                f"{stays}: the times of {row.name} for {num_texts} x {num_tokens} tokens scatter from "
                f"{min(times_ms):.2f} to {max(times_ms):.2f} ms, too much to decide by: measure again on a machine "
                "that does nothing else."
            )
        gain = f"{gains[fastest]:.2f} times as fast"
        return f"{stays}: the fastest other, {fastest}, is {gain}, and it takes {MIN_GAIN:g}."
    mixed = best.gain(base, TEXTS)
    advice = " (keep PyTorch where many clients ask at a time)" if mixed < 1 else ""
    return (
        f"Wrote {target}: {best.name} is {best.total_gain(base):.2f} times as fast as PyTorch for these lengths and "
        f"batches, and {mixed:.2f} times for a request of mixed lengths{advice}. Serve it: hf-triton serve {target}"
    )


def _show(report: Mapping[str, Any], out: Path | None, *, as_json: bool) -> None:
    text = json.dumps(report, indent=2)
    if out is not None:
        (out / "optimize.json").write_text(text + "\n", encoding="utf-8")
        _plot(report["timings"], out / "optimize.png")
    if as_json:
        click.echo(text)
        return
    for rows in (report["timings"], report["candidates"]):
        show_table(rows)
        click.echo()


def _plot(timings: Sequence[Mapping[str, Any]], file: Path) -> None:
    """How many times as fast as PyTorch each candidate is, by case; nothing where matplotlib is not installed."""
    figure = new_figure()
    if figure is None:
        return
    axes = figure.subplots()
    names = list(dict.fromkeys(row["candidate"] for row in timings))
    cases = list(dict.fromkeys((row["batch"], row["tokens"]) for row in timings))
    for number, name in enumerate(names):
        heights = [row["times pytorch"] for row in timings if row["candidate"] == name]
        axes.bar(
            [place + 0.8 * number / len(names) for place in range(len(cases))], heights, 0.8 / len(names), label=name
        )
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_xticks(range(len(cases)), [f"{batch} x {tokens}" for batch, tokens in cases])
    axes.set(xlabel="texts x tokens", ylabel="times as fast as PyTorch")
    axes.legend()
    figure.savefig(file)
