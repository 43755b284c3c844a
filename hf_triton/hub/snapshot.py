# SPDX-License-Identifier: Apache-2.0
"""Completeness of a checkpoint folder, and checksums of files in the Hub's cache. Knows no network."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError, clip
from hf_triton.files import MAX_TEXT_BYTES, describe_irregular, open_regular, read_json, read_text
from hf_triton.hub.gguf import PICKLE, SAFETENSORS, find_gguf
from hf_triton.hub.kind import find_task, find_way, read_object
from hf_triton.hub.sentence_names import files_of_modules
from hf_triton.hub.spec import CheckpointSpec

UNSAFE: Final = "weights_not_safe"
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "source.spm",
    "tiktoken.model",
    "tekken.json",
)
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
"""What an image processor is read from."""
HASH_CHUNK_BYTES: Final = 1 << 20
CHECKSUM: Final = re.compile("[0-9a-f]{64}|[0-9a-f]{40}")
UNCHECKED: Final = ".unchecked"
TEXTS: Final = (".json", ".txt", ".jinja", ".model", ".py", ".tiktoken", ".bpe", ".spm", ".codes")
"""Endings of files that are read whole."""


def weight_files(folder: Path, available: Collection[str], allow_pickle: bool) -> list[str]:
    """Name the weight files that a model needs; empty if none of an accepted format is available.

    `folder` holds the index of a sharded checkpoint; `available` are the files that exist, here or on the Hub.

    Raises:
        CheckpointError: The index cannot be read, or names a pickle that is not accepted, or a file somewhere else.
    """
    for index, single in (SAFETENSORS, PICKLE) if allow_pickle else (SAFETENSORS,):
        if index in available and (folder / index).exists():
            return _shards(folder / index, allow_pickle)
        if single in available:
            return [single]
    return []


def _shards(index: Path, allow_pickle: bool) -> list[str]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()), key="".__add__)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CheckpointError(
            "checkpoint_invalid", f"{index} does not name the files of the weights: download that file again"
        ) from None
    for name in names:  # transformers would read what stands there, whatever it is
        if Path(name).name != name or name in ("", ".."):
            raise CheckpointError(
                UNSAFE, f"{index} names {clip(name)}, which is no file of its folder: choose another checkpoint"
            )
        if not allow_pickle and not name.endswith(".safetensors"):
            raise CheckpointError(
                UNSAFE,
                f"{index} names {clip(name)}, which is no safetensors file and may run code when it is read: choose "
                "another checkpoint, or set allow_pickle to true if you trust this one",
            )
    return names


def check_weights_named(folder: Path) -> None:
    """Refuse a checkpoint whose files make transformers read other weights than `weight_files` names.

    Raises:
        CheckpointError: The config names a file of weights, or there is an adapter beside the model.
    """
    named = read_object(folder / "config.json").get("transformers_weights")
    if named not in (None, *SAFETENSORS):
        raise CheckpointError(
            UNSAFE,
            f"transformers_weights in config.json of {folder} names {clip(named)}: name the file {SAFETENSORS[1]}, and "
            "remove the entry",
        )
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            "unsupported_model",
            f"{folder} has an adapter beside a model, and transformers would apply it unchecked: set huggingface_model "
            "to the model alone, and name the adapter in the setting adapters, or merge it",
        )


def missing_weights(folder: Path, allow_pickle: bool) -> list[str]:
    """The weight files that a folder lacks; of a folder without any, `model.safetensors` or the index of its shards."""
    available = [path.name for path in folder.iterdir()]
    try:
        names = weight_files(folder, available, allow_pickle)
    except CheckpointError as error:
        if error.code == UNSAFE:
            raise
        return [SAFETENSORS[0]]
    return [name for name in names if not (folder / name).exists()] if names else [lacking_weights(available)]


def lacking_weights(available: Collection[str]) -> str:
    """The file without which there are no weights: the index of the shards that are available, or the only file."""
    for index, single in (SAFETENSORS, PICKLE):
        stem, _, ending = single.rpartition(".")
        if any(re.fullmatch(rf"{stem}-\d+-of-\d+\.{ending}", name) for name in available):
            return index
    return SAFETENSORS[1]


def has_only_pickle(folder: Path) -> bool:
    """Whether a folder has complete weights in the pickle format alone."""
    return bool(missing_weights(folder, allow_pickle=False)) and not missing_weights(folder, allow_pickle=True)


def missing_code(folder: Path) -> list[str]:
    """The Python files that a folder's configs name and the folder lacks, except those of other repositories."""
    modules = {module for name in ("config.json", "tokenizer_config.json") for module in _modules(folder / name)}
    return sorted(module for module in modules if not (folder / module).exists())


def _modules(config: Path) -> Iterator[str]:
    """The Python files behind `auto_map`: `{"AutoConfig": "configuration_mine.MyConfig", ...}`, values or lists."""
    auto_map = read_object(config).get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        names: list[Any] = value if isinstance(value, list) else [value]
        yield from (name.split(".")[0] + ".py" for name in names if isinstance(name, str) and "--" not in name)


