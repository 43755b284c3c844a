# SPDX-License-Identifier: Apache-2.0
"""The attention operations by torch on a CPU, in 32 bits, sequence by sequence.

The simulated device runs them, and kernels are tested beside them. Arguments are those of `attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_triton.runner.device_step import NO_SEQUENCE

if TYPE_CHECKING:
    from hf_triton.runner.device_step import Places
    from hf_triton.runner.mask_rules import Window
    from hf_triton.runner.torch_attention import Scoring


def attend(
    query: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    places: Places,
    scoring: Scoring,
    window: int,
) -> torch.Tensor:
    if keys is not None and values is not None:
        write(keys, values, key_blocks, value_blocks, places)
    sequences, bounds, lengths, starts, tables = places
    assert lengths is not None
    assert starts is not None
    assert tables is not None
    output, block_size = query.new_zeros(*query.shape[:2], value_blocks.shape[3]), key_blocks.shape[2]
    for number in range(int(sequences.max()) + 1):
        own, length = _tokens_of(number, sequences, bounds), int(lengths[number])
        positions, columns = torch.arange(length - (own.stop - own.start), length), torch.arange(length)
        blocks = tables[int(starts[number]) + columns // block_size]
        read = blocks, slice(None), columns % block_size
        distance = positions[:, None] - columns
        seen = (distance >= 0) & (distance < (window or length))
        states = query[own], key_blocks[read], value_blocks[read]
        output[own] = _attend(*states, seen, scoring)
    return output


def write(
    keys: torch.Tensor, values: torch.Tensor, key_blocks: torch.Tensor, value_blocks: torch.Tensor, places: Places
) -> None:
    """Write the new tokens' keys and values, `[tokens, key_heads, size]`, to their blocks."""
    sequences, bounds, lengths, starts, tables = places
    assert lengths is not None
    assert starts is not None
    assert tables is not None
    tokens, block_size = (sequences != NO_SEQUENCE).nonzero().flatten(), key_blocks.shape[2]
    own = sequences[tokens]
    positions = lengths[own] - bounds[own + 1] + tokens
    written = tables[starts[own] + positions // block_size], slice(None), positions % block_size
    key_blocks[written], value_blocks[written] = keys[tokens], values[tokens]


def attend_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: Places,
    scoring: Scoring,
    window: Window,
) -> torch.Tensor:
    sequences, bounds = places[:2]
    output = query.new_zeros(*query.shape[:2], values.shape[2])
    for number in range(int(sequences.max()) + 1):
        own = _tokens_of(number, sequences, bounds)
        positions = torch.arange(own.stop - own.start)
        distance = positions[:, None] - positions
        seen = distance.abs() < (window.size or len(positions))
        if window.is_causal:
            seen &= distance >= 0
        output[own] = _attend(query[own], keys[own], values[own], seen, scoring)
    return output


def _tokens_of(number: int, sequences: torch.Tensor, bounds: torch.Tensor) -> slice:
    """The tokens of a sequence; raises ValueError if `sequences` and `bounds` contradict each other."""
    own = slice(int(bounds[number]), int(bounds[number + 1]))
    if (sequences == number).nonzero().flatten().tolist() != list(range(own.start, own.stop)):
        raise ValueError(f"other tokens than those from {own.start} to {own.stop} are of sequence {number}")
    return own


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention of one sequence, whose tokens see the keys that `seen`, `[tokens, keys]` bool, says."""
    scale, softcap, sinks = scoring
    (num_tokens, num_heads, _), num_keys = query.shape, len(keys)
    own_keys, own_values = (
        states.float().transpose(0, 1).repeat_interleave(num_heads // states.shape[1], 0) for states in (keys, values)
    )  # [heads, keys, size]
    scores = query.float().transpose(0, 1) @ own_keys.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, num_tokens, 1)], -1)
    weights = scores.softmax(-1)[..., :num_keys]
    return (weights @ own_values).transpose(0, 1).to(query.dtype)
