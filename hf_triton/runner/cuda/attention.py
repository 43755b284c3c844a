# SPDX-License-Identifier: Apache-2.0
"""The operations `hf_triton::attend` and `attend_packed`: attention of a packed row of tokens, within each sequence.

The first one reads keys and values from the sequences' blocks, the second one from the row itself. A CUDA device
computes them by kernels in Triton's language (`attention_kernel.py`), a CPU by torch (`attention_reference.py`). What
depends on a step's sequences is read from tensors on the device, so that a captured graph depends on the number of
tokens alone.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any, Final

import torch

from hf_triton.runner.cuda import attention_reference, why_no_kernel
from hf_triton.runner.cuda.kernel_cache import have_kernel_cache
from hf_triton.runner.device_step import NO_SEQUENCE
from hf_triton.runner.numerics import agree

logger = logging.getLogger(__name__)

MAX_SIZE: Final = 256
"""Numbers of a head."""
TRIAL_TOKENS: Final = 20, 600
"""Of the rows that are tried: many have large tiles, which not every device has the shared memory for."""

LIBRARY: Any = torch.library.Library("hf_triton", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "attend(Tensor query, Tensor? keys, Tensor? values, Tensor(a!) key_blocks, Tensor(b!) value_blocks, "
    "Tensor sequences, Tensor bounds, Tensor lengths, Tensor starts, Tensor tables, Tensor? sinks, "
    "float scale, int window, float softcap) -> Tensor"
)
LIBRARY.define(
    "attend_packed(Tensor query, Tensor keys, Tensor values, Tensor sequences, Tensor bounds, Tensor? sinks, "
    "float scale, int window, float softcap, bool is_causal) -> Tensor"
)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    sequences: torch.Tensor,
    bounds: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    tables: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Write the new tokens' keys and values to their blocks, and attend to each sequence's tokens, causally.

    A sequence's new tokens are its last ones. All tensors are on one device; those of numbers are int64.

    Args:
        query: `[tokens, heads, size]`, the new tokens of all sequences; any strides.
        keys: `[tokens, key_heads, size]`, any strides; None: they are in their blocks already.
        values: `[tokens, key_heads, value_size]`; None if the keys are.
        key_blocks: `[blocks, key_heads, block_size, size]`, contiguous.
        value_blocks: `[blocks, key_heads, block_size, value_size]`, contiguous.
        sequences: `[tokens]`: each token's sequence, from 0, ascending; `NO_SEQUENCE` for padding, which comes last.
        bounds: `[sequences + 1]`: sequence `i` has the tokens `[bounds[i]:bounds[i + 1]]` of the row.
        lengths: `[sequences]`: tokens of each, the new ones included.
        starts: `[sequences]`: where its blocks begin in `tables`.
        tables: `[numbers]`: the blocks of all sequences, each in order.
        sinks: `[heads]`, one more score of each head, with a value of zero; None: there is none.
        scale: Factor of the products.
        window: How many of the last tokens, itself included, a token attends to; 0: all.
        softcap: Scores become `softcap * tanh(score / softcap)`; 0: they stay.

    Returns:
        `[tokens, heads, value_size]`, contiguous, in the query's dtype; zeros for padding. Sums and softmax are in 32
        bits.
    """
    output: torch.Tensor = torch.ops.hf_triton.attend(
        query, keys, values, key_blocks, value_blocks, sequences, bounds, lengths, starts, tables, sinks, scale, window,
        softcap,
    )  # fmt: skip
    return output


def attend_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: torch.Tensor,
    bounds: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    is_causal: bool,
) -> torch.Tensor:
    """Attend to the tokens of each sequence, which are all in the row.

    Args:
        query: `[tokens, heads, size]`; any strides, as of keys and values.
        keys: `[tokens, key_heads, size]`.
        values: `[tokens, key_heads, value_size]`.
        sequences: As in `attend`.
        bounds: As in `attend`.
        sinks: As in `attend`.
        scale: Factor of the products.
        window: A token attends to those that are less than this many tokens away; 0: to all.
        softcap: As in `attend`.
        is_causal: Whether it attends to none after itself.

    Returns:
        As `attend`.
    """
    output: torch.Tensor = torch.ops.hf_triton.attend_packed(
        query, keys, values, sequences, bounds, sinks, scale, window, softcap, is_causal
    )
    return output


