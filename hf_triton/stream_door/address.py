# SPDX-License-Identifier: Apache-2.0
"""Addresses of engines: a private folder per tritonserver with a Unix socket per model instance.

The folder is in `/dev/shm`, which Triton's Python backend needs anyway: it is writable and local, and its path is short
enough for a socket (107 bytes). Its name holds the server's process id, which its Python processes know as their
parent's, start time and process namespace, so that it is unique to the server.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/dev/shm")
PREFIX: Final = "hf_triton_door"
PRIVATE_MODE: Final = 0o700


@dataclass(frozen=True, order=True)
class Address:
    """The socket of one model instance."""

    version: int
    pid: int
    path: Path


def server_folder() -> Path:
    """The folder of the server that this process belongs to, whether it exists or not."""
    return ROOT / f"{_namespace_prefix()}{_server_name(os.getppid())}"


def new_address(model_name: str, version: int) -> Address:
    """Create the folder, and choose the address of this process's instance of a model; call it once per process.

    Raises:
        OSError: The folder cannot be created, or belongs to another user.
    """
    folder = server_folder()
    folder.mkdir(mode=PRIVATE_MODE, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not private to this user")
    _remove_stale(folder)
    return Address(version, os.getpid(), folder / f"{_model_key(model_name)}-{version}-{os.getpid()}")


def find_addresses(model_name: str) -> list[Address]:
    """Addresses of a model's instances, including killed ones, which could not clean up."""
    folder = server_folder()
    if not _is_private(folder):
        return []
    pattern = re.compile(rf"{_model_key(model_name)}-(\d+)-(\d+)")
    matches = (pattern.fullmatch(path.name) for path in _socket_paths(folder))
    return sorted(Address(int(match[1]), int(match[2]), folder / match[0]) for match in matches if match)


def remove(address: Address) -> None:
    address.path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty, or another process was faster
        address.path.parent.rmdir()


def _namespace_prefix() -> str:
    return f"{PREFIX}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _server_name(pid: int) -> str:
    return f"{pid}-{_start_time(pid)}"


def _start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if it does not exist (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(fields.rpartition(")")[2].split()[19])


def _model_key(model_name: str) -> str:
    return hashlib.sha256(model_name.encode()).hexdigest()[:12]


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == PRIVATE_MODE
    )


def _remove_stale(own: Path) -> None:
    """Remove folders of killed servers and sockets of killed instances, of this process namespace only."""
    for folder in ROOT.glob(f"{_namespace_prefix()}*"):
        name = folder.name.removeprefix(_namespace_prefix())
        pid = name.partition("-")[0]
        if _is_private(folder) and pid.isdecimal() and name != _server_name(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    for path in _socket_paths(own):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and not _start_time(int(pid)):
            path.unlink(missing_ok=True)


def _socket_paths(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:  # the last address has just been removed
        return []
