# SPDX-License-Identifier: Apache-2.0
"""Reads files that others wrote: regular ones alone, opened without waiting, and bounded by the bytes that are read.

An unpacked archive or a cloned repository may hold links, devices and FIFOs, which a plain `open` waits for, or reads
without end whatever size they show. Links to regular files are followed: the Hub's cache is made of them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

MAX_TEXT_BYTES: Final = 256 << 20
"""Of a config, a tokenizer, an index of shards; those of published models have up to 40 MB."""
ADAPTER_PICKLE: Final = "adapter_model.bin"
ADAPTER_IS_PICKLE: Final = (
    f"has its weights as a pickle alone ({ADAPTER_PICKLE}), which can run code when it is read: convert it to "
    "safetensors, as docs/adapters.md says"
)
"""The end of a sentence about a LoRA adapter's folder."""


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading; raises OSError if there is none, or it is something else."""
    _check_regular(file, os.stat(file).st_mode)  # opening a device may do things
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(file, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(file: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a regular file whole.

    Raises:
        OSError: There is none, or it is something else.
        ValueError: It has more than `max_bytes`, or more than its size.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(size + 1) if size <= max_bytes else b""
    if size > max_bytes:
        raise ValueError(f"{file.name} has more than {max_bytes} bytes")
    if len(data) > size:  # of /proc, or one that grows
        raise ValueError(f"{file.name} has more bytes than its size says")
    return data


def read_text(file: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Read a regular file as text. Raises what `read_bytes` does."""
    return read_bytes(file).decode(encoding, errors)


def read_json(file: Path, encoding: str = "utf-8") -> Any:
    """Read a regular file as JSON.

    Raises:
        OSError: There is none, or it is something else.
        ValueError: It is not JSON, or too large.
        RecursionError: It is nested too deeply.
    """
    return json.loads(read_text(file, encoding))


def describe_irregular(file: Path) -> str | None:
    """What a file is that cannot be read to an end; None: a regular file, a folder, or nothing."""
    try:
        mode = os.stat(file).st_mode
    except OSError:  # a link to nothing, which counts as missing
        return None
    kinds = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    kind = next((kind for is_kind, kind in kinds.items() if is_kind(mode)), None)
    return f"a link to {kind}" if kind and file.is_symlink() else kind


def _check_regular(file: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"is {describe_irregular(file) or 'no file'}, not a regular file", str(file))