@cache
def _kernels() -> Any:
    """The module that needs Triton."""
    have_kernel_cache()
    from hf_triton.runner.cuda import attention_launch

    return attention_launch


def _attend_on_device(query: torch.Tensor, *others: Any) -> Any:
    with torch.cuda.device(query.device):  # Triton launches on the current one
        return _kernels().attend(query, *others)


def _attend_packed_on_device(query: torch.Tensor, *others: Any) -> Any:
    with torch.cuda.device(query.device):
        return _kernels().attend_packed(query, *others)


def _shape_on_meta(
    query: torch.Tensor, keys: Any, values: Any, key_blocks: Any, value_blocks: torch.Tensor, *others: Any
) -> torch.Tensor:
    """What torch.compile needs to know."""
    return query.new_empty(*query.shape[:2], value_blocks.shape[3])


LIBRARY.impl("attend", attention_reference.attend, "CPU")
LIBRARY.impl("attend", _shape_on_meta, "Meta")
LIBRARY.impl("attend", _attend_on_device, "CUDA")
LIBRARY.impl("attend_packed", attention_reference.attend_packed, "CPU")
LIBRARY.impl("attend_packed", _attend_packed_on_device, "CUDA")


@cache
def is_usable(name: str, device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether an operation is right for heads of a size on a device, which is tried once; if not, the log says why."""
    if size > MAX_SIZE:
        reason: str | None = f"it has {MAX_SIZE} numbers of a head at most"
    else:
        reason = why_no_kernel(partial(_is_right, name, device, dtype, size))
    if reason is None:
        return True
    logger.warning("no attention kernel on %s (%s): attention of heads of %d is torch's, slower", device, reason, size)
    return False


def _is_right(name: str, device: torch.device, dtype: torch.dtype, size: int) -> bool:
    operation, trial = (attend, _paged_trial) if name == "attend" else (attend_packed, _packed_trial)
    for num_tokens in TRIAL_TOKENS:
        arguments = trial(device, dtype, size, num_tokens)
        expected = getattr(attention_reference, name)(*(_on_host(each) for each in arguments))
        if not agree(expected, operation(*arguments).cpu()):
            return False
    return True


def _paged_trial(device: torch.device, dtype: torch.dtype, size: int, num_tokens: int) -> tuple[Any, ...]:
    """Arguments of `attend`: a long sequence that decodes and a chunk, whose blocks are out of order, and padding."""
    chunk = num_tokens - 2
    num_blocks = 13 + -(-(15 + chunk) // 16)
    blocks = num_blocks, 2, 16, size
    rows = (num_tokens, 4, size), (num_tokens, 2, size), (num_tokens, 2, size)
    states = _random_states((*rows, blocks, blocks), device, dtype)
    numbers = [0, *[1] * chunk, NO_SEQUENCE], [0, 1, 1 + chunk], [200, 15 + chunk], [0, 13], range(num_blocks)[::-1]
    return *states, *(torch.tensor(each).to(device) for each in numbers), None, 0.125, 0, 0.0


def _packed_trial(device: torch.device, dtype: torch.dtype, size: int, num_tokens: int) -> tuple[Any, ...]:
    """Arguments of `attend_packed`: two sequences with windows."""
    rows = (num_tokens, 4, size), (num_tokens, 2, size), (num_tokens, 2, size)
    states = _random_states(rows, device, dtype)
    numbers = [0] * 3 + [1] * (num_tokens - 3), [0, 3, num_tokens]
    return *states, *(torch.tensor(each).to(device) for each in numbers), None, 0.125, 9, 0.0, False


def _random_states(shapes: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def _on_host(argument: Any) -> Any:
    return argument.cpu() if isinstance(argument, torch.Tensor) else argument
