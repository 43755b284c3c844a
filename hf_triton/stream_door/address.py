# SPDX-License-Identifier: Apache-2.0
"""Where engines listen: a private folder for each tritonserver, in it a Unix socket for each instance of a model.

The folder is in `/dev/shm`, which Triton's Python backend needs anyway: it is writable, of this machine alone, and its
path is short, which a socket's must be (107 bytes). Its name has the server's process id, which all its Python
processes know as their parent's, with its start time and its process namespace, so that no two servers meet.
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
OURS_ALONE: Final = 0o700


@dataclass(frozen=True, order=True)
class Address:
    """Where one instance of a model listens."""

    version: int
    pid: int
    path: Path


def server_folder() -> Path:
    """The folder of the server that this process belongs to, whether it exists or not."""
    return ROOT / f"{_namespace_prefix()}{_server_name(os.getppid())}"


def new_address(model_name: str, version: int) -> Address:
    """Where an instance of a model in this process listens, once a process at most; the folder is made.

    Raises:
        OSError: The folder cannot be made, or somebody else has made it.
    """
    folder = server_folder()
    folder.mkdir(mode=OURS_ALONE, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not a folder of this user's alone")
    _remove_stale(folder)
    return Address(version, os.getpid(), folder / f"{_model_key(model_name)}-{version}-{os.getpid()}")


def find_addresses(model_name: str) -> list[Address]:
    """Where the instances of a model listen or have listened: whoever was killed could not clean up."""
    folder = server_folder()
    if not _is_private(folder):
        return []
    pattern = re.compile(rf"{_model_key(model_name)}-(\d+)-(\d+)")
    found = (pattern.fullmatch(path.name) for path in _paths(folder))
    return sorted(Address(int(each[1]), int(each[2]), folder / each[0]) for each in found if each)


def remove(address: Address) -> None:
    """Take an address away, and the folder after its last one."""
    address.path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not empty, or somebody else was faster
        address.path.parent.rmdir()


def _namespace_prefix() -> str:
    return f"{PREFIX}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _server_name(pid: int) -> str:
    return f"{pid}-{_start_time(pid)}"


def _start_time(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; 0 where there is none (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(fields.rpartition(")")[2].split()[19])


def _model_key(model_name: str) -> str:
    return hashlib.sha256(model_name.encode()).hexdigest()[:12]


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == OURS_ALONE


def _remove_stale(own: Path) -> None:
    """Remove what killed servers and killed instances have left. Other process namespaces are not ours to judge."""
    for folder in ROOT.glob(f"{_namespace_prefix()}*"):
        name = folder.name.removeprefix(_namespace_prefix())
        pid = name.partition("-")[0]
        if _is_private(folder) and pid.isdecimal() and name != _server_name(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    for path in _paths(own):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and not _start_time(int(pid)):
            path.unlink(missing_ok=True)


def _paths(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:  # the last address has just been removed
        return []
