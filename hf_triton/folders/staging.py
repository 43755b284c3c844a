# SPDX-License-Identifier: Apache-2.0
"""Writes a folder aside, and moves it to its place when it is complete: Triton may load what it finds there."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hf_triton.folders.folders import CONFIG

LAST: Final = (CONFIG, "config.json", "model.py")
"""Files without which a folder is neither a model folder nor a checkpoint."""
ELSEWHERE: Final = (errno.EXDEV, errno.EBUSY)
"""Why a folder cannot be renamed: another disk, or one that is mounted at its new place."""


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A temporary folder in which to write what `publish` moves to `target`.

    It lies beside the model repository if that is on the same disk and may be written to, else where `TMPDIR` says;
    not in the repository, because Triton loads hidden folders too. Parents of `target` that are missing are made, and
    removed again if nothing is published.

    Raises:
        OSError: The parent, or the temporary folder, cannot be written to.
    """
    repository = target.absolute().parent
    made = [folder for folder in (repository, *repository.parents) if not os.path.lexists(folder)]
    try:
        with tempfile.TemporaryDirectory(
            prefix=".hf_triton_", dir=_place_beside(repository), ignore_cleanup_errors=True
        ) as staging:
            yield Path(staging)
    finally:
        for folder in made:
            with suppress(OSError):  # something is published there
                folder.rmdir()


def _place_beside(repository: Path) -> Path | None:
    """The folder that a model repository is in; None if it cannot be written to, or is on another disk."""
    try:
        repository.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(repository)) from None
    if not os.access(repository, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(repository))
    beside = repository.parent
    is_near = beside.stat().st_dev == repository.stat().st_dev and os.access(beside, os.W_OK | os.X_OK)
    return beside if is_near else None


def publish(folder: Path, target: Path) -> None:
    """Move a complete folder to its place, where nothing or an empty folder is.

    On another disk it is copied to, and can be loaded once the copy is complete; what was copied is removed if that
    fails.
    """
    try:
        os.rename(folder, target)
        return
    except OSError as error:
        if error.errno not in ELSEWHERE:
            raise
    existed = target.exists()
    try:
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*LAST), dirs_exist_ok=existed)
        for file in sorted(path for name in LAST for path in folder.rglob(name)):
            shutil.copyfile(file, target / file.relative_to(folder))
    except BaseException:
        for path in target.iterdir() if existed else [target]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
