# SPDX-License-Identifier: Apache-2.0
"""The model repository that `hf-triton serve` gives to Triton: the user's, without what must be kept from it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import hf_triton
from hf_triton.folders.folders import model_folders
from hf_triton.scratch import ScratchFolder

DEMO_NAME: Final = "demo"
DEMO_CONFIG: Final = """backend: "python"
parameters {{ key: "huggingface_model" value {{ string_value: "{checkpoint}" }} }}
parameters {{ key: "max_output_length" value {{ string_value: "64" }} }}
instance_group [ {{ kind: KIND_CPU }} ]
"""
DEMO_MODEL: Final = "from hf_triton import TritonPythonModel as TritonPythonModel\n"


def served_repository(given: Path | None, excluded: Collection[str]) -> contextlib.AbstractContextManager[Path]:
    """The repository to serve: the given one without excluded folders, or the demo's."""
    if given is None:
        return demo_repository()
    return _linked_repository(given, excluded) if excluded else contextlib.nullcontext(given)


@contextlib.contextmanager
def _linked_repository(given: Path, excluded: Collection[str]) -> Iterator[Path]:
    with ScratchFolder("served") as root:
        for folder in model_folders(given):
            if folder.name not in excluded:
                (Path(root) / folder.name).symlink_to(folder.resolve())
        yield Path(root)


@contextlib.contextmanager
def demo_repository() -> Iterator[Path]:
    checkpoint = Path(hf_triton.__file__).parent / "demo"
    with ScratchFolder("demo") as root:
        folder = Path(root) / DEMO_NAME
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(DEMO_CONFIG.format(checkpoint=checkpoint))
        (folder / "1" / "model.py").write_text(DEMO_MODEL)
        yield Path(root)
