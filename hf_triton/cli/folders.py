# SPDX-License-Identifier: Apache-2.0
"""What keeps a folder from being served, as its files show it: where Triton waits without an end or gives no reason."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path

from hf_triton.protocol.validation import suggest
from hf_triton.server import is_plain
from hf_triton.settings import SETTING_NAMES

CONFIG = "config.pbtxt"


def model_folders(repository: Path) -> list[Path]:
    """What Triton takes for model folders: all that are not hidden, by name."""
    return sorted(each for each in repository.iterdir() if each.is_dir() and not each.name.startswith("."))


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has what only model folders have."""
    return (folder / CONFIG).exists() or any((each / "model.py").exists() for each in _versions(folder))


def flaws(repository: Path) -> Mapping[str, str]:
    """What is wrong with folders that tritonserver had better not see, by name."""
    return {folder.name: flaw for folder in model_folders(repository) if (flaw := _flaw(folder))}


def _flaw(folder: Path) -> str | None:
    versions = _versions(folder)
    if not folder.name.isascii():
        return "its name is not ASCII, and Triton's Python opens no other: rename it"
    if not is_plain(folder.name):
        return "its name has a space or a sign in it that a shell reads, through which Triton starts it: rename it"
    if not versions and not (folder / CONFIG).exists():
        return f"it has neither {CONFIG} nor 1/model.py: copy a model folder's, or move it out of the model repository"
    if not versions:
        return "it has no version folder: copy 1/model.py from a model folder"
    bare = [each.name for each in versions if not (each / "model.py").exists()]
    if bare and re.search(r'^\s*backend\s*:\s*"python"', _text(folder / CONFIG), flags=re.MULTILINE):
        return f"it has no {bare[0]}/model.py: copy one from a model folder"
    return None


def _versions(folder: Path) -> list[Path]:
    return sorted(each for each in folder.glob("[0-9]*") if each.is_dir())


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def explained(reason: str) -> str:
    """Triton's reason for not loading a folder, with what to do where that is not in it."""
    if "unable to find backend library" in reason:
        return f'{reason}: of a folder for this library, {CONFIG} says backend: "python"; copy one and edit it'
    return reason


def silent_reason(folder: Path) -> str:
    """Why Triton did not load a folder for which it gives no reason: as a rule its config.pbtxt cannot be read."""
    config = _text(folder / CONFIG)
    name = re.search(r'^name\s*:\s*"([^"]*)"', config, flags=re.MULTILINE)
    if name and name[1] != folder.name:
        return f"{CONFIG} calls the model {name[1]}, and Triton goes by the folder: leave the line name: out"
    return _reading_error(config) or "see Triton's log above"


def _reading_error(config: str) -> str | None:
    """`config.pbtxt cannot be read: 5:61: Expected string but found: '128'`; None where it can be read."""
    try:
        messages = importlib.import_module("tritonclient.grpc.model_config_pb2")
        text_format = importlib.import_module("google.protobuf.text_format")
    except ImportError:  # the container need not have Triton's client
        return None
    try:
        text_format.Parse(config, messages.ModelConfig())
    except text_format.ParseError as error:
        sentence = re.sub(r"^[\d:]+ : ('.*': )?", "", str(error)).rstrip(".")
        place = f"{error.GetLine()}:{error.GetColumn()}"
        fields = messages.ModelConfig.DESCRIPTOR.fields_by_name
        return f"{CONFIG} cannot be read: {place}: {sentence}{_hint(sentence, config, fields)}"
    return None


def _hint(sentence: str, config: str, fields: Mapping[str, object]) -> str:
    """What to write in place of a name that Triton does not know."""
    unknown = re.search(r'"inference\.([\w.]+)" has no field named "(\w+)"', sentence)
    if unknown is None:
        return ""
    message, name = unknown.groups()
    if message in ("ModelParameter", "ModelConfig.ParametersEntry"):
        inner = ', and a " inside it is written \\"' if 'string_value: "{' in config else ""
        return f': a setting is parameters {{ key: "..." value {{ string_value: "..." }} }}{inner}'
    if message != "ModelConfig":
        return ": is a } missing before it?" if name in fields else ""
    if name not in SETTING_NAMES:
        return suggest(name, fields)
    value = re.search(rf'^\s*{name}\s*:\s*"?([^"\s]+)', config, flags=re.MULTILINE)
    text = value[1] if value else "..."
    return f': a setting is parameters {{ key: "{name}" value {{ string_value: "{text}" }} }}'
