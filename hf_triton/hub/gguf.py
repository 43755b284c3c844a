# SPDX-License-Identifier: Apache-2.0
"""GGUF files: which one of a checkpoint is loaded. Reads none."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hf_triton.errors import CheckpointError, clip

SUFFIX: Final = ".gguf"
BESIDE_MODELS: Final = re.compile("mmproj|imatrix", re.IGNORECASE)
"""Files of a vision tower, and statistics of a quantiser."""
PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
"""The end of the name of one of several files that hold a model together."""
MAX_PARTS: Final = 1000
SAFETENSORS: Final = ("model.safetensors.index.json", "model.safetensors")
PICKLE: Final = ("pytorch_model.bin.index.json", "pytorch_model.bin")
"""transformers' names: the index of a sharded checkpoint, and the file of one that is not sharded."""
MAX_SHOWN: Final = 12


def find_gguf(folder: Path, wanted: str | None, *, allow_pickle: bool = False) -> str | None:
    """The GGUF file that a folder is loaded from, see `choose_gguf`."""
    names = [str(path.relative_to(folder)) for pattern in ("*", f"*/*{SUFFIX}") for path in folder.glob(pattern)]
    return choose_gguf(names, wanted, allow_pickle=allow_pickle)


def choose_gguf(names: Iterable[str], wanted: str | None, *, allow_pickle: bool = False) -> str | None:
    """The GGUF file that a checkpoint is loaded from, or the first part of it; None: it is loaded from other weights.

    Args:
        names: The checkpoint's files, here or on the Hub.
        wanted: The setting `gguf_file`: a file, or the end of its name. Without it, a file that is alone is taken if
            there are no other weights.
        allow_pickle: Whether pickles are such weights.

    Raises:
        CheckpointError: No file or more than one is meant, or one without some of its parts.
    """
    names = {name for name in names if name.count("/") <= 1}
    wholes = {first_part(name) for name in names if name.endswith(SUFFIX)}
    files = sorted(name for name in wholes if not BESIDE_MODELS.search(name))
    if wanted is None:
        others = (*SAFETENSORS, *(PICKLE if allow_pickle else ()))
        chosen = [] if not names.isdisjoint(others) or len(files) != 1 else files
    elif wanted.endswith(SUFFIX) and wanted in names:
        chosen = [first_part(wanted)]
    else:
        ending = re.compile(rf"(^|[-._/]){re.escape(wanted)}(-\d+-of-\d+)?\.gguf$", re.IGNORECASE)
        chosen = [name for name in files if ending.search(name)]
    if wanted is not None and len(chosen) != 1:
        fault = f"{len(chosen)} GGUF files have" if chosen else "no GGUF file has"
        remedy = f"to one of {list_files(chosen or files)}" if files else "only for a repository or folder of them"
        raise CheckpointError(
            "checkpoint_incomplete", f"{fault} the name or quantisation {clip(wanted)}: set gguf_file {remedy}"
        )
    lacking = [part for name in chosen for part in part_names(name) if part not in names]
    if lacking:
        raise CheckpointError(
            "checkpoint_incomplete",
            f"{chosen[0]} is one of {len(part_names(chosen[0]))} parts, and {list_files(lacking)} is missing: fetch "
            "all parts into one folder",
        )
    return next(iter(chosen), None)


def part_names(name: str) -> list[str]:
    """The names of all parts of a file, given the first one's; of a file that is whole, its own."""
    part = PART.search(name)
    if part is None or not 1 < int(part[2]) <= MAX_PARTS:
        return [name]
    before, after = name[: part.start(1)], name[part.end(1) :]
    return [f"{before}{number:05d}{after}" for number in range(1, int(part[2]) + 1)]


def first_part(name: str) -> str:
    part = PART.search(name)
    return name if part is None else f"{name[: part.start(1)]}{1:05d}{name[part.end(1) :]}"


def require_package(file: str, name: str) -> None:
    """Refuse to read a GGUF file of a model without the package gguf."""
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            "checkpoint_invalid",
            f"{file} of {name} cannot be read without the package gguf: `pip install 'hf-triton[gguf]'`",
        )


def list_files(files: Iterable[str]) -> str:
    names = sorted(files)
    return f"{', '.join(names[:MAX_SHOWN])}{', ...' if len(names) > MAX_SHOWN else ''}"
