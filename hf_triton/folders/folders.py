# SPDX-License-Identifier: Apache-2.0
"""Reasons why Triton cannot serve a folder, found in its files: cases in which Triton hangs or gives no reason."""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_triton.errors import SettingsError, clip
from hf_triton.protocol.names import MODEL_SETTINGS
from hf_triton.protocol.validation import suggest
from hf_triton.server import is_shell_safe
from hf_triton.settings import SETTING_NAMES, AnySettings, LoadedSettings, load_settings

CONFIG = "config.pbtxt"


def model_folders(repository: Path) -> list[Path]:
    """The folders of a repository that are meant to be served: all that are not hidden, by name."""
    return sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has a config.pbtxt or a version with a model.py."""
    return (folder / CONFIG).exists() or any(model_file(version).exists() for version in _versions(folder))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, which needs a model folder that names it."""
    has_weights = (folder / "config.json").exists() or any(folder.glob("*.gguf"))
    return has_weights and not is_model_folder(folder)


def defects(repository: Path) -> Mapping[str, str]:
    """The defects, by name, of folders that must be kept from tritonserver."""
    return {folder.name: defect for folder in model_folders(repository) if (defect := folder_defect(folder))}


def folder_defect(folder: Path) -> str | None:
    """Why a folder must be kept from tritonserver; None: it need not."""
    if not folder.is_dir():
        return "it is no folder"
    if is_checkpoint(folder):
        return f"it is a checkpoint: `hf-triton new NAME --model {shlex.quote(str(folder))}` writes a folder for it"
    versions = _versions(folder)
    if not folder.name.isascii():
        return "its name is not ASCII, and Triton's Python cannot open it: rename it"
    if not is_shell_safe(folder.name):
        return "its name has a space or a special character of the shell that Triton starts it with: rename it"
    if not versions and not (folder / CONFIG).exists():
        return f"it has neither {CONFIG} nor 1/model.py: copy a model folder's, or move it out of the model repository"
    if not versions:
        return "it has no version folder: copy 1/model.py from a model folder"
    incomplete = [file for version in versions if not (file := model_file(version)).exists()]
    if incomplete and re.search(r'^[^#\n]*\bbackend\s*:\s*["\']python["\']', read_config(folder), flags=re.MULTILINE):
        return f"it has no {incomplete[0].parent.name}/{incomplete[0].name}: copy one from a model folder"
    return None


def _versions(folder: Path) -> list[Path]:
    """The version folders; Triton passes over names that begin with 0."""
    return sorted(path for path in folder.glob("[1-9]*") if path.is_dir())


def model_file(version: Path) -> Path:
    """The code of a model's version: model.py, or what `default_model_filename` of config.pbtxt names."""
    named = re.search(
        r"""^\s*default_model_filename\s*:\s*["']([^"']+)["']""", read_config(version.parent), re.MULTILINE
    )
    return version / (named[1] if named else "model.py")


def newest_version(folder: Path) -> Path:
    """The version with the highest number of those with a model's code; there must be one."""
    versions = [path for path in _versions(folder) if path.name.isdecimal() and model_file(path).exists()]
    if not versions:
        raise SettingsError(f"it has no 1/{model_file(folder / '1').name}: copy one from a model folder")
    return max(versions, key=lambda path: int(path.name))


def read_config(folder: Path) -> str:
    """The text of a folder's config.pbtxt; empty if it has none."""
    path = folder / CONFIG
    return path.read_text(errors="replace") if path.is_file() else ""


def parse_message(folder: Path) -> Any:
    """A config.pbtxt as Triton's message `ModelConfig`; raises SettingsError if Triton cannot read it."""
    messages = importlib.import_module("tritonclient.grpc.model_config_pb2")
    text_format = importlib.import_module("google.protobuf.text_format")
    config, message = read_config(folder), messages.ModelConfig()
    try:
        return text_format.Parse(config, message)
    except text_format.ParseError as error:  # `5:61 : Message type ...`
        sentence = re.sub(r"^[\d:]+ : ('.*': )?", "", str(error)).rstrip(".")
        position = f"{error.GetLine()}:{error.GetColumn()}"
        hint = _hint(sentence, config, message.DESCRIPTOR.fields_by_name)
        raise SettingsError(f"{CONFIG} cannot be parsed: {position}: {sentence}{hint}") from None


