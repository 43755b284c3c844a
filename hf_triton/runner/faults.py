# SPDX-License-Identifier: Apache-2.0
"""What a model's exception means for the request it hit, and for the engine."""

from __future__ import annotations

import dis
import logging

from hf_triton.errors import GenerationError, HfTritonError, UnavailableError, where

logger = logging.getLogger(__name__)

MEMORY_WORDS = (  # of errors that are not an OutOfMemoryError: the CPU's (Linux, Windows), CUDA's outside the allocator
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_memory(error: Exception) -> bool:
    """Whether the device has run out of memory."""
    import torch

    is_named_so = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_named_so or (_is_torch_s(error) and any(words in str(error) for words in MEMORY_WORDS))


def is_fatal(error: Exception) -> bool:
    """Whether the device is lost: a CUDA error other than out of memory poisons its context for good."""
    is_device_s = _is_accelerator_s(error) or (_is_torch_s(error) and "CUDA error" in str(error))
    return is_device_s and not is_memory(error)


def _is_accelerator_s(error: BaseException) -> bool:
    import torch

    return isinstance(error, getattr(torch, "AcceleratorError", ()))  # it has that from 2.8 on


def _is_torch_s(error: BaseException) -> bool:
    """Whether an exception's words may be torch's about a device: others may quote what a client sent."""
    return type(error) is RuntimeError or _is_accelerator_s(error)


def is_raised_by_hand(error: BaseException) -> bool:
    """Whether a `raise` of Python made an exception, and no operation."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]] == "RAISE_VARARGS"


def error_outcome(error: Exception) -> HfTritonError:
    """What to answer to the one sequence that the model failed on."""
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
    """What a log may hold of an exception amid requests: torch's words; those of others may quote a prompt."""
    return described(error) if _is_torch_s(error) and not is_raised_by_hand(error) else kind(error)


def described(error: BaseException) -> str:
    """An exception's type and the beginning of its words; for those that no prompt can be in, as at load."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def kind(error: BaseException) -> str:
    """An exception's type, for the log."""
    return type(error).__name__
