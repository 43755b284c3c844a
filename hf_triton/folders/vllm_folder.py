# SPDX-License-Identifier: Apache-2.0
"""Writes what a model folder says as a folder of NVIDIA's vllm_backend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import HfTritonError, SettingsError
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
    "tensor_parallel_size": "tensor_parallel_size",
}
"""vLLM's names of our settings."""
NAMES: Final = ("huggingface_model", "tokenizer")
"""Settings that hold a Hub name or a path."""


def write_vllm_folder(folder: Path, target: Path) -> list[str]:
    """Write config.pbtxt, 1/model.json, with adapters 1/multi_lora.json; returns what has no counterpart there."""
    if defect := folder_defect(folder):
        raise SettingsError(f"{folder.name}: {defect}")
    own = own_class(folder)
    loaded = load_folder_settings(parse_config(folder), own.settings_class)
    settings = loaded.settings
    if not isinstance(settings, ModelSettings):
        raise HfTritonError(
            "wrong_usage",
            "a stream door has no model, and vllm_backend streams by itself: export its model's folder",
        )
    if task := folder_task(own.task_class, settings, folder):
        raise HfTritonError(
            "wrong_usage",
            f"{folder.name} is for {task.declaration.name}: only folders that generate text are exported",
        )
    given = [name for name, source in loaded.sources.items() if source != "default"]
    arguments = _engine_arguments(settings, given, folder)
    files: dict[str, Any] = {"model.json": arguments}
    if settings.adapters:
        arguments["enable_lora"] = True
        files["multi_lora.json"] = {name: _adapter(source, folder) for name, source in settings.adapters.items()}
    _write(target, files)
    return [*_not_carried_over(own, settings, given)]


def _write(target: Path, files: Mapping[str, Any]) -> None:
    try:
        with staging_folder(target) as staging:
            folder = staging / target.name
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(CONFIG)
            for name, content in files.items():
                (folder / "1" / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            publish(folder, target)
    except OSError as error:
        raise HfTritonError(
            "wrong_usage", f"{target} cannot be written ({error.strerror}): choose another folder with --into"
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
