# SPDX-License-Identifier: Apache-2.0
"""How many threads a model on a CPU computes with: the cores that its process may use, shared with its neighbours.

Each model is a process of its own, with threads for all cores. Where two of them compute at one moment, a thread waits
for another of its own that does not run, because one of the other model's waits for its own on that core: both take
several times as long, and so does one beside a model that is being loaded. So whoever is busy says so, and takes its
part of the cores only.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import re
import secrets
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from hf_triton.runner.cgroups import PROC, group_folders, number, text

logger = logging.getLogger(__name__)

SHARED: Final = Path("/dev/shm")
"""Of this machine alone; Triton's Python backend needs it anyway."""
OURS_ALONE: Final = 0o600
LOCK: Final = struct.Struct("hhqqi4x")
"""`struct flock` of Linux on 64 bits, fcntl(2): type, whence, start, length, process id."""
PLACES: Final = 1 << 62
"""Bytes of the file to lock; there are none in it."""
NOT_SHARED: Final = "models that are busy at one moment do not share the cores: %s"


def core_quota(proc: Path = PROC) -> float:
    """Cores whose time the control groups leave this process: a whole number, 1 at least, or infinity.

    Args:
        proc: The process file system.
    """
    quota = min(_quotas(proc), default=math.inf)
    return quota if math.isinf(quota) else max(1, int(quota))


def _quotas(proc: Path) -> Iterator[float]:
    for is_v2, group in group_folders("cpu", proc):
        if is_v2:
            found = re.match(r"(\d+) (0*[1-9]\d*)$", text(group / "cpu.max"))
            if found:
                yield int(found[1]) / int(found[2])
        else:
            limit, period = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
            if limit is not None and period:
                yield limit / period


def _own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


class SharedCores:
    """The cores that a model computes on, together with others that are busy at the same time.

    Alone it has as many threads as torch takes, which knows the cores that a process may run on, but not how much of
    their time its control groups leave: beyond that, all threads would stand still for the rest of each period. Where
    `OMP_NUM_THREADS` is set, it is that many.

    Args:
        device_type: torch's, where the model computes; what is not a CPU takes no cores.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._neighbours = Neighbours() if device_type == "cpu" else None
        self._quota = core_quota()
        self._num_cores = min(len(_own_cores()), self._quota)
        self._num_alone = 0  # until the first `take`

    def take(self) -> None:
        """Be busy, and have torch compute with what the others leave. Called often: it takes microseconds."""
        if self._neighbours is None:
            return
        if self._neighbours.come() and not self._num_alone:
            self._num_alone = self._most_threads()
        num_others = self._neighbours.count()
        part = max(1, int(self._num_cores / (num_others + 1)))
        _compute_with(min(self._num_alone, part) if num_others else self._num_alone)

    def leave(self) -> None:
        """Be idle: the others may have all cores."""
        if self._neighbours is not None:
            self._neighbours.go()

    def __enter__(self) -> Self:
        self.take()
        return self

    def close(self) -> None:
        """Be idle, and restore torch's number of threads."""
        self.leave()
        if self._num_alone:
            _compute_with(self._num_alone)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _most_threads(self) -> int:
        import torch  # now, as it takes seconds of a core

        num_threads = torch.get_num_threads()
        is_given = re.match(r"\s*[1-9]", os.environ.get("OMP_NUM_THREADS", ""))  # OpenMP passes by anything else
        if is_given or num_threads <= self._quota:
            return num_threads
        logger.info("computing with %d threads: the control group leaves no more cores", self._quota)
        return int(self._quota)


def _compute_with(num_threads: int) -> None:
    import torch

    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)


class Neighbours:
    """Others of this user, on the same cores, that are busy now.

    Who is busy holds a lock on a byte of a file that all have open: it goes with its process, and with those that were
    forked of it, however they end. What does not see that file, such as a model in another container, is not counted.
    """

    def __init__(self) -> None:
        self._place = secrets.randbelow(PLACES)
        self._is_here = False
        self._file = _open_file()

    def come(self) -> bool:
        """Be busy from now on; whether that is new."""
        if self._is_here:
            return False
        self._call("F_OFD_SETLK", fcntl.F_WRLCK, self._place, 1)
        self._is_here = True
        return True

    def go(self) -> None:
        """Be idle."""
        if self._is_here:
            self._call("F_OFD_SETLK", fcntl.F_UNLCK, self._place, 1)
        self._is_here = False

    def count(self) -> int:
        """How many others are busy."""
        num, ranges = 0, [(0, PLACES)]
        while ranges:
            start, end = ranges.pop()
            kind, at, length = self._call("F_OFD_GETLK", fcntl.F_WRLCK, start, end - start)
            if kind != fcntl.F_UNLCK:  # one of those there are, in no order
                num += 1
                ranges += [each for each in ((start, at), (at + (length or end), end)) if each[0] < each[1]]
        return num

    def _call(self, command: str, kind: int, start: int, length: int) -> tuple[int, int, int]:
        """What fcntl(2) says of a lock: type, start, length (0: to the end)."""
        if self._file is None:
            return fcntl.F_UNLCK, 0, 0
        lock = LOCK.pack(kind, os.SEEK_SET, start, length, 0)
        try:
            answer = fcntl.fcntl(self._file, getattr(fcntl, command), lock)
        except OSError as error:
            logger.warning(NOT_SHARED, error)
            self._close()
            return fcntl.F_UNLCK, 0, 0
        kind, _, start, length, _ = LOCK.unpack(answer)
        return kind, start, length

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    __del__ = _close


def _open_file() -> int | None:
    """The file whose bytes are locked, one for each set of cores; None where there is none to be had."""
    if sys.platform != "linux":
        return None
    cores = hashlib.sha256(repr(_own_cores()).encode()).hexdigest()[:8]
    path = SHARED / f"hf_triton_cores-{os.geteuid()}-{cores}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, OURS_ALONE)
    except OSError as error:
        logger.warning(NOT_SHARED, error)
        return None
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return file
    logger.warning(NOT_SHARED, f"{path} is not this user's file")
    os.close(file)
    return None
