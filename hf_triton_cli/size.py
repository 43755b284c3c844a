# SPDX-License-Identifier: Apache-2.0
"""`hf-triton size`: what a model takes of a machine's memory, and how many sequences fit, before one is rented."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import click

from hf_triton.folders.cards import CARDS, CPU
from hf_triton_cli.check import NOISY
from hf_triton_cli.shared_options import SET, CardName
from hf_triton_cli.tables import show_table

if TYPE_CHECKING:
    from hf_triton.folders.outlined import Outlined

COUNT: Final = click.IntRange(min=1)
DTYPES: Final = ("auto", "float32", "float16", "bfloat16")


@click.command(epilog="Example: hf-triton size Qwen/Qwen3-8B --gpu h100 --context 4096 --concurrency 64")
@click.argument("model", metavar="MODEL")
@click.option("--gpu", type=CardName(), default=CPU, help=f"{', '.join(CARDS)}; by default this machine's memory.")
@click.option("--gpus", type=COUNT, help="Divide the model among so many, as tensor_parallel_size does.")
@click.option("--context", type=click.IntRange(min=2), help="Tokens of a sequence. By default the model's context.")
@click.option("--concurrency", type=COUNT, help="Sequences at a time. By default max_num_seqs.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the weights. By default the checkpoint's.")
@SET
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def size(
    model: str,
    gpu: str,
    gpus: int | None,
    context: int | None,
    concurrency: int | None,
    dtype: str | None,
    settings: Mapping[str, str],
    as_json: bool,
) -> None:
    """Say what MODEL takes of a GPU's memory, and how many sequences fit.

    MODEL is a name on the Hub, a folder or a GGUF file. Of a model of the Hub, its config and the headers of its files
    are fetched, and no weights. Bytes are those that the engine allocates. Speeds are measured: `hf-triton bench`.
    """
    for name, option, value in (("dtype", "--dtype", dtype), ("tensor_parallel_size", "--gpus", gpus)):
        if value is not None and name in settings:
            raise click.UsageError(f"{name} is given twice, by {option} and by --set: leave one out")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from hf_triton.folders.outlined import outlined
    from hf_triton.folders.size_report import SizeReport

    given = {"dtype": dtype, "tensor_parallel_size": gpus and str(gpus)}
    with outlined(model, {**settings, **{name: value for name, value in given.items() if value}}) as found:
        report = SizeReport(found, gpu, _context(found, context), concurrency)
        report.run(model)
    if as_json:
        click.echo(json.dumps({**report.values, "estimates": report.estimates, "notes": report.notes}, indent=2))
        return
    show_table(report.rows)
    click.echo("".join(f"\n{note}" for note in report.notes).lstrip(), nl=bool(report.notes))


def _context(found: Outlined, wanted: int | None) -> int:
    """Tokens of a sequence, up to the model's context."""
    most = found.context_length
    if wanted is not None and wanted > most:
        raise click.UsageError(f"--context must be <= {most}, the model's own context, got {wanted}")
    return wanted or most
