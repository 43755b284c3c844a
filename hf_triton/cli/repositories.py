# SPDX-License-Identifier: Apache-2.0
"""The model repository that `hf-triton serve` gives to Triton: the user's, without what must be kept from it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import hf_triton
from hf_triton.cli.exit_codes import EXIT_CODES, UNREACHABLE
from hf_triton.cli.folders import load_folder_settings, model_folders, parse_config
from hf_triton.errors import HfTritonError
from hf_triton.hub.resolve import Hub
from hf_triton.settings import ModelSettings

DEMO_NAME: Final = "demo"
DEMO_CONFIG: Final = """backend: "python"
parameters {{ key: "huggingface_model" value {{ string_value: "{checkpoint}" }} }}
parameters {{ key: "max_output_length" value {{ string_value: "64" }} }}
instance_group [ {{ kind: KIND_CPU }} ]
"""
DEMO_MODEL: Final = "from hf_triton import TritonPythonModel as TritonPythonModel\n"


def served_repository(given: Path | None, excluded: Collection[str]) -> contextlib.AbstractContextManager[Path]:
    """The repository to serve: the given one without excluded folders, or the demo's.

    What says the task of its checkpoints is downloaded first: Triton asks a folder for its inputs before it is loaded.
    """
    if given is None:
        return demo_repository()
    _fetch_configs([folder for folder in model_folders(given) if folder.name not in excluded])
    return _linked_repository(given, excluded) if excluded else contextlib.nullcontext(given)


def _fetch_configs(folders: Iterable[Path]) -> None:
    """Download the configs of checkpoints whose task no setting says; a load tells what fails, and is slow to."""
    for folder in folders:
        try:
            settings = load_folder_settings(parse_config(folder), ModelSettings).settings
            if settings.task is None:
                Hub(folder, settings, os.environ).fetch_config()
        except ImportError:  # the container has no tritonclient
            return
        except HfTritonError as error:
            if EXIT_CODES.get(error.code) == UNREACHABLE:
                return


@contextlib.contextmanager
def _linked_repository(given: Path, excluded: Collection[str]) -> Iterator[Path]:
    """A temporary repository of links to the other folders."""
    with tempfile.TemporaryDirectory(prefix="hf_triton_served_") as root:
        for folder in model_folders(given):
            if folder.name not in excluded:
                (Path(root) / folder.name).symlink_to(folder.resolve())
        yield Path(root)


@contextlib.contextmanager
def demo_repository() -> Iterator[Path]:
    """A temporary repository with the demo folder."""
    checkpoint = Path(hf_triton.__file__).parent / "demo"
    with tempfile.TemporaryDirectory(prefix="hf_triton_demo_") as root:
        folder = Path(root) / DEMO_NAME
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(DEMO_CONFIG.format(checkpoint=checkpoint))
        (folder / "1" / "model.py").write_text(DEMO_MODEL)
        yield Path(root)
