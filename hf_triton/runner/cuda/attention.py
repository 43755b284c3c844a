# SPDX-License-Identifier: Apache-2.0
"""The operation `hf_triton::attend`: attention of a packed row of tokens to the blocks of their sequences.

A CUDA device computes it by kernels in Triton's language (`attention_kernel.py`). On a CPU torch computes it in 32
bits, sequence by sequence: the simulated device runs that, and kernels are tested beside it. What depends on a step's
sequences is read from tensors on the device, so that a captured graph depends on the number of tokens alone.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Final

import torch

from hf_triton.runner.cuda import NO_SEQUENCE
from hf_triton.runner.numerics import agree

logger = logging.getLogger(__name__)

MAX_SIZE: Final = 256
"""Numbers of a head."""

LIBRARY: Any = torch.library.Library("hf_triton", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "attend(Tensor query, Tensor? keys, Tensor? values, Tensor(a!) key_blocks, Tensor(b!) value_blocks, "
    "Tensor sequences, Tensor bounds, Tensor lengths, Tensor starts, Tensor tables, Tensor? sinks, "
    "float scale, int window, float softcap) -> Tensor"
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


def _attend_on_cpu(
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
    num_heads, block_size = query.shape[1], key_blocks.shape[2]
    output = query.new_zeros(len(query), num_heads, value_blocks.shape[3])
    for number in range(int(sequences.max()) + 1):
        first, last, length = int(bounds[number]), int(bounds[number + 1]), int(lengths[number])
        positions, columns = torch.arange(length - (last - first), length), torch.arange(length)
        blocks = tables[int(starts[number]) + columns // block_size]
        if keys is not None and values is not None:
            places = blocks[positions], slice(None), positions % block_size
            key_blocks[places], value_blocks[places] = keys[first:last], values[first:last]
        read = blocks, slice(None), columns % block_size
        own_keys, own_values = (
            numbers[read].float().transpose(0, 1).repeat_interleave(num_heads // numbers.shape[1], 0)
            for numbers in (key_blocks, value_blocks)
        )  # [heads, length, size]
        scores = query[first:last].float().transpose(0, 1) @ own_keys.mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = positions[:, None] - columns
        scores = scores.masked_fill((distance < 0) | (distance >= (window or length)), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, last - first, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        output[first:last] = (weights @ own_values).transpose(0, 1).to(query.dtype)
    return output


LIBRARY.impl("attend", _attend_on_cpu, "CPU")


@cache
def is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the operation is right on a device, which is tried once; if not, the log says why."""
    try:
        arguments = _trial(device, dtype)
        found, expected = attend(*arguments), _attend_on_cpu(*(_on_host(each) for each in arguments))
        reason = None if agree(expected, found.cpu(), dtype) else "it is wrong"
    except Exception as error:  # no Triton, no C compiler, a device that Triton does not know
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason is None:
        return True
    logger.warning("no attention kernel on %s (%s): attention copies blocks and runs torch's, slower", device, reason)
    return False


def _trial(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of `attend`: a decoding sequence and a chunk, whose blocks are out of order."""
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 4, 64), (6, 2, 64), (6, 2, 64), (4, 2, 16, 64), (4, 2, 16, 64)
    states = [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]
    numbers = [0, 1, 1, 1, 1, NO_SEQUENCE], [0, 1, 5], [20, 19], [0, 2], [3, 0, 2, 1]
    return *states, *(torch.tensor(each).to(device) for each in numbers), None, 0.125, 0, 0.0


def _on_host(argument: Any) -> Any:
    return argument.cpu() if isinstance(argument, torch.Tensor) else argument
