# SPDX-License-Identifier: Apache-2.0
"""What a model's exception means for the request it hit, and for the engine."""

from __future__ import annotations

import logging
import re
import traceback
from typing import Final

from hf_triton.errors import GenerationError, HfTritonError, UnavailableError, where

logger = logging.getLogger(__name__)

MEMORY_MESSAGES: Final = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Messages of errors other than OutOfMemoryError have one: the CPU's (Linux, Windows), CUDA's outside the allocator."""


class RankError(RuntimeError):
    """Another rank of the model has ended, or a step has failed in which others were: none of them can continue."""


def is_memory(error: Exception) -> bool:
    """Whether the device ran out of memory."""
    import torch

    is_by_type = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_by_type or (_is_torch_error(error) and any(part in str(error) for part in MEMORY_MESSAGES))


def is_fatal(error: Exception) -> bool:
    """Whether the device is lost: a CUDA error other than out of memory leaves its context unusable. Or other ranks."""
    if isinstance(error, RankError):
        return True
    is_device_error = _is_accelerator_error(error) or (_is_torch_error(error) and "CUDA error" in str(error))
    return is_device_error and not is_memory(error)


def _is_accelerator_error(error: BaseException) -> bool:
    import torch

    return isinstance(error, getattr(torch, "AcceleratorError", ()))  # new in torch 2.8


def _is_torch_error(error: BaseException) -> bool:
    """Whether an exception has a type that torch's operators raise: only then may its message speak of a device."""
    return type(error) is RuntimeError or _is_accelerator_error(error)


def error_outcome(error: Exception) -> HfTritonError:
    """The outcome of the sequence that the model failed on."""
    import torch

    if is_memory(error):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning("out of memory on one sequence")
        return UnavailableError(
            "out_of_memory", "the device has too little memory: ask for fewer tokens or a shorter prompt"
        )
    logger.error("the model failed on one sequence (%s): %s", loggable(error), where(error))
    return GenerationError("generation_failed", "the model failed on this request; the server's log says how")


def loggable(error: BaseException) -> str:
    """What a log may hold of an exception while requests run: torch's messages; any other may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    # A `raise` statement in Python is not torch's, nor is an exception whose source is unavailable.
    is_raised_in_python = bool(frames) and "raise" in re.findall(r"\w+", frames[0].line or "raise")
    return described(error) if _is_torch_error(error) and not is_raised_in_python else kind(error)


def described(error: BaseException) -> str:
    """An exception's type and the beginning of its message, for exceptions that cannot quote a prompt, as at load."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def kind(error: BaseException) -> str:
    """An exception's type, for the log."""
    return type(error).__name__
