# SPDX-License-Identifier: Apache-2.0
"""Temporary folders, which the next start removes if the process that owns one is killed.

A folder holds a file that its owner keeps locked. The kernel unlocks it when the owner ends, in whatever way, and the
lock tells the living from the dead across containers that share `/tmp`, which process ids do not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "hf_triton_"
OWNER: Final = ".owner"


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder for this user alone, removed with the process, or after its death by the next one."""

    def __init__(self, kind: str) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        super().__init__(prefix=f"{PREFIX}{kind}_")
        new = Path(self.name) / f"{OWNER}.new"
        self._owner = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: the folder is never taken for abandoned
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(new.with_name(OWNER))  # only now may others look at it

    def cleanup(self) -> None:
        super().cleanup()
        owner, self._owner = self._owner, -1
        if owner >= 0:
            os.close(owner)


def remove_abandoned(root: Path) -> None:
    """Remove this user's folders whose owners are dead. Raises nothing."""
    with contextlib.suppress(OSError):
        for folder in root.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if _is_own(folder):
                    _remove_if_abandoned(folder)


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder whose lock no process holds; raises OSError if a process holds it, or the folder has none."""
    owner = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(owner)
