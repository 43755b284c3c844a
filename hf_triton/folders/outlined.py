# SPDX-License-Identifier: Apache-2.0
"""Finds what `hf-triton size` is asked about, without weights: what no disk has comes as headers from the Hub."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_triton.errors import HfTritonError, HubError, SettingsError
from hf_triton.folders.fetch import in_typed_words, use_standard_cache
from hf_triton.folders.folders import folder_defect, is_checkpoint, is_model_folder, load_folder_settings, parse_config
from hf_triton.folders.model_folder import check_settings, model_settings
from hf_triton.folders.own_code import own_class
from hf_triton.folders.served_repository import DEMO_NAME, demo_repository
from hf_triton.folders.weight_bytes import read_dtype
from hf_triton.hub.download_parent import DownloadLimits, download
from hf_triton.hub.kind import find_task, find_way
from hf_triton.hub.locate import Hub
from hf_triton.hub.pretrained import check_known, gguf_of, load_config, model_class, silence_transformers
from hf_triton.hub.spec import CheckpointSpec
from hf_triton.scratch import ScratchFolder
from hf_triton.settings import ModelSettings


@dataclass(frozen=True)
class Outlined:
    """A checkpoint without its weights."""

    folder: Path
    settings: ModelSettings
    config: Any
    task: Any
    """The class of its task; None: it generates text."""
    kind: Any
    """The auto class of transformers that loads it."""

    @property
    def context_length(self) -> int:
        """Tokens of a sequence at most."""
        from hf_triton.hub.checkpoint import context_length

        return context_length(self.config, self.settings.max_context_length)


@contextlib.contextmanager
def outlined(model: str, given: Mapping[str, str]) -> Iterator[Outlined]:
    """Find a checkpoint, by all that `hf-triton size` takes; transformers prints nothing meanwhile."""
    silence_transformers()
    use_standard_cache()
    with contextlib.ExitStack() as stack:
        path = Path(model).expanduser()
        if model == DEMO_NAME and not path.exists():
            path = stack.enter_context(demo_repository()) / DEMO_NAME
        own, settings = None, None
        if is_model_folder(path):
            own, settings = _of_model_folder(path.resolve(), given)
        elif path.is_dir() and not is_checkpoint(path) and any(map(is_model_folder, path.iterdir())):
            raise HfTritonError("wrong_usage", f"{model} is a model repository: name one of its folders")
        else:
            settings = check_settings(model_settings(model, given)).settings
        cache = stack.enter_context(ScratchFolder("size"))
        folder = _find(path.resolve() if own else Path.cwd(), settings, Path(cache))
        name = settings.task or (None if gguf_of(folder, settings) else find_task(folder)) or "text-generation"
        from hf_triton.tasks.registry import task_class

        task = (own and own.task_class) or task_class(name, find_way(folder))
        config = load_config(folder, settings)
        read_dtype(folder, config, settings)
        kind = model_class(folder, config, settings, task.auto_class if task else None)
        check_known(kind, config, settings)
        yield Outlined(folder, settings, config, task, kind)


def _of_model_folder(folder: Path, given: Mapping[str, str]) -> tuple[Any, ModelSettings]:
    """The class of a folder's 1/model.py, and its settings with those that are given in their place."""
    if defect := folder_defect(folder):
        raise SettingsError(defect)
    own, config = own_class(folder), parse_config(folder)
    overridden = {name: {"string_value": text} for name, text in given.items()}
    config["parameters"] = {**config.get("parameters", {}), **overridden}
    settings = load_folder_settings(config, own.settings_class).settings
    if not isinstance(settings, ModelSettings):
        raise SettingsError(f"{folder.name} is a stream door, which has no model: name the folder that it streams from")
    return own, settings


def _find(base: Path, settings: ModelSettings, cache: Path) -> Path:
    """The checkpoint's folder; that of one on disk may lack what serving needs."""

    def fetch(spec: CheckpointSpec, _: Path, environment: Mapping[str, str], limits: DownloadLimits) -> Path:
        return download(replace(spec, headers_only=True, needs_tokenizer=False), cache, environment, limits)

    hub = Hub(base, settings, os.environ, download=fetch)
    is_local = CheckpointSpec(settings.huggingface_model).is_local
    if is_local and (folder := hub.find_config_folder()):
        return folder
    try:
        return hub.resolve_model()
    except HubError as error:
        raise in_typed_words(error) from None
