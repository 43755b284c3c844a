# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint folder must hold, and whether a file in the Hub's cache is what its name says. No network."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError

SAFETENSORS: Final = ("model.safetensors.index.json", "model.safetensors")
PICKLE: Final = ("pytorch_model.bin.index.json", "pytorch_model.bin")
"""Index of a checkpoint in pieces, and the file of one in one piece; transformers' names."""
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
CHUNK_BYTES: Final = 1 << 20


def weight_files(folder: Path, available: Collection[str], allows_pickle: bool) -> list[str]:
    """The weight files that a model needs; empty where there are none that may be read.

    Args:
        folder: Where an index file lies, if there is one.
        available: Names of the files that exist.
        allows_pickle: Whether pickle files may be taken where there are no safetensors.

    Raises:
        CheckpointError: The index cannot be read.
    """
    for index, single in (SAFETENSORS, PICKLE) if allows_pickle else (SAFETENSORS,):
        if index in available and (folder / index).exists():
            return _shards(folder / index)
        if single in available:
            return [single]
    return []


def _shards(index: Path) -> list[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({Path(name).name for name in names})
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(
            "checkpoint_invalid", f"{index} does not say which files the weights are in: fetch that file again"
        ) from None


def missing_weights(folder: Path, allows_pickle: bool) -> list[str]:
    """The weight files that a folder lacks; `["model.safetensors"]` where it has none at all."""
    try:
        names = weight_files(folder, [each.name for each in folder.iterdir()], allows_pickle)
    except CheckpointError:
        return [SAFETENSORS[0]]
    return [name for name in names if not (folder / name).exists()] if names else [SAFETENSORS[1]]


def missing_code(folder: Path) -> list[str]:
    """The Python files that a folder's configs name and that it lacks; those of other repositories are left out."""
    modules = {module for name in ("config.json", "tokenizer_config.json") for module in _modules(folder / name)}
    return sorted(module for module in modules if not (folder / module).exists())


def _modules(config: Path) -> Iterator[str]:
    """The Python files behind `auto_map`: `{"AutoConfig": "configuration_mine.MyConfig", ...}`, values or lists."""
    try:
        values = list(json.loads(config.read_text(encoding="utf-8"))["auto_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return
    for value in values:
        names: list[Any] = value if isinstance(value, list) else [value]
        yield from (name.split(".")[0] + ".py" for name in names if isinstance(name, str) and "--" not in name)


def missing_files(
    folder: Path,
    *,
    wants_model: bool,
    wants_weights: bool,
    wants_tokenizer: bool,
    allows_pickle: bool,
    wants_code: bool,
) -> list[str]:
    """What a folder lacks to be a checkpoint; empty where it is complete."""
    missing = ["config.json"] if wants_model and not (folder / "config.json").exists() else []
    if wants_tokenizer and not any((folder / name).exists() for name in TOKENIZER_FILES):
        missing.append(TOKENIZER_FILES[0])
    missing += missing_code(folder) if wants_code else []
    return missing + (missing_weights(folder, allows_pickle) if wants_weights else [])


def is_sound(path: Path, on_chunk: Callable[[], None] | None = None) -> bool:
    """Whether a cached file has the checksum that its blob is named after.

    The cache names a blob by its ETag: the SHA-256 of a large file, the git blob SHA-1 of a small one. A file that is
    named otherwise (a mirror's own ETag, a plain folder) cannot be checked and counts as sound.

    Args:
        path: The file, or the link to its blob.
        on_chunk: Called for every megabyte that was read.
    """
    blob = path.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        digest = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return True
    with blob.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if on_chunk is not None:
                on_chunk()
    return digest.hexdigest() == blob.name


def purge_damaged(folder: Path) -> list[str]:
    """Remove the blobs of a snapshot whose checksum is wrong.

    Where there are any, every link of the snapshot goes too: an incomplete snapshot might pass for a whole one. The
    client makes links anew without fetching what is sound.

    Returns:
        The names of the damaged files.
    """
    links = [path for path in sorted(folder.rglob("*")) if path.is_symlink()]
    damaged = [path for path in links if _remove_if_damaged(path)]
    for path in links if damaged else ():
        path.unlink(missing_ok=True)
    return [path.name for path in damaged]


def _remove_if_damaged(link: Path) -> bool:
    blob = link.resolve()
    try:
        if not blob.is_file() or is_sound(blob):
            return False
    except FileNotFoundError:  # another instance of the model has just removed it
        return False
    blob.unlink(missing_ok=True)
    return True
