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
PART: Final = re.compile(r"-\d+-of-(\d+)\.gguf$", re.IGNORECASE)
SAFETENSORS: Final = ("model.safetensors.index.json", "model.safetensors")
PICKLE: Final = ("pytorch_model.bin.index.json", "pytorch_model.bin")
"""transformers' names: the index of a sharded checkpoint, and the file of one that is not sharded."""
MAX_SHOWN: Final = 12


def find_gguf(folder: Path, wanted: str | None, *, allow_pickle: bool = False) -> str | None:
    """The GGUF file that a folder is loaded from, see `choose_gguf`."""
    names = [str(path.relative_to(folder)) for pattern in ("*", f"*/*{SUFFIX}") for path in folder.glob(pattern)]
    return choose_gguf(names, wanted, allow_pickle=allow_pickle)


def choose_gguf(names: Iterable[str], wanted: str | None, *, allow_pickle: bool = False) -> str | None:
    """The GGUF file that a checkpoint is loaded from; None: it is loaded from other weights.

    Args:
        names: The checkpoint's files, here or on the Hub.
        wanted: The setting `gguf_file`: a file, or the end of its name. Without it, a file that is alone is taken if
            there are no other weights.
        allow_pickle: Whether pickles are such weights.

    Raises:
        CheckpointError: No file or more than one is meant, or one in parts.
    """
    names = {name for name in names if name.count("/") <= 1}
    files = sorted(name for name in names if name.endswith(SUFFIX) and not BESIDE_MODELS.search(name))
    if wanted is None:
        others = (*SAFETENSORS, *(PICKLE if allow_pickle else ()))
        chosen = [] if not names.isdisjoint(others) or len(files) != 1 else files
    elif wanted.endswith(SUFFIX) and wanted in names:
        chosen = [wanted]
    else:
        ending = re.compile(rf"(^|[-._/]){re.escape(wanted)}(-\d+-of-\d+)?\.gguf$", re.IGNORECASE)
        chosen = [name for name in files if ending.search(name)]
    if part := next((part for name in chosen if (part := PART.search(name)) and int(part[1]) > 1), None):
        raise CheckpointError(
            "unsupported_model",
            f"{chosen[0]} is one of {int(part[1])} parts, and transformers reads one file: choose a smaller "
            "quantisation, or join them with `llama-gguf-split --merge`",
        )
    if wanted is not None and len(chosen) != 1:
        fault = f"{len(chosen)} GGUF files have" if chosen else "no GGUF file has"
        remedy = f"to one of {list_files(chosen or files)}" if files else "only for a repository or folder of them"
        raise CheckpointError(
            "checkpoint_incomplete", f"{fault} the name or quantisation {clip(wanted)}: set gguf_file {remedy}"
        )
    return next(iter(chosen), None)


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
