# SPDX-License-Identifier: Apache-2.0
"""Finds the dtypes that a processor has instructions for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU computes a dtype at full speed; True if torch cannot say."""
    import torch

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    if dtype == torch.bfloat16:
        # oneDNN accepts bfloat16 with any AVX-512, of which early versions have no instructions for it.
        is_early = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not is_early
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def serving_dtype(model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that an encoder is served in: the checkpoint's own, or float32 on a CPU without instructions for it.

    In 16 bits such a processor is three to seven times slower.
    """
    import torch

    is_slow = device.type == "cpu" and model_dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_slow and not has_instructions(model_dtype) else model_dtype


def leave_slow_dtype(model: Any) -> None:
    """Give a model the dtype that it is served in, unless it is quantised."""
    dtype = serving_dtype(model.dtype, model.device)
    if dtype != model.dtype and getattr(model, "hf_quantizer", None) is None:
        logger.info("this processor has no instructions for %s: the model becomes %s", model.dtype, dtype)
        model.to(dtype)
