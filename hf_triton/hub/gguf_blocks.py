# SPDX-License-Identifier: Apache-2.0
"""Takes apart the blocks in which GGUF files hold weights: codes, scales and minimums. Widens none.

The layouts are those of ggml's `ggml-common.h`; which numbers they mean is tried against the package gguf.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch


class Groups(NamedTuple):
    """Rows of weights: `minimum + code * scale`, or without minimums `(code - zero) * scale`."""

    codes: torch.Tensor
    """uint8 `[rows, columns]`"""
    scales: torch.Tensor
    """float32 `[rows, columns / group]`"""
    minimums: torch.Tensor | None


class Format(NamedTuple):
    kind: int
    """ggml's number of it."""
    bits: int
    """Bits of a code as it is kept."""
    zero: int
    """The code of zero, if there are no minimums."""
    per_block: int
    num_bytes: int
    """Weights and bytes of a block."""
    group: int = 32
    """Weights that share a scale."""
    has_minimums: bool = False

    def kept_bytes(self, num_weights: int) -> int:
        """What so many weights take as they are kept: with scales and minimums of 16 bits."""
        return num_weights * self.bits // 8 + num_weights // self.group * 2 * (1 + self.has_minimums)


FORMATS: Final = {
    "Q4_0": Format(2, 4, 8, 32, 18),
    "Q4_1": Format(3, 4, 0, 32, 20, has_minimums=True),
    "Q5_0": Format(6, 8, 16, 32, 22),
    "Q5_1": Format(7, 8, 0, 32, 24, has_minimums=True),
    "Q8_0": Format(8, 8, 128, 32, 34),
    "Q4_K": Format(12, 4, 0, 256, 144, has_minimums=True),
    "Q5_K": Format(13, 8, 0, 256, 176, has_minimums=True),
    "Q6_K": Format(14, 8, 32, 256, 210, group=16),
}
"""The formats that keep their bits."""
NAMES: Final = {each.kind: name for name, each in FORMATS.items()}


def take_apart(blocks: torch.Tensor, kind: int) -> Groups:
    """Codes, scales and minimums of rows of blocks, uint8 `[rows, bytes]`."""
    name = NAMES[kind]
    own = FORMATS[name]
    each = blocks.reshape(-1, own.num_bytes)
    parts: tuple[Any, Any, Any]
    if name in ("Q4_K", "Q5_K"):
        parts = _of_k(each, has_fifth=name == "Q5_K")
    elif name == "Q6_K":
        parts = _of_q6(each)
    else:
        parts = _of_32(each, name)
    shaped: Any = (None if part is None else part.reshape(len(blocks), -1) for part in parts)
    return Groups(*shaped)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(data: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """`[..., n]` as `[..., shifts, n]`: the same bytes, shifted and masked."""
    return (data.unsqueeze(-2) >> torch.tensor(shifts, dtype=torch.uint8)[:, None]) & mask


def _of_32(blocks: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    has_minimum, start = name.endswith("_1"), 2
    minimums = _half(blocks, 2) if has_minimum else None
    start += 2 * has_minimum
    if name == "Q8_0":
        return blocks[:, start:] ^ 128, _half(blocks, 0), None  # signed numbers, 128 higher
    high: Any = 0
    if name.startswith("Q5"):
        bits = _fields(blocks[:, start : start + 4], tuple(range(8)), 1)  # [n, 8, 4]: bit by bit, byte by byte
        high, start = bits.transpose(1, 2).reshape(-1, 32) << 4, start + 4
    codes = _fields(blocks[:, start:], (0, 4), 15).reshape(-1, 32)
    return codes | high, _half(blocks, 0), minimums


def _of_k(blocks: torch.Tensor, *, has_fifth: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=1)
    codes = _fields(blocks[:, -128:].reshape(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    if has_fifth:
        codes = codes | _fields(blocks[:, 16:48], tuple(range(8)), 1) << 4
    return codes, _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _of_q6(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), (0, 4), 15).reshape(-1, 2, 4, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return low | high << 4, _half(blocks, 208) * scales, None
