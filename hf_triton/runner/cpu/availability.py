# SPDX-License-Identifier: Apache-2.0
"""Whether numba, which `hf-triton[cpu]` installs, compiles working kernels on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

from hf_triton.runner.faults import kind

logger = logging.getLogger(__name__)


@cache
def runs_numba() -> bool:
    """Whether the kernel modules can be imported; logs the reason if not."""
    try:
        import hf_triton.runner.cpu.llvm  # noqa: F401
    except ModuleNotFoundError:
        logger.warning("numba is not installed: models on the CPU are slower; pip install 'hf-triton[cpu]'")
    except Exception as error:  # a missing library, an incompatible numpy, a setting of numba's
        logger.warning("numba does not run (%s: %s): models on the CPU are slower", kind(error), error)
    else:
        return True
    return False


def is_usable(name: str, fallback: str, try_out: Callable[[], bool | None]) -> bool:
    """Whether numba runs, and a kernel compiles and computes the right result; logs the reason if not.

    `try_out` compares the kernel's result; None: there is none for this dtype and processor.
    """
    if not runs_numba():
        return False
    try:
        is_right = try_out()
        obstacle = "wrong result"
    except Exception as error:  # a processor or a version that numba does not support
        is_right, obstacle = False, kind(error)
    if is_right is False:
        logger.warning("%s kernel unavailable (%s); using the slower %s", name, obstacle, fallback)
    return bool(is_right)
