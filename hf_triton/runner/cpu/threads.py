# SPDX-License-Identifier: Apache-2.0
"""How many threads a model on a CPU computes with: the cores that its process may use, shared with other models.

Each model is a process with a thread for every core. If two of them compute at once, their threads wait for each other
at every barrier, and both take several times as long. So a busy model announces itself, and takes its share of cores.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import math
import os
import re
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Final, Self

from hf_triton.runner.cgroups import core_quota

logger = logging.getLogger(__name__)

SHARED: Final = Path("/dev/shm")
"""A folder in the memory of this machine; Triton's Python backend needs it too."""
OWNER_ONLY: Final = 0o600
FLOCK: Final = struct.Struct("hhqqi4x")
"""`struct flock` of 64-bit Linux, fcntl(2): type, whence, start, length, process id."""
NUM_SLOTS: Final = 64
"""Busy models that are counted."""
LOOK_INTERVAL_S: Final = 0.05
"""How long a busy model may not notice that another one starts or stops; looking at every step would slow it down."""


class SharedCores:
    """Sets torch's number of threads to this model's share of the cores.

    Alone, a model has as many threads as torch starts with, or as `OMP_NUM_THREADS` says. torch respects the process's
    affinity but not the quota of its control groups; beyond the quota all threads would stop for the rest of a period.
    """

    def __init__(self) -> None:
        self._neighbours = Neighbours()
        self._quota = core_quota()
        self._num_cores = min(len(available_cores()), self._quota)
        self._num_alone = 0  # until the first `take`
        self._next_look_s = -math.inf

    def take(self) -> None:
        """Be busy, and set torch's threads to this model's share; call it before every step, in one thread.

        It looks for other busy models at once if this one was idle, then at most every `LOOK_INTERVAL_S`.
        """
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._look()
            self._next_look_s = now_s + LOOK_INTERVAL_S

    def _look(self) -> None:
        if self._neighbours.enter() and not self._num_alone:
            self._num_alone = self._max_threads()
        num_others = self._neighbours.count()
        share = max(1, int(self._num_cores / (num_others + 1)))
        _set_num_threads(min(self._num_alone, share) if num_others else self._num_alone)

    def leave(self) -> None:
        """Be idle: other models may use all cores."""
        self._next_look_s = -math.inf
        self._neighbours.leave()

    def close(self) -> None:
        """Be idle, and restore torch's number of threads."""
        self.leave()
        if self._num_alone:
            _set_num_threads(self._num_alone)

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _max_threads(self) -> int:
        import torch  # after `enter`: importing it keeps a core busy for seconds

        num_threads = torch.get_num_threads()
        is_given = re.match(r"\s*[1-9]", os.environ.get("OMP_NUM_THREADS", ""))  # OpenMP ignores other values
        if is_given or num_threads <= self._quota:
            return num_threads
        logger.info("computing with %d threads: the control group allows no more cores", self._quota)
        return int(self._quota)


def _set_num_threads(num_threads: int) -> None:
    import torch

    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


class Neighbours:
    """Other models of this user that are busy on the same cores now.

    A busy model locks one byte of a file that all of them open. The kernel releases the lock when the process ends.
    Models that do not see the file, such as those in another container, are not counted.
    """

    def __init__(self) -> None:
        self._slot: int | None = None
        self._file = _open_file()

    def enter(self) -> bool:
        """Be busy; whether this model was idle before."""
        if self._slot is not None:
            return False
        self._slot = next((slot for slot in range(NUM_SLOTS) if self._lock(fcntl.F_WRLCK, slot)), NUM_SLOTS)
        return True

    def leave(self) -> None:
        if self._slot is not None:
            self._lock(fcntl.F_UNLCK, self._slot)
        self._slot = None

    def count(self) -> int:
        """How many other models are busy, up to `NUM_SLOTS`; a system call for each, and one for each gap."""
        count, ranges = 0, [(0, NUM_SLOTS)]
        while ranges:
            start, end = ranges.pop()
            slot = self._locked_slot(start, end) if start < end else None
            if slot is not None:
                count += 1
                ranges += [(start, slot), (slot + 1, end)]
        return count

    def _lock(self, kind: int, slot: int) -> bool:
        return self._call("F_OFD_SETLK", kind, slot, 1) is not None

    def _locked_slot(self, start: int, end: int) -> int | None:
        """A slot from `start` until `end` that another model has locked; fcntl(2) names any of them, not the first."""
        lock = self._call("F_OFD_GETLK", fcntl.F_WRLCK, start, end - start)
        return None if lock is None or lock[0] == fcntl.F_UNLCK else max(start, lock[2])

    def _call(self, command: str, kind: int, start: int, length: int) -> tuple[int, ...] | None:
        """The `struct flock` that fcntl(2) answers; None if another process holds the lock, or locks do not work."""
        if self._file is None:
            return None
        try:
            lock = FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
            return FLOCK.unpack(fcntl.fcntl(self._file, getattr(fcntl, command), lock))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                _log_not_shared(error)
                self._close()
            return None

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    __del__ = _close


def _open_file() -> int | None:
    """The file whose bytes are locked, one for each set of cores; None if it cannot be opened."""
    if sys.platform != "linux":
        return None
    cores = hashlib.sha256(repr(available_cores()).encode()).hexdigest()[:8]
    path = SHARED / f"hf_triton_cores-{os.geteuid()}-{cores}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, OWNER_ONLY)
    except OSError as error:
        _log_not_shared(error)
        return None
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return file
    _log_not_shared(f"{path} is not this user's file")
    os.close(file)
    return None


def _log_not_shared(reason: object) -> None:
    logger.warning("models that are busy at the same time do not share the cores: %s", reason)