def missing_files(folder: Path, spec: CheckpointSpec) -> list[str]:
    """The needed files that a folder lacks; empty if the checkpoint is complete."""
    if spec.files:
        return [name for name in spec.files if not (folder / name).exists()]
    if spec.needs_config:
        try:
            if find_gguf(folder, spec.gguf_file, allow_pickle=spec.allow_pickle) is not None:
                return []
        except CheckpointError:  # more may be on the Hub
            return [spec.gguf_file or "GGUF file, or all its parts"]
    missing = ["config.json"] if spec.needs_config and not (folder / "config.json").exists() else []
    reads_images, reads_text = _reads(folder) if spec.needs_config else (False, True)
    if spec.needs_tokenizer and reads_text and not any((folder / name).exists() for name in TOKENIZER_FILES):
        missing.append(TOKENIZER_FILES[0])
    if reads_images and not any((folder / name).exists() for name in PROCESSOR_FILES):
        missing.append(PROCESSOR_FILES[0])
    if spec.trust_remote_code:
        missing += missing_code(folder)
    if spec.needs_config:
        there = [str(path.relative_to(folder)) for path in folder.glob("*/*")]
        names = files_of_modules(folder, there, allow_pickle=spec.allow_pickle, needs_weights=spec.needs_weights)
        missing += [name for name in names if not (folder / name).exists()]
    return missing + (missing_weights(folder, spec.allow_pickle) if spec.needs_weights else [])


def _reads(folder: Path) -> tuple[bool, bool]:
    """Whether a checkpoint that is served reads images, and texts."""
    is_classifier = find_task(folder) == "image-classification"
    return is_classifier or find_way(folder) == "image", not is_classifier


def check_regular(folder: Path) -> None:
    """Refuse a checkpoint with files that a reader would wait for or read without end, before any is read.

    Raises:
        CheckpointError: A file, or what a link leads to, is a device, a FIFO or a socket, or a config is too large.
    """
    for path in (path for pattern in ("*", "*/*") for path in folder.glob(pattern) if not path.name.startswith(".")):
        fault = describe_irregular(path)
        if fault is None and path.suffix in TEXTS and path.is_file() and path.stat().st_size > MAX_TEXT_BYTES:
            fault = f"larger than the {MAX_TEXT_BYTES >> 20} MiB that are read"
        if fault is not None:
            raise CheckpointError(
                "checkpoint_invalid", f"{path} is {fault}, and no file of a checkpoint: remove it, or fetch it again"
            )


def is_sound(path: Path, on_chunk: Callable[[], None] | None = None, listed: str = "") -> bool:
    """Whether a cached file has the checksum that its blob is named after; `on_chunk` is called after each megabyte.

    The cache names a blob by its ETag: the SHA-256 of a large file, the git blob SHA-1 of a small one. A file with
    another name (a mirror's own ETag, a plain folder) has the checksum that is listed for it, or counts as sound.
    """
    blob = path.resolve()
    expected = blob.name if CHECKSUM.fullmatch(blob.name) else listed
    if not CHECKSUM.fullmatch(expected):
        return True
    is_large = len(expected) == hashlib.sha256().digest_size * 2
    digest = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    with open_regular(blob) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            if on_chunk is not None:
                on_chunk()
    return digest.hexdigest() == expected


def unchecked_mark(snapshot: Path, name: str) -> Path:
    """The file that stands in a cache while a file of a snapshot is downloaded and not verified yet.

    It holds the checksum that the Hub lists. The Hub's client keeps its `.no_exist` in the same way.
    """
    return snapshot.parents[1] / UNCHECKED / snapshot.name / name


def verify_unchecked(snapshot: Path) -> list[str]:
    """Verify the files of a snapshot that an earlier download has not; remove damaged ones, and return their names.

    Raises:
        PermissionError: One is damaged and cannot be removed.
    """
    marks = unchecked_mark(snapshot, "")
    damaged = []
    for mark in sorted(path for path in marks.rglob("*") if path.is_file()):
        file = snapshot / mark.relative_to(marks)
        if not file.exists():  # it never came; the next download marks it again
            continue
        try:
            if not is_sound(file, listed=read_text(mark)):
                remove_blob(file)
                damaged.append(file.name)
        except FileNotFoundError:  # another instance of the model has just removed it
            damaged.append(file.name)
        except OSError as error:  # a read-only cache, which then is not used
            raise PermissionError(error.errno, "is damaged and cannot be removed", str(file)) from error
        with contextlib.suppress(OSError):  # a cache that cannot be written to is verified at each start
            mark.unlink()
    return damaged


def remove_blob(link: Path) -> None:
    """Remove a file of a snapshot with what it leads to."""
    link.resolve().unlink(missing_ok=True)
    link.unlink(missing_ok=True)


def purge_damaged(folder: Path) -> list[str]:
    """Remove the blobs of a snapshot whose checksum is wrong; returns the names of their files.

    If there are any, all links of the snapshot are removed too, so that the incomplete snapshot does not pass for a
    complete one. The next download restores the links without downloading sound blobs again.
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
