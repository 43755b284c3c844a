# SPDX-License-Identifier: Apache-2.0
"""What a server and the processes of its models both know: their shared memory, and where the server was started.

Every process of a folder imports this, and not the server with its HTTP client.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")
"""The folder where the server and the processes of its models pass tensors to each other."""
SCARCE_BYTES: Final = 64 << 20
"""Docker's default for it: less free than this does for small requests alone."""
STARTED_IN: Final = "_HF_TRITON_STARTED_IN"
"""The variable that names the server's current folder, in the process of a model."""


def free_shared_memory() -> int:
    """Free bytes of the shared memory; 0 if it cannot be known."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def scarce_shared_memory() -> str | None:
    free = free_shared_memory()
    if free >= SCARCE_BYTES:
        return None
    return (
        f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and what does not fit is refused (out_of_memory): give it 1 "
        "GiB, by --shm-size=1g of Docker or an emptyDir of the medium Memory in Kubernetes"
    )
