# SPDX-License-Identifier: Apache-2.0
"""Whether numba, which comes with `hf-triton[cpu]`, compiles kernels here that are of use. Else a CPU is slower."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

from hf_triton.runner.faults import kind

logger = logging.getLogger(__name__)


@cache
def runs_numba() -> bool:
    """Whether the modules of kernels can be imported; a line in the log where they cannot."""
    try:
        import hf_triton.runner.cpu.llvm  # noqa: F401
    except ModuleNotFoundError:
        logger.warning("numba is not installed: models on the CPU are slower; pip install 'hf-triton[cpu]'")
    except Exception as error:  # a library, a version of numpy or a setting that it does not go with
        logger.warning("numba does not run (%s: %s): models on the CPU are slower", kind(error), error)
    else:
        return True
    return False


def is_usable(what: str, otherwise: str, try_out: Callable[[], bool | None]) -> bool:
    """Whether a kernel can be made and computes what it should; a line in the log where it does not.

    Args:
        what: It computes.
        otherwise: Who computes it without a kernel.
        try_out: Makes the kernel, and says whether it is right; None where none is meant for what is asked.
    """
    try:
        is_right = try_out()
        obstacle = "it computes something else"
    except Exception as error:  # a processor or a version that numba has no code for
        is_right, obstacle = False, kind(error)
    if is_right is False:
        logger.warning("the kernel of %s is of no use (%s): %s, more slowly", what, obstacle, otherwise)
    return bool(is_right)
