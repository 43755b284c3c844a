# SPDX-License-Identifier: Apache-2.0
"""`hf-triton new`: writes a model folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import click

from hf_triton.errors import clip
from hf_triton.folders.doors import DOOR_FOLDER
from hf_triton.folders.model_folder import is_missing, model_settings, with_task, write_model_folder
from hf_triton.folders.staging import publish, staging_folder
from hf_triton.protocol.names import DOOR_SUFFIX
from hf_triton.server import is_shell_safe
from hf_triton.settings import DEFAULT_MODELS, default_model
from hf_triton_cli.shared_options import SET, TASK, not_writable


@click.command(epilog="Example: hf-triton new qwen3 --model Qwen/Qwen3-0.6B --into model_repository")
@click.argument("name")
@click.option(
    "--model",
    help="Hub name, with @REVISION or without, or path of a checkpoint. With --task by default the model that "
    "transformers' pipeline takes for the task.",
)
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    show_default=True,
    help="The model repository, made if it is missing.",
)
@click.option("--stream", is_flag=True, help="The folder streams itself; it refuses /infer then.")
@click.option("--stream-door", is_flag=True, help=f"Add a stream door, NAME{DOOR_SUFFIX}.")
@TASK
@SET
def new(
    name: str,
    model: str | None,
    into: Path,
    stream: bool,
    stream_door: bool,
    task: str | None,
    settings: Mapping[str, str],
) -> None:
    """Write the model folder NAME."""
    if stream and stream_door:
        raise click.UsageError("--stream and --stream-door exclude each other: a folder that streams needs no door")
    if not name.isascii() or "/" in name or name.startswith(".") or not is_shell_safe(name):
        raise click.UsageError(f"NAME must have ASCII letters, digits and . _ - only, got {clip(name)}")
    folders = [into / name, *([into / f"{name}{DOOR_SUFFIX}"] if stream_door else [])]
    for folder in folders:
        if folder.exists():
            raise click.UsageError(f"{folder} exists: choose another name, or remove it")
    settings = with_task(settings, task)
    default = default_model(settings.get("task"))
    if model is None and not default:
        raise click.UsageError(f"give --model, or one of these as --task: {', '.join(DEFAULT_MODELS)}")
    own = {**default, **settings} if model is None else model_settings(model, settings)
    try:
        with staging_folder(folders[0]) as staging:
            staged = [staging / folder.name for folder in folders]
            write_model_folder(staged[0], own, stream=stream)
            for door in staged[1:]:
                shutil.copytree(DOOR_FOLDER, door, ignore=shutil.ignore_patterns("__pycache__"))
            for folder, target in zip(staged, folders, strict=True):
                publish(folder, target)
    except OSError as error:
        raise not_writable(into, error) from None
    checkpoint = own["huggingface_model"]
    if is_missing(checkpoint):
        click.echo(f"There is no folder {clip(checkpoint)} here: it must exist where the model is served.", err=True)
    served = f" for {checkpoint}@{own['revision']}" if model is None else ""
    click.echo(f"Wrote {' and '.join(map(str, folders))}{served}. Serve it: hf-triton serve {folders[0]}")
