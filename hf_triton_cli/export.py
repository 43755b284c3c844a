# SPDX-License-Identifier: Apache-2.0
"""`hf-triton export vllm`: writes a folder for NVIDIA's vllm_backend, for those who outgrow this engine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hf_triton.folders.vllm_folder import write_vllm_folder


@click.group(epilog="Example: hf-triton export vllm model_repository/llama7b --into vllm_repository/llama7b")
def export() -> None:
    """Write a model folder for another server."""


@export.command(
    short_help="Write a folder of NVIDIA's vllm_backend.",
    epilog="Example: hf-triton export vllm model_repository/llama7b --into vllm_repository/llama7b",
)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), help="The folder to write.  [default: FOLDER's name + _vllm]")
def vllm(folder: Path, into: Path | None) -> None:
    """Write what the model FOLDER says as a folder of NVIDIA's vllm_backend: config.pbtxt and 1/model.json.

    What has no counterpart there is named on standard error.
    """
    folder = folder.resolve()
    target = into or Path(f"{folder.name}_vllm")
    if os.path.lexists(target):
        raise click.UsageError(f"{target} exists: choose another folder with --into, or remove it")
    for lost in write_vllm_folder(folder, target):
        click.echo(f"not carried over: {lost}", err=True)
    click.echo(f"Wrote {target}. It needs a Triton with the vLLM backend, and a GPU.")
