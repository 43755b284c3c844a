# SPDX-License-Identifier: Apache-2.0
"""Products of a few vectors with the packed weights of a linear layer, on a CPU: by a kernel of our own where it can.

oneDNN computes them at a third to two thirds of the speed at which memory and processor could, and the same numbers.
"""

from __future__ import annotations

import logging
from array import array
from functools import cache
from typing import Final

import torch

from hf_triton.runner.faults import kind
from hf_triton.runner.numba_here import runs_numba
from hf_triton.runner.rounding import agree

logger = logging.getLogger(__name__)

MOST_VECTORS: Final = 64
"""Of more, oneDNN is as fast."""
LEAST_WIDTH: Final = 256
"""Numbers of a vector from which on a kernel is compiled: the demo model has fewer."""
WORTH_THREADS: Final = 2**17
"""Products of numbers from which on it is worth to wake other threads."""
PARTS: Final = 2
"""Of a thread's share, which it takes one after another: threads are not equally fast."""


def suits(x: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether `multiply` may be asked: few vectors, of the dtype that a layer's kernel is for, and no training.

    Args:
        x: `[..., in_features]`.
        dtype: What `kernel_dtype` said of the layer.
    """
    if x.dtype is not dtype or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    is_plain = type(x) is torch.Tensor and x.device.type == "cpu" and not x.is_neg()
    return is_plain and 0 < x.numel() <= MOST_VECTORS * x.shape[-1]


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`; sums are in 32 bits, and a vector's product depends on no other vector.

    Args:
        x: `[..., in_features]`, of which `suits` is true.
        weight: Packed, `[out_features, in_features]`, of a layer that has a kernel.
        bias: `[out_features]`.
    """
    from hf_triton.runner import product_kernel as kernel

    x = x.contiguous()
    outputs, inputs = weight.shape
    count = x.numel() // inputs
    found = torch.zeros(count, outputs, device="cpu") if bias is None else bias.float().repeat(count, 1)
    num_threads = torch.get_num_threads() if count * inputs * outputs >= WORTH_THREADS else 1
    blocks = outputs // kernel.BLOCK
    progress = array("q", (0,))
    address, _ = progress.buffer_info()
    task = kernel.Task(
        progress=address,
        vectors=x.data_ptr(),
        weights=torch.ops.mkldnn.data_ptr(weight),
        found=found.data_ptr(),
        num=count,
        words=inputs * x.itemsize // kernel.WORD_BYTES,
        outputs=outputs,
        at_once=blocks if num_threads == 1 else -(-blocks // (PARTS * num_threads)),
    )
    kernel.run(x.dtype, task, num_threads)
    return found.to(x.dtype).view(*x.shape[:-1], outputs)


@torch.inference_mode()
def kernel_dtype(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype | None:
    """The dtype of vectors that `multiply` takes with a layer's weights; None where there is no kernel for them.

    Args:
        weight: Packed, `[out_features, in_features]`. How oneDNN lays it out, which is its own affair, is tried out.
        bias: `[out_features]`.
    """
    inputs, dtype = weight.shape[1], weight.dtype
    if inputs < LEAST_WIDTH or not _has_kernel(dtype) or not _is_laid_out(weight):
        return None
    x = torch.linspace(-1, 1, inputs, device="cpu").to(dtype)[None]
    wanted = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return dtype if agree(wanted, multiply(x, weight, bias), dtype) else None


def _is_laid_out(weight: torch.Tensor) -> bool:
    """Whether packed weights may be blocks of words, without anything else."""
    from hf_triton.runner.product_kernel import BLOCK, STEP, WORD_BYTES

    outputs, inputs = weight.shape
    num_bytes = torch.ops.mkldnn._nbytes(weight)
    has_blocks = outputs % BLOCK == 0 and inputs * weight.itemsize % (STEP * WORD_BYTES) == 0
    return has_blocks and num_bytes == outputs * inputs * weight.itemsize


@cache
def _has_kernel(dtype: torch.dtype) -> bool:
    """Whether there is a kernel, tried out with every number of vectors that it computes together."""
    if not runs_numba():
        return False
    try:
        from hf_triton.runner import product_kernel as kernel

        if not kernel.can_run(dtype):
            return False
        obstacle = None if _is_right(dtype) else "it computes something else"
    except Exception as error:  # a processor or a version that numba has no code for
        obstacle = kind(error)
    if obstacle is not None:
        logger.warning("the kernel of linear layers is of no use (%s): oneDNN computes them, more slowly", obstacle)
    return obstacle is None


def _is_right(dtype: torch.dtype) -> bool:
    from hf_triton.runner.product_kernel import AT_A_TIME, BLOCK, CHUNK, SPREAD

    inputs, outputs = 2 * SPREAD * CHUNK, 2 * BLOCK
    plain = torch.linspace(-1, 1, outputs * inputs, device="cpu").sin().to(dtype).view(outputs, inputs)
    weight = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    if not _is_laid_out(weight):
        return False
    for count in range(1, (SPREAD + 1) * AT_A_TIME):
        x = torch.linspace(-3, 3, count * inputs, device="cpu").cos().to(dtype).view(count, inputs)
        if not agree((x.float() @ plain.float().T).to(dtype), multiply(x, weight, None), dtype):
            return False
    return True
