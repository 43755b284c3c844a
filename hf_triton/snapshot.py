# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint folder must hold, and whether a file in the Hub's cache is what its name says. No network."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

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
    """
    for index, single in (SAFETENSORS, PICKLE) if allows_pickle else (SAFETENSORS,):
        if index in available and (folder / index).exists():
            return _shards(folder / index)
        if single in available:
            return [single]
    return []


def _shards(index: Path) -> list[str]:
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return sorted({Path(name).name for name in names})


def missing_weights(folder: Path, allows_pickle: bool) -> list[str]:
    """The weight files that a folder lacks; `["model.safetensors"]` where it has none at all."""
    try:
        names = weight_files(folder, [each.name for each in folder.iterdir()], allows_pickle)
    except (ValueError, KeyError, AttributeError):
        return [SAFETENSORS[0]]
    return [name for name in names if not (folder / name).exists()] if names else [SAFETENSORS[1]]


def missing_files(folder: Path, *, wants_weights: bool, wants_tokenizer: bool, allows_pickle: bool) -> list[str]:
    """What a folder lacks to be a checkpoint; empty where it is complete."""
    missing = [] if (folder / "config.json").exists() or not wants_weights else ["config.json"]
    if wants_tokenizer and not any((folder / name).exists() for name in TOKENIZER_FILES):
        missing.append(TOKENIZER_FILES[0])
    return missing + (missing_weights(folder, allows_pickle) if wants_weights else [])


def is_sound(path: Path) -> bool:
    """Whether a cached file has the checksum that its blob is named after.

    The cache names a blob by its ETag: the SHA-256 of a large file, the git blob SHA-1 of a small one. A file that is
    named otherwise (a mirror's own ETag, a plain folder) cannot be checked and counts as sound.
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
    return digest.hexdigest() == blob.name


def purge_damaged(folder: Path) -> list[str]:
    """Remove the files of a snapshot whose checksum is wrong, blob and link; their names."""
    damaged = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.is_symlink() and not is_sound(path)
    ]
    for path in damaged:
        path.resolve().unlink()
        path.unlink()
    return [path.name for path in damaged]
