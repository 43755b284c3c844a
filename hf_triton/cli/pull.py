# SPDX-License-Identifier: Apache-2.0
"""`hf-triton pull`: downloads checkpoints into the cache, or into a folder for a machine without network."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from hf_triton.cli.download import fetch, in_typed_words, log_lines, use_standard_cache
from hf_triton.cli.model_folder import SET, check_settings, model_settings
from hf_triton.cli.staging import publish, staging_folder
from hf_triton.cli.tables import size_words
from hf_triton.errors import HubError
from hf_triton.files import read_json
from hf_triton.hub.gguf import SUFFIX, find_gguf
from hf_triton.hub.kernels import LOCK, find_kernels, find_pulled, kernel_cache, quantization_of, read_lock, write_lock
from hf_triton.hub.resolve import Hub
from hf_triton.settings import ModelSettings


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
            _pull_kernels(model, loaded)
            continue
        try:
            folder = fetch(Path.cwd(), loaded)
        except HubError as error:
            raise in_typed_words(error) from None
        gguf = find_gguf(folder, loaded.gguf_file)
        if into_folder is not None:
            folder = _copy(folder, into_folder, gguf)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and _is_part(path, gguf))
        click.echo(f"{model}: {folder} ({size_words(size)})")


def _pull_kernels(model: str, settings: ModelSettings) -> None:
    """Fetch the kernels that a model needs at the commits of the lock file, which gets those that it lacks."""
    hub = Hub(Path.cwd(), settings, os.environ)
    with log_lines():
        try:
            hub.fetch_config()
        except HubError as error:
            raise in_typed_words(error) from None
        folder = hub.find_config_folder()
        method = settings.quantization_config.get("quant_method")
        if folder is not None and method is None and (folder / "config.json").exists():  # a GGUF file has none
            method = quantization_of(read_json(folder / "config.json")).get("quant_method")
        kernels = find_kernels(method)
        if not kernels:
            click.echo(f"{model}: {method or 'no quantisation'}, for which no kernels of the Hub are needed")
        cache = kernel_cache(os.environ)
        for kernel in kernels:
            lock = read_lock(cache)
            pulled = find_pulled(kernel.name, cache)
            if pulled is None:
                commit = lock.get(kernel.name, kernel.revision)
                pulled = hub.fetch_kernel(dataclasses.replace(kernel, revision=commit), cache)
            if kernel.name not in lock:
                write_lock(cache, lock | {kernel.name: pulled.name})
                click.echo(f"{cache / LOCK}: {kernel.name} is locked at {pulled.name} from now on")
            click.echo(f"{model}: {pulled}")


def _is_part(file: Path, gguf: str | None) -> bool:
    """Whether a file of a snapshot belongs to the checkpoint; other GGUF files do not."""
    return gguf is None or file.suffix != SUFFIX or file.name == Path(gguf).name


def _copy(snapshot: Path, folder: Path, gguf: str | None) -> Path:
    """Copy a snapshot's files; its links point into the cache."""

    def others(parent: str, names: list[str]) -> list[str]:
        return [name for name in names if not _is_part(Path(parent, name), gguf)]

    try:
        with staging_folder(folder) as staging:
            copied = shutil.copytree(snapshot, Path(staging) / "checkpoint", ignore=others)
            publish(copied, folder)
    except (OSError, shutil.Error) as error:
        raise HubError("disk_full", f"the checkpoint cannot be copied to {folder}: {error}") from None
    return folder
