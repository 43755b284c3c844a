# SPDX-License-Identifier: Apache-2.0
"""`hf-triton export vllm`: writes a folder for NVIDIA's vllm_backend, for those who outgrow this engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from hf_triton.cli.findings import own_class
from hf_triton.cli.folders import folder_defect, load_folder_settings, parse_config
from hf_triton.errors import SettingsError
from hf_triton.hub.spec import CheckpointSpec
from hf_triton.settings import ModelSettings
from hf_triton.tasks.hooks import HOOKS, Hooks

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
PATHS: Final = ("huggingface_model", "tokenizer", "cache_dir")


@click.group()
def export() -> None:
    """Write a model folder for another server."""


@export.command(epilog="Example: hf-triton export vllm model_repository/llama7b --into vllm_repository/llama7b")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), help="The folder to write.  [default: FOLDER's name + _vllm]")
def vllm(folder: Path, into: Path | None) -> None:
    """Write what the model FOLDER says as a folder of NVIDIA's vllm_backend: config.pbtxt and 1/model.json.

    What has no counterpart there is named on standard error.
    """
    folder = folder.resolve()
    target = into or Path(f"{folder.name}_vllm")
    if target.exists():
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
    given = [name for name, source in loaded.sources.items() if source != "default"]
    arguments = _engine_arguments(settings, given, folder)
    files: dict[str, Any] = {"model.json": arguments}
    if settings.adapters:
        arguments["enable_lora"] = True
        files["multi_lora.json"] = {name: _place(source, folder) for name, source in settings.adapters.items()}
    (target / "1").mkdir(parents=True)
    (target / "config.pbtxt").write_text(CONFIG)
    for name, content in files.items():
        (target / "1" / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    carried = {*ENGINE_ARGUMENTS, "adapters", *(["quantization_config"] if "quantization" in arguments else [])}
    for name in given:
        if name not in carried:
            click.echo(f"not carried over: the setting {name}", err=True)
    for hook in HOOKS:
        if getattr(own, hook) is not getattr(Hooks, hook):
            click.echo(f"not carried over: the hook {hook} of 1/model.py", err=True)
    click.echo(f"Wrote {target}. It needs a Triton with the vLLM backend, and a GPU.")


def _engine_arguments(settings: ModelSettings, given: list[str], folder: Path) -> dict[str, Any]:
    """VLLM's engine arguments for the settings that are given."""
    arguments = {}
    for name, argument in ENGINE_ARGUMENTS.items():
        if name in given:
            value = getattr(settings, name)
            arguments[argument] = _place(value, folder) if name in PATHS else value
    method = settings.quantization_config.get("quant_method")
    if method:
        arguments["quantization"] = method
    return arguments


def _place(name: str, folder: Path) -> str:
    """A Hub name as it is; a path, which starts at the folder, from the root."""
    return str((folder / name).resolve()) if CheckpointSpec(name).is_local else name
