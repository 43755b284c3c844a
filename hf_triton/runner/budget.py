# SPDX-License-Identifier: Apache-2.0
"""How many tokens of keys and values may be held: a number that was set, or a part of what is free on its devices.

Nothing is reserved in advance, so that several models on one device share what there is. Knows no rows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_triton.runner.cgroups import PROC, group_folders, read_number, read_text

if TYPE_CHECKING:
    import torch

CUDA_FRACTION: Final = 0.9
HOST_FRACTION: Final = 0.8
"""The part of the memory that keys and values may take. The rest is for a step's own tensors; the machine's own memory
is also everybody else's, and whoever takes too much of it is killed."""
NO_LIMIT: Final = 1 << 60
"""Bytes. Version 1 of control groups writes a number beyond it where there is no limit."""
READ_INTERVAL_S: Final = 0.1
"""How long a reading of the free memory holds. One of the machine's takes 0.3 ms."""


class TokenBudget:
    """How many tokens of keys and values may be held.

    Args:
        bytes_per_token: Keys and values of one token in all layers, by the device where they live, each at least 1.
            What is no CUDA device is taken to share the machine's memory.
        max_tokens: A fixed answer, at least 1; None to go by the memory that is free.
        read_free_bytes: Tells how many bytes a device has free; None: `FreeMemory.of`.
    """

    def __init__(
        self,
        bytes_per_token: Mapping[torch.device, int],
        max_tokens: int | None,
        read_free_bytes: Callable[[torch.device], int] | None = None,
    ) -> None:
        self._bytes_per_token = dict(bytes_per_token)
        self._max_tokens = max_tokens
        self._read_free_bytes = read_free_bytes or FreeMemory().of
        self._allowed = self._allowed_next_to(0) if max_tokens is None else max_tokens
        self._most = self._allowed
        self._next_read_s = 0.0

    def tokens(self, held: int) -> int:
        """Tokens that may be held in all now.

        A fraction of what is held and what is free, taken together: of what is free alone, one would take part after
        part until nothing is left. It is below `held` when others have taken the memory since.

        Args:
            held: Tokens that are held already.
        """
        now = time.monotonic()
        if self._max_tokens is None and now >= self._next_read_s:
            self._allowed = self._allowed_next_to(held)
            self._next_read_s = now + READ_INTERVAL_S
        return self._allowed

    @property
    def allowed(self) -> int:
        """What `tokens` has answered last."""
        return self._allowed

    def most(self) -> int:
        """The most tokens that could ever be held: `max_tokens`, or what was free when this object was made."""
        return self._most

    def words(self, tokens: int) -> str:
        """So many tokens and their size, for a message: "1,234 tokens (1.2 GiB)"."""
        size, unit = float(tokens * sum(self._bytes_per_token.values())), "bytes"
        for larger in ("KiB", "MiB", "GiB", "TiB"):
            if size < 1024:
                break
            size, unit = size / 1024, larger
        return f"{tokens:,} tokens ({size:.{0 if unit == 'bytes' else 1}f} {unit})"

    def _allowed_next_to(self, held: int) -> int:
        return min(self._allowed_on(device, held) for device in self._bytes_per_token)

    def _allowed_on(self, device: torch.device, held: int) -> int:
        num_bytes = self._bytes_per_token[device]
        fraction = CUDA_FRACTION if device.type == "cuda" else HOST_FRACTION
        return int((held * num_bytes + self._read_free_bytes(device)) * fraction) // num_bytes


class FreeMemory:
    """How many bytes this process can still allocate on a device.

    Args:
        proc: The process file system. Where the process's control groups stand is looked up in it once.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._groups = list(group_folders("memory", proc))

    def of(self, device: torch.device) -> int:
        """Bytes of a CUDA device, with those that torch keeps for later; of any other, those of the machine."""
        if device.type != "cuda":
            return self._of_host()
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def _of_host(self) -> int:
        """Bytes of the machine's memory, swap not counted.

        The smaller of what the kernel calls available and what each of the process's control groups leaves: a
        container's limit is not in /proc/meminfo. Where neither can be read (macOS), all of the machine's memory.
        """
        free = [*_available_bytes(self._proc), *_left_by_groups(self._groups)]
        return max(0, min(free)) if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_bytes(proc: Path) -> Iterator[int]:
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", read_text(proc / "meminfo"), re.MULTILINE)
    if found:
        yield int(found[1]) * 1024


def _left_by_groups(groups: Iterable[tuple[bool, Path]]) -> Iterator[int]:
    for is_v2, group in groups:
        yield from _left_by_v2(group) if is_v2 else _left_by_v1(group)


def _left_by_v2(group: Path) -> Iterator[int]:
    """Of version 2. `memory.high` is no hard limit, but a process beyond it is slowed down to a crawl."""
    limits = [limit for name in ("memory.max", "memory.high") if (limit := read_number(group / name)) is not None]
    if limits and (used := read_number(group / "memory.current")) is not None:
        yield min(limits) - used + _statistic(group, "inactive_file")


def _left_by_v1(group: Path) -> Iterator[int]:
    limit = read_number(group / "memory.limit_in_bytes")
    if limit is not None and limit < NO_LIMIT and (used := read_number(group / "memory.usage_in_bytes")) is not None:
        yield limit - used + _statistic(group, "total_inactive_file")


def _statistic(group: Path, name: str) -> int:
    """A figure of memory.stat; 0 if absent. Inactive file pages count as free: the kernel drops them when asked."""
    found = re.search(rf"^{name} (\d+)$", read_text(group / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0