def foreign_kind(folder: Path) -> str | None:
    """What serves a folder that is not of this library: its backend; None: it is this library's, or means to be."""
    message = parse_message(folder)
    if not MODEL_SETTINGS.isdisjoint(message.parameters):
        return None
    backend = message.backend or message.platform
    files = [model_file(version) for version in _versions(folder)]
    if backend in ("", "python") and any(b"hf_triton" in file.read_bytes() for file in files if file.exists()):
        return None
    if backend == "" and not any(any(version.iterdir()) for version in _versions(folder)):
        return None
    return f"backend {backend}" if backend else "no config.pbtxt names its backend"


def parse_config(folder: Path) -> dict[str, Any]:
    """A folder's config.pbtxt as Triton's JSON, with its own names of fields.

    Raises:
        SettingsError: Triton cannot read it, or serves it by something else than Python.
    """
    message = parse_message(folder)
    if message.backend != "python":
        raise SettingsError(f'a folder for this library has backend: "python", got {clip(message.backend)}')
    if message.max_batch_size < 0:
        raise SettingsError(f"max_batch_size must be >= 0, got {message.max_batch_size}")
    if message.name and message.name != folder.name:
        raise SettingsError(guess_reason(folder) or "")
    return as_json(message)


def as_json(message: Any) -> dict[str, Any]:
    """A message of `parse_message` as Triton's JSON."""
    json_format = importlib.import_module("google.protobuf.json_format")
    config: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return config


def ensemble_steps(folder: Path) -> list[str] | None:
    """The models that an ensemble's folder joins; None: it is no ensemble."""
    if not re.search(r"""^\s*platform\s*:\s*["']ensemble["']""", read_config(folder), re.MULTILINE):
        return None
    try:
        message = parse_message(folder)
    except SettingsError:  # `parse_config` says what is wrong
        return None
    return list(dict.fromkeys(step.model_name for step in message.ensemble_scheduling.step))


def load_folder_settings(config: Mapping[str, Any], settings_class: type[AnySettings]) -> LoadedSettings[AnySettings]:
    parameters = {key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()}
    return load_settings(parameters, os.environ, settings_class)


def with_remedy(reason: str) -> str:
    """Triton's reason for not loading a folder, with the remedy if it has none."""
    if "unable to find backend library" in reason:
        return f'{reason}: a folder for this library has backend: "python" in its {CONFIG}; copy one and edit it'
    return reason


def guess_reason(folder: Path) -> str | None:
    """Why Triton did not load a folder without giving a reason: usually its config.pbtxt cannot be parsed."""
    config = read_config(folder)
    name = re.search(r'^name\s*:\s*"([^"]*)"', config, flags=re.MULTILINE)
    if name and name[1] != folder.name:
        return f"{CONFIG} names the model {name[1]}, and Triton expects the folder's name: remove the line name:"
    try:
        parse_message(folder)
    except SettingsError as error:
        return error.sentence
    return None


def _hint(sentence: str, config: str, fields: Mapping[str, object]) -> str:
    """The remedy for a field name that Triton does not know."""
    unknown = re.search(r'"inference\.([\w.]+)" has no field named "(\w+)"', sentence)
    if unknown is None:
        return ""
    message, name = unknown.groups()
    if message in ("ModelParameter", "ModelConfig.ParametersEntry"):
        inner = ', and a " inside it is escaped as \\"' if 'string_value: "{' in config else ""
        return f': a setting is parameters {{ key: "..." value {{ string_value: "..." }} }}{inner}'
    if message != "ModelConfig":
        return ": is a } missing before it?" if name in fields else ""
    if name not in SETTING_NAMES:
        return suggest(name, fields, "Triton's model_config.proto")
    value = re.search(rf'^\s*{name}\s*:\s*"?([^"\s]+)', config, flags=re.MULTILINE)
    text = value[1] if value else "..."
    return f': a setting is parameters {{ key: "{name}" value {{ string_value: "{text}" }} }}'
