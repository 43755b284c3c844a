# SPDX-License-Identifier: Apache-2.0
"""How many tokens the KV cache may hold: a fixed number, or a part of the host's free memory.

On a CPU nothing is reserved in advance, so that several models share its memory. Elsewhere all is allocated at load,
and the number is fixed (`gpu_memory.py`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_triton.runner.cgroups import PROC, group_folders, read_number, read_text

if TYPE_CHECKING:
    import torch

HOST_FRACTION: Final = 0.8
"""The part of the host's memory that the KV cache may take. The rest is for a step's tensors; it is shared with other
processes, and the kernel kills those that take too much."""
READ_INTERVAL_S: Final = 0.1
"""How long a reading of the free memory is used. One of host memory takes 0.3 ms."""


class TokenBudget:
    """How many tokens the KV cache may hold.

    Args:
        bytes_per_token: Keys and values of one token in all layers, by device, each at least 1.
        max_tokens: A fixed budget, at least 1; None for a part of the host's free memory.
        read_free_bytes: Returns the free bytes of a device; None: `FreeMemory.of`.
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
        self.allowed = self._allowed_next_to(0) if max_tokens is None else max_tokens
        """The last result of `tokens`."""
        self.most = self.allowed
        """The most tokens that could ever fit: `max_tokens`, or the budget at the start."""
        self._next_read_s = 0.0

    def tokens(self, held: int) -> int:
        """Tokens that the KV cache may hold now.

        A fraction of used and free memory together: a fraction of free memory alone would be taken again and again
        until none is left. The result is below `held` if other processes have taken the memory since.
        """
        now = time.monotonic()
        if self._max_tokens is None and now >= self._next_read_s:
            self.allowed = self._allowed_next_to(held)
            self._next_read_s = now + READ_INTERVAL_S
        return self.allowed

    def words(self, tokens: int) -> str:
        """A number of tokens and their size, for a message: "1,234 tokens (1.2 GiB)"."""
        return f"{tokens:,} tokens ({size_words(tokens * sum(self._bytes_per_token.values()))})"

    def _allowed_next_to(self, held: int) -> int:
        allowed = []
        for device, num_bytes in self._bytes_per_token.items():
            allowed.append(int((held * num_bytes + self._read_free_bytes(device)) * HOST_FRACTION) // num_bytes)
        return min(allowed)


def size_words(num_bytes: float) -> str:
    """A size for a message: "1.2 GiB"."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.{0 if unit == 'bytes' else 1}f} {unit}"


class FreeMemory:
    """How many bytes this process can still allocate on a device; the folders of control groups are looked up once."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._groups = list(group_folders("memory", proc))

    def of(self, device: torch.device) -> int:
        """Free bytes of a CUDA device, torch's own reserve included; of any other device, those of the host.

        For the host, without swap: the smallest of what the kernel calls available and what each of the process's
        control groups allows, since a container's limit is not in /proc/meminfo. If neither can be read (macOS), all
        of the host memory.
        """
        if device.type == "cuda":
            import torch

            free_bytes, _ = torch.cuda.mem_get_info(device)
            return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = [free for is_v2, group in self._groups for free in (_free_in_v2(group) if is_v2 else _free_in_v1(group))]
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", read_text(self._proc / "meminfo"), re.MULTILINE)
        if match:
            free.append(int(match[1]) * 1024)
        return max(0, min(free)) if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_v2(group: Path) -> Iterator[int]:
    """Version 2. `memory.high` is no hard limit, but the kernel throttles a process beyond it."""
    limits = [limit for name in ("memory.max", "memory.high") if (limit := read_number(group / name)) is not None]
    if limits and (used := read_number(group / "memory.current")) is not None:
        yield min(limits) - used + _statistic(group, "inactive_file")


def _free_in_v1(group: Path) -> Iterator[int]:
    limit, used = read_number(group / "memory.limit_in_bytes"), read_number(group / "memory.usage_in_bytes")
    if limit is not None and limit < 1 << 60 and used is not None:  # version 1 writes a larger number for no limit
        yield limit - used + _statistic(group, "total_inactive_file")


def _statistic(group: Path, name: str) -> int:
    """A figure of memory.stat; 0 if absent. Inactive file pages count as free: the kernel drops them on demand."""
    match = re.search(rf"^{name} (\d+)$", read_text(group / "memory.stat"), re.MULTILINE)
    return int(match[1]) if match else 0
