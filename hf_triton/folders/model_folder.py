# SPDX-License-Identifier: Apache-2.0
"""Writes model folders: for `hf-triton new` into the user's tree, for `hf-triton serve ID` into a temporary one."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from hf_triton.errors import HfTritonError, HubError, SettingsError, clip
from hf_triton.hub.gguf import PART, SUFFIX
from hf_triton.protocol.names import TaskName
from hf_triton.settings import LoadedSettings, ModelSettings, hub_name, load_settings

TASKS: Final[tuple[str, ...]] = typing.get_args(TaskName)
DECOUPLED: Final = "model_transaction_policy { decoupled: true }\n"
IN_RANKS: Final = "instance_group [{ kind: KIND_MODEL, count: 1 }]"
"""What a folder with `tensor_parallel_size` needs."""
MODEL: Final = '''# SPDX-License-Identifier: Apache-2.0
import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    """Adds nothing: config.pbtxt names the checkpoint."""
'''
HUB_NAME: Final = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::(\w[\w./-]*))?(?:@([\w./-]+))?")
"""A name on the Hub, the GGUF file or its quantisation behind `:`, and the revision behind `@`."""


def folder_name(settings: Mapping[str, str], taken: Collection[str] = ()) -> str:
    """A folder's name for a checkpoint: the last part of its name in lower case, made unique by a number.

    A GGUF file gives its own name, or its quantisation adds to that of the model. There is no colon in it: the gateway
    takes what follows one for a LoRA adapter.
    """
    model, gguf = Path(settings["huggingface_model"]).name, settings.get("gguf_file")
    file = Path(PART.sub(SUFFIX, gguf or ""))
    last = model if gguf is None else file.stem if gguf.endswith(SUFFIX) else f"{model}-{gguf}"
    name = re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-.") or "model"
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def model_settings(model: str, more: Mapping[str, str]) -> dict[str, str]:
    """The settings of a folder: the checkpoint, and what is given beside it.

    Args:
        model: A name on the Hub, with `:QUANTISATION` and `@REVISION` or without, or a path.
        more: Further settings, by name.

    Raises:
        HubError: It is neither a name nor a folder; an absolute path may exist where the model is served.
    """
    model = hub_name(model)
    path = Path(model).expanduser().absolute()
    if model and path.is_dir():
        own = {"huggingface_model": os.path.abspath(path)}
    elif path.suffix == SUFFIX and (path.is_file() or os.path.isabs(model)):
        own = {"huggingface_model": os.path.abspath(path.parent), "gguf_file": path.name}
    elif named := HUB_NAME.fullmatch(model):
        own = dict(zip(("huggingface_model", "gguf_file", "revision"), named.groups(), strict=True))
        own = {name: text for name, text in own.items() if text}
    elif model.startswith(("./", "../", "~")):
        raise HubError("path_not_found", f"there is no {'file' if path.suffix == SUFFIX else 'folder'} {clip(model)}")
    elif os.path.isabs(model):
        own = {"huggingface_model": model}
    else:
        raise HubError("path_not_found", f"there is no folder {clip(model)}, and it is no name on the Hub (OWNER/NAME)")
    for name in own.keys() & more.keys():
        raise HfTritonError("wrong_usage", f"{name} is given twice, by the model's name and by --set: leave one out")
    return own | dict(more)


def is_missing(model: str) -> bool:
    """Whether `huggingface_model` is a path of no folder on this machine."""
    return os.path.isabs(model) and not os.path.isdir(model)


def check_settings(settings: Mapping[str, str]) -> LoadedSettings[ModelSettings]:
    """Check a folder's settings; raises HfTritonError if one is unknown or impossible."""
    try:
        return load_settings(settings, os.environ, ModelSettings, "the command line")
    except SettingsError as error:
        raise HfTritonError("wrong_usage", error.sentence) from None


def write_model_folder(folder: Path, settings: Mapping[str, str], *, stream: bool = False) -> None:
    """Write a folder that Triton loads as it is; one that streams itself refuses `/infer`.

    Raises:
        HfTritonError: A setting is unknown or impossible.
        FileExistsError: The folder exists.
    """
    check_settings(settings)
    lines = [
        f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(settings[key])} }} }}" for key in settings
    ]
    if int(settings.get("tensor_parallel_size", 1)) > 1:
        lines.append(IN_RANKS)
    (folder / "1").mkdir(parents=True)
    config = 'backend: "python"\n' + (DECOUPLED if stream else "") + "\n" + "\n".join(lines) + "\n"
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    (folder / "1" / "model.py").write_text(MODEL)


def _quoted(text: str) -> str:
    """A string of a config.pbtxt."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'


def with_task(settings: Mapping[str, str], task: str | None) -> Mapping[str, str]:
    """The settings of a command, and its `--task` among them; raises HfTritonError if the task is given twice."""
    if task is None:
        return settings
    if "task" in settings:
        raise HfTritonError("wrong_usage", "task is given twice, by --task and by --set: leave one out")
    return {**settings, "task": task}
