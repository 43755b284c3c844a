# SPDX-License-Identifier: Apache-2.0
"""Says where Triton's language keeps the kernels that it has compiled."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


@cache
def have_kernel_cache() -> None:
    """Keep compiled kernels in a temporary folder if Triton's own cannot be written to, as in a read-only root."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        knobs.cache.dir = tempfile.mkdtemp(prefix="triton-")
        logger.warning(
            "%s is not writable, so kernels are compiled at each start: set TRITON_CACHE_DIR to a writable folder",
            folder,
        )
