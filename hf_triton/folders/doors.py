# SPDX-License-Identifier: Apache-2.0
"""Stream doors that `hf-triton serve` adds beside the user's folders. Decides from their files; starts nothing."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import hf_triton
from hf_triton.errors import HfTritonError, SettingsError
from hf_triton.files import read_text
from hf_triton.folders.folders import (
    as_json,
    load_folder_settings,
    model_file,
    model_folders,
    newest_version,
    parse_config,
    parse_message,
)
from hf_triton.hub.gguf import find_gguf
from hf_triton.hub.gguf_header import CHAT_TEMPLATE, check_gguf
from hf_triton.hub.kind import read_object
from hf_triton.hub.locate import Hub
from hf_triton.protocol.names import DOOR_SUFFIX, MODEL_SETTINGS
from hf_triton.protocol.task_declaration import TaskDeclaration
from hf_triton.scratch import ScratchFolder
from hf_triton.settings import ModelSettings
from hf_triton.tasks.registry import folder_task

DOOR_FOLDER: Final = Path(hf_triton.__file__).parent / "stream_door" / "folder"
MODEL_CLASS: Final = "TritonPythonModel"
TASK_CLASS: Final = "task_class"
CHAT_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
MASK: Final = "[MASK]"
TOKEN_FILES: Final = ("tokenizer_config.json", "special_tokens_map.json")
OUR_MODULES: Final = ("hf_triton", "hf_triton.model")


@contextlib.contextmanager
def door_repository(repository: Path, taken: Collection[str]) -> Iterator[Path]:
    """A temporary repository with a stream door for each folder that needs one, unless its name is `taken`."""
    with ScratchFolder("doors") as root:
        doors = {f"{name}{DOOR_SUFFIX}" for name in folders_without_door(repository)}
        for door in doors.difference(taken):
            shutil.copytree(DOOR_FOLDER, Path(root) / door, ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(root)


def folders_without_door(repository: Path) -> list[str]:
    """The folders that answer in one piece and that no folder streams from, by name."""
    configs = {}
    for folder in model_folders(repository):
        with contextlib.suppress(SettingsError):  # Triton cannot read it either
            configs[folder] = {**as_json(parse_message(folder)), "name": folder.name}
    names = {folder.name for folder in model_folders(repository)}
    streamed = set(map(streamed_folder, configs.values()))
    return [
        folder.name
        for folder, config in configs.items()
        if f"{folder.name}{DOOR_SUFFIX}" not in names
        and folder.name not in streamed
        and _answers_in_one_piece(folder, config)
        and generates_text(folder)
    ]


def streamed_folder(config: Mapping[str, Any]) -> str | None:
    """The folder that a folder streams from, given Triton's config of it; None: it is no stream door."""
    name, parameters = str(config["name"]), config.get("parameters", {})
    is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    if not is_decoupled or not parameters.keys().isdisjoint(MODEL_SETTINGS):
        return None
    named = parameters.get("stream_of", {}).get("string_value")
    return named or (name.removesuffix(DOOR_SUFFIX) if name.endswith(DOOR_SUFFIX) else None)


def generates_text(folder: Path) -> bool:
    """Whether a folder of this library generates text, as far as its files say."""
    return TASK_CLASS not in (own_names(folder) or ()) and encoder_declaration(folder) is None


def encoder_declaration(folder: Path) -> TaskDeclaration | None:
    """The task of a folder that generates no text, as far as its settings and its checkpoint on disk say; else None."""
    settings = _settings(folder)
    task = None if settings is None else folder_task(None, settings, folder)
    return None if task is None else task.declaration


def _settings(folder: Path) -> ModelSettings | None:
    """A folder's settings; None: they are wrong, which Triton says, or it declares some of its own."""
    with contextlib.suppress(HfTritonError, ImportError):
        return load_folder_settings(parse_config(folder), ModelSettings).settings
    return None


def has_chat_template(folder: Path) -> bool:
    """Whether a folder's model renders chats, by its files; True if they do not say, as most models do."""
    settings = _settings(folder)
    checkpoint = None if settings is None else Hub(folder, settings, os.environ).find_config_folder()
    if settings is None or settings.chat_template is not None or settings.tokenizer is not None or checkpoint is None:
        return True
    with contextlib.suppress(HfTritonError):  # the load says what is wrong
        if gguf := find_gguf(checkpoint, settings.gguf_file):
            return CHAT_TEMPLATE in check_gguf(checkpoint / gguf, settings.huggingface_model).values
    config = checkpoint / "tokenizer_config.json"
    with contextlib.suppress(OSError, ValueError):
        if '"chat_template"' in read_text(config, errors="replace"):
            return True
    return any((checkpoint / name).exists() for name in CHAT_TEMPLATES)


def mask_token(folder: Path) -> str:
    """What a tokenizer on disk calls a token that is to be filled in; BERT's word if it does not say."""
    settings = _settings(folder)
    checkpoint = None if settings is None else Hub(folder, settings, os.environ).find_config_folder()
    for file in [checkpoint / name for name in TOKEN_FILES] if checkpoint else []:
        token = read_object(file).get("mask_token")
        if token := token.get("content") if isinstance(token, dict) else token:
            return str(token)
    return MASK


def _answers_in_one_piece(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder is this library's and not decoupled.

    In doubt it is not: a door to a model of another library would never connect. So the class in its file must derive
    from `hf_triton.TritonPythonModel` in that file; a base that another file defines is not followed.
    """
    is_python = {config.get("backend", "python"), config.get("platform", "python")} == {"python"}
    if not is_python or config.get("model_transaction_policy", {}).get("decoupled", False):
        return False
    return own_names(folder) is not None


def own_names(folder: Path) -> set[str] | None:
    """What the class in a folder's file defines, if it is `hf_triton.TritonPythonModel` or derives from it; else None.

    The file is read and not run.
    """
    try:
        body = ast.parse(model_file(newest_version(folder)).read_bytes()).body
    except (SettingsError, OSError, SyntaxError, ValueError):  # Triton says why it cannot be loaded
        return None
    ours: dict[str, set[str]] = {}
    for node in body:
        match node:
            case ast.Import(names):
                named = (name.asname or name.name for name in names if name.name in OUR_MODULES)
                ours |= {f"{name}.{MODEL_CLASS}": set() for name in named}
            case ast.ImportFrom(module, names) if module in OUR_MODULES:
                ours |= {name.asname or name.name: set() for name in names if name.name == MODEL_CLASS}
            case ast.ClassDef(name, bases, _, members):
                inherited = [ours[base] for each in bases if (base := ast.unparse(each)) in ours]
                if inherited:
                    ours[name] = set().union(*inherited, *map(_defined, members))
    return ours.get(MODEL_CLASS)


def _defined(member: ast.stmt) -> set[str]:
    """The names that a statement in a class defines."""
    match member:
        case ast.FunctionDef(name):
            return {name}
        case ast.Assign(targets):
            return set(map(ast.unparse, targets))
        case ast.AnnAssign(target):
            return {ast.unparse(target)}
    return set()
