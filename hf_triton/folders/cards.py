# SPDX-License-Identifier: Apache-2.0
"""GPUs that models are sized for, by the memory that NVIDIA's data sheets state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Card:
    """A GPU as its maker states it."""

    memory_gb: int
    """10^9 bytes. A card has at least these: 80 GB are 79 GiB on an H100, and counted as 75."""
    source: str


CARDS: Final = {
    "t4": Card(16, "NVIDIA T4 data sheet"),
    "l4": Card(24, "NVIDIA L4 data sheet"),
    "l40s": Card(48, "NVIDIA L40S data sheet"),
    "a10": Card(24, "NVIDIA A10 data sheet"),
    "a30": Card(24, "NVIDIA A30 data sheet"),
    "a100-40gb": Card(40, "NVIDIA A100 data sheet"),
    "a100": Card(80, "NVIDIA A100 data sheet, SXM"),
    "h100": Card(80, "NVIDIA H100 data sheet, SXM"),
    "h100-pcie": Card(80, "NVIDIA H100 data sheet, PCIe"),
    "h100-nvl": Card(94, "NVIDIA H100 data sheet, NVL"),
    "h200": Card(141, "NVIDIA H200 data sheet, SXM"),
    "b200": Card(180, "NVIDIA DGX B200 data sheet, an eighth"),
    "rtx4090": Card(24, "NVIDIA Ada architecture paper"),
    "rtx5090": Card(32, "NVIDIA RTX Blackwell architecture paper"),
    "rtx6000-ada": Card(48, "NVIDIA RTX 6000 Ada data sheet"),
}
CPU: Final = "cpu"
