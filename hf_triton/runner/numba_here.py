# SPDX-License-Identifier: Apache-2.0
"""Whether numba, which comes with `hf-triton[cpu]`, compiles kernels here. Without it models are slower on a CPU."""

from __future__ import annotations

import logging
from functools import cache

from hf_triton.runner.faults import kind

logger = logging.getLogger(__name__)


@cache
def runs_numba() -> bool:
    """Whether the modules of kernels can be imported; a line in the log where they cannot."""
    try:
        from hf_triton.runner import machine  # noqa: F401
    except ModuleNotFoundError:
        logger.warning("numba is not installed: models on the CPU are slower; pip install 'hf-triton[cpu]'")
    except Exception as error:  # a library, a version of numpy or a setting that it does not go with
        logger.warning("numba does not run (%s: %s): models on the CPU are slower", kind(error), error)
    else:
        return True
    return False
