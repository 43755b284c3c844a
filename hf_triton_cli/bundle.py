# SPDX-License-Identifier: Apache-2.0
"""`hf-triton bundle`: writes models and packages as one file, for a machine without network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from hf_triton.folders.bundle import write_bundle
from hf_triton.folders.sources import model_repository
from hf_triton_cli.progress import show_download
from hf_triton_cli.shared_options import SET
from hf_triton_cli.tables import size_words


@click.command(
    short_help="Write models and packages as one file.",
    epilog="Example: hf-triton bundle Qwen/Qwen3-0.6B -o qwen3.tar",
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The tar file to write; it must not exist.",
)
@click.option("--extra", "extras", multiple=True, help="Bring the packages of an extra too: gguf, cuda. Repeatable.")
@click.option("--no-wheels", is_flag=True, help="Bring no packages: for an image, or where hf-triton is installed.")
@SET
def bundle(
    models: Sequence[str], output: Path, extras: Sequence[str], no_wheels: bool, settings: Mapping[str, str]
) -> None:
    """Write MODEL, Hub names or model folders, with all that serving them needs, to one tar file.

    Where Python and the file alone are, `tar xf FILE`, `./install.sh` and what it prints serve them. Packages are for
    the Python, processor and kind of GPU that are used here.
    """
    if output.exists():
        raise click.UsageError(f"{output} exists: choose another name, or remove it")
    if no_wheels and extras:
        raise click.UsageError("--extra brings packages, and --no-wheels brings none: leave one out")
    with model_repository(models, settings, stream=False, progress=show_download) as repository:
        write_bundle(repository, output, [] if no_wheels else ["server", *extras], show_download)
    click.echo(f"Wrote {output} ({size_words(output.stat().st_size)}).")
