# SPDX-License-Identifier: Apache-2.0
"""Downloads checkpoints before a server starts, with errors that come at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import HubError
from hf_triton.hub.download_parent import download
from hf_triton.hub.gguf import SUFFIX, find_gguf, part_names
from hf_triton.hub.locate import Hub
from hf_triton.settings import ModelSettings

Event = Mapping[str, Any]
Progress = Callable[[str], AbstractContextManager[Callable[[Event], None]]]
"""Shows the download of a model, by its name: within the context, it takes each event."""
TYPED: Final[Mapping[str, str]] = {
    "correct huggingface_model": "correct the name",
    "set huggingface_model to": "name",
    "set revision to it": "name it behind @",
}


def use_standard_cache() -> None:
    """Make the Hub's standard cache a named one: what a command downloads must not end in a temporary folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    os.environ.setdefault("HF_HOME", os.path.expanduser(os.path.join(cache, "huggingface")))


def fetch(model_folder: Path, settings: ModelSettings, progress: Progress) -> Path:
    """The folder of a model's files, found or downloaded as the model would; a tokenizer of its own is fetched too.

    Raises:
        HubError: It cannot be found or downloaded.
        CheckpointError: It lacks files.
    """
    with progress(settings.huggingface_model) as on_event:
        hub = Hub(model_folder, settings, os.environ, download=partial(download, on_event=on_event))
        folder = hub.resolve_model()
        hub.resolve_tokenizer()
    return folder


def unused_files(folder: Path, settings: ModelSettings) -> set[Path]:
    """The GGUF files of a checkpoint's folder that are not the one of the settings, or its parts."""
    gguf = find_gguf(folder, settings.gguf_file)
    used = part_names(Path(gguf).name) if gguf else ()
    return {path for path in folder.rglob(f"*{SUFFIX}") if used and path.name not in used}


def in_typed_words(error: HubError) -> HubError:
    """An error about a model whose name was typed: its remedy speaks of the name, not of the settings of a folder."""
    sentence = error.sentence
    for setting, name in TYPED.items():
        sentence = sentence.replace(setting, name)
    return HubError(error.code, sentence)
