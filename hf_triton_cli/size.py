# SPDX-License-Identifier: Apache-2.0
"""`hf-triton size`: what a model takes of a machine and how many machines a load needs, before any is rented."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import click

from hf_triton.folders.cards import CARDS, CPU, CardName
from hf_triton_cli.check import NOISY
from hf_triton_cli.options import SET
from hf_triton_cli.tables import show_table

if TYPE_CHECKING:
    from hf_triton.folders.outlined import Outlined

COUNT: Final = click.IntRange(min=1)
RATE: Final = click.FloatRange(1e-9, 1e12)
DTYPES: Final = ("auto", "float32", "float16", "bfloat16")


@click.command(epilog="Example: hf-triton size Qwen/Qwen3-8B --gpu h100 --context 4096 --concurrency 64")
@click.argument("model", metavar="MODEL")
@click.option("--gpu", type=CardName(), default=CPU, help=f"{', '.join(CARDS)}; by default this machine's memory.")
@click.option("--context", type=click.IntRange(min=2), help="Tokens of a sequence. By default the model's context.")
@click.option("--concurrency", type=COUNT, help="Sequences at a time. By default max_num_seqs.")
@click.option("--rate", type=RATE, help="Requests per second in all.")
@click.option("--input", "prompt", type=COUNT, help="Tokens of a prompt, for --rate.")
@click.option("--output", type=COUNT, help="Tokens of a completion, for --rate.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the weights. By default the checkpoint's.")
@click.option(
    "--measured",
    type=RATE,
    help="Requests per second that one replica answers, as `hf-triton bench` measures them.",
)
@SET
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def size(
    model: str,
    gpu: str,
    context: int | None,
    concurrency: int | None,
    rate: float | None,
    prompt: int | None,
    output: int | None,
    dtype: str | None,
    measured: float | None,
    settings: Mapping[str, str],
    as_json: bool,
) -> None:
    """Say what MODEL takes of a GPU's memory, and how many GPUs a load needs.

    MODEL is a name on the Hub, a folder or a GGUF file. Of a model of the Hub, its config and the headers of its files
    are fetched, and no weights. Bytes are those that the engine allocates; speeds are bounds by a data sheet, or follow
    from --measured.
    """
    if dtype is not None and "dtype" in settings:
        raise click.UsageError("dtype is given twice, by --dtype and by --set: leave one out")
    if rate is not None and prompt is None:
        raise click.UsageError("--rate needs the tokens of a request: give --input, and --output if it generates")
    for option, number in (("--rate", rate), ("--measured", measured)):
        if number is not None and math.isnan(number):
            raise click.UsageError(f"{option} must be a number, got {number}")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from hf_triton.folders.outlined import outlined
    from hf_triton.folders.size_report import Load, SizeReport

    with outlined(model, {**settings, **({"dtype": dtype} if dtype else {})}) as found:
        length = _context(found, context, (prompt or 0) + (output or 0))
        if rate is not None and output is None and found.task is None:
            raise click.UsageError("--rate needs the tokens of a completion too: give --output")
        load = Load(length, concurrency, rate, prompt or length - (output or 0), output or 0, measured)
        report = SizeReport(found, gpu, load)
        report.run(model)
    if as_json:
        click.echo(json.dumps({**report.values, "estimates": report.estimates, "notes": report.notes}, indent=2))
        return
    show_table(report.rows)
    click.echo("".join(f"\n{note}" for note in report.notes).lstrip(), nl=bool(report.notes))


def _context(found: Outlined, wanted: int | None, request: int) -> int:
    """Tokens of a sequence.

    Raises:
        click.UsageError: They are more than the model's context, or fewer than a request's.
    """
    most = found.context_length
    if wanted is not None and wanted > most:
        raise click.UsageError(f"--context must be <= {most}, the model's own context, got {wanted}")
    length = wanted or most
    if request > length:
        raise click.UsageError(f"--input and --output must be <= {length} together, the context, got {request}")
    return length
