# SPDX-License-Identifier: Apache-2.0
"""`hf-triton export vllm`: writes a folder for NVIDIA's vllm_backend, for those who outgrow this engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from hf_triton.errors import SettingsError
from hf_triton.folders.folders import folder_defect, load_folder_settings, parse_config
from hf_triton.folders.own_code import own_class
from hf_triton.folders.staging import publish, staging_folder
from hf_triton.hub.spec import CheckpointSpec
from hf_triton.settings import ModelSettings
from hf_triton.tasks.hooks import HOOKS, Hooks
from hf_triton.tasks.registry import folder_task

CONFIG: Final = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
ENGINE_ARGUMENTS: Final[Mapping[str, str]] = {
    "huggingface_model": "model",
    "revision": "revision",
    "tokenizer": "tokenizer",
    "tokenizer_revision": "tokenizer_revision",
    "cache_dir": "download_dir",
    "load_format": "load_format",
    "dtype": "dtype",
    "trust_remote_code": "trust_remote_code",
    "max_context_length": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "enable_prefix_caching": "enable_prefix_caching",
}
"""vLLM's names of our settings."""
NAMES: Final = ("huggingface_model", "tokenizer")
"""Settings that hold a Hub name or a path."""


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
    if defect := folder_defect(folder):
        raise SettingsError(f"{folder.name}: {defect}")
    own = own_class(folder)
    loaded = load_folder_settings(parse_config(folder), own.settings_class)
    settings = loaded.settings
    if not isinstance(settings, ModelSettings):
        raise click.UsageError(
            "a stream door has no model, and vllm_backend streams by itself: export its model's folder"
        )
    if task := folder_task(own.task_class, settings, folder):
        raise click.UsageError(
            f"{folder.name} is for {task.declaration.name}: only folders that generate text are exported"
        )
    given = [name for name, source in loaded.sources.items() if source != "default"]
    arguments = _engine_arguments(settings, given, folder)
    files: dict[str, Any] = {"model.json": arguments}
    if settings.adapters:
        arguments["enable_lora"] = True
        files["multi_lora.json"] = {name: _adapter(source, folder) for name, source in settings.adapters.items()}
    _write(target, files)
    for lost in _not_carried_over(own, settings, given):
        click.echo(f"not carried over: {lost}", err=True)
    click.echo(f"Wrote {target}. It needs a Triton with the vLLM backend, and a GPU.")


def _write(target: Path, files: Mapping[str, Any]) -> None:
    try:
        with staging_folder(target) as staging:
            folder = Path(staging) / target.name
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(CONFIG)
            for name, content in files.items():
                (folder / "1" / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            publish(folder, target)
    except OSError as error:
        raise click.UsageError(
            f"{target} cannot be written ({error.strerror}): choose another folder with --into"
        ) from None


def _not_carried_over(own: Any, settings: ModelSettings, given: Sequence[str]) -> Iterator[str]:
    """What the exported folder lacks of the other."""
    carried = {*ENGINE_ARGUMENTS, "adapters", "quantization_config"}
    yield from (f"the setting {name}" for name in given if name not in carried)
    if details := settings.quantization_config.keys() - {"quant_method"}:
        yield f"{', '.join(sorted(details))} of the setting quantization_config"
    for name, source in settings.adapters.items():
        if source != _without_revision(source):
            yield f"the revision of the adapter {name}"
    yield from (f"the hook {hook} of 1/model.py" for hook in HOOKS if getattr(own, hook) is not getattr(Hooks, hook))


def _engine_arguments(settings: ModelSettings, given: Sequence[str], folder: Path) -> dict[str, Any]:
    """VLLM's engine arguments for the settings that are given."""
    arguments: dict[str, Any] = {
        argument: _place(getattr(settings, name), folder) if name in NAMES else getattr(settings, name)
        for name, argument in ENGINE_ARGUMENTS.items()
        if name in given
    }
    if settings.cache_dir is not None:
        arguments[ENGINE_ARGUMENTS["cache_dir"]] = str((folder / Path(settings.cache_dir).expanduser()).resolve())
    if method := settings.quantization_config.get("quant_method"):
        arguments["quantization"] = method
    return arguments


def _place(name: str, folder: Path) -> str:
    """A Hub name as it is; a path, which starts at the folder, from the root."""
    return str((folder / name).resolve()) if CheckpointSpec(name).is_local else name


def _adapter(source: str, folder: Path) -> str:
    return _place(_without_revision(source), folder)


def _without_revision(source: str) -> str:
    return source if CheckpointSpec(source).is_local else source.partition("@")[0]
