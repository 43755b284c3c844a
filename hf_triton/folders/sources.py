# SPDX-License-Identifier: Apache-2.0
"""What `hf-triton serve` is asked to serve: names on the Hub, checkpoints, model folders, model repositories."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hf_triton.errors import HfTritonError, HubError, SettingsError, clip
from hf_triton.folders.fetch import Progress, fetch, in_typed_words, use_standard_cache
from hf_triton.folders.folders import is_checkpoint, is_model_folder, load_folder_settings, model_folders, parse_config
from hf_triton.folders.model_folder import check_settings, folder_name, is_missing, model_settings, write_model_folder
from hf_triton.folders.served_repository import DEMO_NAME, demo_repository
from hf_triton.scratch import ScratchFolder
from hf_triton.settings import ModelSettings


def is_repository(path: str) -> bool:
    """Whether a path is a folder of model folders, or an empty one."""
    folder = Path(path).expanduser()
    return folder.is_dir() and not is_model_folder(folder) and not is_checkpoint(folder)


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What to serve, and tritonserver's flags, which stand behind `--`.

    Raises:
        HfTritonError: A flag is apart from its value.
    """
    flags = [word for word in words if word.startswith("-")]
    what = [word for word in words if not word.startswith("-")]
    if flags and list(words[len(what) :]) != flags:
        raise HfTritonError("wrong_usage", "behind -- are tritonserver's flags alone: write --flag=value")
    return what, flags


@contextlib.contextmanager
def model_repository(
    what: Sequence[str], settings: Mapping[str, str], *, stream: bool, progress: Progress
) -> Iterator[Path]:
    """A temporary model repository of links to the user's folders and of folders written for checkpoints.

    `what` has Hub names, which are downloaded first, and paths of checkpoints, model folders and model repositories;
    `demo` is the demo model. Settings and `stream` are for the folders that are written.

    Raises:
        HfTritonError: Settings are given for a model folder, two folders have one name, or a model does not exist,
            cannot be downloaded, or has a wrong setting.
    """
    use_standard_cache()
    with ScratchFolder("served") as root, contextlib.ExitStack() as stack:
        for word in what:
            path = Path(word).expanduser()
            if word == DEMO_NAME and not path.exists():
                _refuse_settings(word, settings, stream=stream)
                _link(stack.enter_context(demo_repository()) / DEMO_NAME, Path(root))
            elif is_model_folder(path):
                _refuse_settings(word, settings, stream=stream)
                _link(path, Path(root))
            elif is_repository(word):
                _refuse_settings(word, settings, stream=stream)
                for folder in model_folders(path):
                    _link(folder, Path(root))
            else:
                _write(word, Path(root), settings, stream=stream, progress=progress)
        yield Path(root)


def fetch_models(folders: Iterable[Path], progress: Progress) -> Mapping[str, HfTritonError]:
    """Download what folders need that no cache has; returns what failed, by folder.

    A folder that has settings of its own or wrong ones is left to its process.
    """
    failures = {}
    for folder in folders:
        with contextlib.suppress(SettingsError, ImportError):
            settings = load_folder_settings(parse_config(folder), ModelSettings).settings
            try:
                fetch(folder, settings, progress)
            except HfTritonError as error:
                failures[folder.name] = error
    return failures


def _refuse_settings(word: str, settings: Mapping[str, str], *, stream: bool) -> None:
    if settings or stream:
        remedy = f"edit the config.pbtxt in {word}"
        if word == DEMO_NAME and not Path(word).exists():
            remedy = "the demo model takes settings from the environment, such as HF_TRITON_PROMPT_LOOKUP=8"
        raise HfTritonError("wrong_usage", f"--set, --task and --stream are for models without a folder: {remedy}")


def _link(folder: Path, repository: Path) -> None:
    link = repository / folder.name
    if link.is_symlink() or link.exists():
        raise HfTritonError("wrong_usage", f"two folders are named {folder.name}: rename one")
    link.symlink_to(folder.resolve())


def _write(model: str, repository: Path, settings: Mapping[str, str], *, stream: bool, progress: Progress) -> None:
    own = model_settings(model, settings)
    if is_missing(own["huggingface_model"]):
        raise HubError("path_not_found", f"there is no folder {clip(model)}")
    name = folder_name(own, os.listdir(repository))
    loaded = check_settings(own).settings
    write_model_folder(repository / name, own, stream=stream)
    try:
        fetch(repository / name, loaded, progress)
    except HubError as error:
        similar = Path(model).parent if Path(model).parent.is_dir() and "/" in model else None
        more = f" (there is no such folder in {similar} either)" if similar else ""
        more = more or ("" if "/" in model else f" (there is no folder {clip(model)} here either)")
        raise HubError(error.code, in_typed_words(error).sentence + more) from None
