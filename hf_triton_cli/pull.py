# SPDX-License-Identifier: Apache-2.0
"""`hf-triton pull`: downloads checkpoints into the cache, or into a folder for a machine without network."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import click

from hf_triton.errors import HubError
from hf_triton.folders.fetch import fetch, in_typed_words, unused_files, use_standard_cache
from hf_triton.folders.fetch_kernels import fetch_kernels
from hf_triton.folders.model_folder import check_settings, model_settings
from hf_triton.folders.staging import publish, staging_folder
from hf_triton_cli.progress import log_lines, show_download
from hf_triton_cli.shared_options import SET
from hf_triton_cli.tables import size_words


@click.command(epilog="Example: hf-triton pull Qwen/Qwen3-0.6B --into-folder qwen3-checkpoint")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "--into-folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Copy the checkpoint there, as plain files; huggingface_model may be this path.",
)
@click.option(
    "--kernels",
    "has_kernels",
    is_flag=True,
    help="Fetch the kernels that compute MODEL's quantisation on a GPU (FP8 in blocks, MXFP4), and not MODEL.",
)
@SET
def pull(models: Sequence[str], into_folder: Path | None, has_kernels: bool, settings: Mapping[str, str]) -> None:
    """Download MODEL, a Hub name with :QUANTISATION and @REVISION or without, unless the cache has it."""
    if has_kernels and into_folder is not None:
        raise click.UsageError("--kernels and --into-folder exclude each other")
    if into_folder is not None and (len(models) > 1 or (into_folder.exists() and any(into_folder.iterdir()))):
        raise click.UsageError("--into-folder takes one model and a folder that is empty or does not exist")
    use_standard_cache()
    for model in models:
        loaded = check_settings(model_settings(model, settings)).settings
        if has_kernels:
            with log_lines():
                for line in fetch_kernels(model, loaded):
                    click.echo(line)
            continue
        try:
            folder = fetch(Path.cwd(), loaded, show_download)
        except HubError as error:
            raise in_typed_words(error) from None
        unused = unused_files(folder, loaded)
        if into_folder is not None:
            folder = _copy(folder, into_folder, unused)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path not in unused)
        click.echo(f"{model}: {folder} ({size_words(size)})")


def _copy(snapshot: Path, folder: Path, unused: Collection[Path]) -> Path:
    """Copy a snapshot's files; its links point into the cache."""

    def others(parent: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(parent, name) in unused]

    try:
        with staging_folder(folder) as staging:
            copied = shutil.copytree(snapshot, staging / "checkpoint", ignore=others)
            publish(copied, folder)
    except (OSError, shutil.Error) as error:
        raise HubError("disk_full", f"the checkpoint cannot be copied to {folder}: {error}") from None
    return folder
