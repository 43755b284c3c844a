# SPDX-License-Identifier: Apache-2.0
"""CUDA inference: index constants during a forward. The rest of the package imports this alone.

Importing it loads no torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["forward_context"]


def forward_context(device: torch.device) -> AbstractContextManager[None]:
    """A context for a model's forwards, which may be entered again and again; it does nothing on other devices."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    from hf_triton.runner.cuda.index_constants import KeptIndexConstants

    # torch 2.11 and later prefer cuDNN, which plans for each shape; lengths grow at every step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return KeptIndexConstants()
