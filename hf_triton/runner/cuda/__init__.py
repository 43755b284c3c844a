# SPDX-License-Identifier: Apache-2.0
"""CUDA inference: attention, fused kernels, graphs, index constants, draws. The rest of the package imports this alone.

Importing it loads no torch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hf_triton.runner.faults import described

if TYPE_CHECKING:
    import torch

    from hf_triton.runner.cuda.graphs import StepGraphs
    from hf_triton.runner.device_step import DeviceStep, StepSize

__all__ = [
    "attention_for",
    "capture_graphs",
    "draw",
    "forward_context",
    "fuse",
    "packed_attention_for",
    "why_no_kernel",
]


def attention_for(blocks: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """The operation that attends to such blocks, `attention.attend`; None: there is none on their device."""
    if blocks.device.type != "cuda":
        return None
    from hf_triton.runner.cuda.attention import attend, is_usable

    return attend if is_usable("attend", blocks.device, blocks.dtype, blocks.shape[-1]) else None


def packed_attention_for(query: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """The operation that attends within the sequences of a row, `attention.attend_packed`; None: there is none."""
    if query.device.type != "cuda":
        return None
    from hf_triton.runner.cuda.attention import attend_packed, is_usable

    return attend_packed if is_usable("attend_packed", query.device, query.dtype, query.shape[-1]) else None


def why_no_kernel(is_right: Callable[[], bool]) -> str | None:
    """Why a kernel is not used; None: what it computes `is_right`."""
    try:
        return None if is_right() else "it is wrong"
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]} failed: the headers of C or of Python, Python.h, may be missing"
    except Exception as error:  # no Triton, no C compiler, a device that Triton does not know
        return described(error)


def capture_graphs(
    forward: Callable[[DeviceStep], torch.Tensor],
    device: torch.device,
    *,
    sizes: Sequence[StepSize],
    num_tables: int,
    beside: StepGraphs | None = None,
) -> StepGraphs:
    """Captured forwards, see `StepGraphs`."""
    from hf_triton.runner.cuda.graphs import StepGraphs

    return StepGraphs(forward, device, sizes=sizes, num_tables=num_tables, beside=beside)


def draw(scores: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row by a kernel, see `draw_kernel.draw`; raises where Triton is missing."""
    from hf_triton.runner.cuda.kernel_cache import have_kernel_cache

    have_kernel_cache()
    from hf_triton.runner.cuda.draw_kernel import draw

    return draw(scores, *params)


def forward_context(device: torch.device) -> AbstractContextManager[None]:
    """A context for a model's forwards, which may be entered again and again; it does nothing on other devices."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    from hf_triton.runner.cuda.index_constants import KeptIndexConstants

    # torch 2.11 and later prefer cuDNN, which plans for each shape; lengths grow at every step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return KeptIndexConstants()


def fuse(model: Any) -> None:
    """Replace what a model computes in many small kernels by one each, in place; a model on a CPU stays as it is."""
    if model.device.type == "cuda":
        from hf_triton.runner.cuda.fused import fuse_modules

        fuse_modules(model)
