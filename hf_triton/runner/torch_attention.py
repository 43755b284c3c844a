# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's tokens by torch: sequence by sequence, or once for all sequences of one length."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_triton.runner.kv_blocks import KVBlocks
from hf_triton.runner.mask_rules import Rule, Window
from hf_triton.runner.packed_row import PackedRow
from hf_triton.runner.step_tensors import StepTensors

PART_TOKENS: Final = 256
"""Tokens of a whole sequence that attend together where a window bounds how far."""


class Scoring(NamedTuple):
    """What a layer's scores are made of, beside queries and keys."""

    scale: float
    """Factor of the products."""
    softcap: float | None
    """Scores are limited to it by tanh (Gemma 2)."""
    sinks: torch.Tensor | None
    """`[heads]`: a score of each head that takes part in the softmax alone (gpt-oss)."""


def attend_ranges(
    step: StepTensors,
    first: int,
    blocks: KVBlocks,
    new: tuple[torch.Tensor, torch.Tensor],
    queries: torch.Tensor,
    rule: Rule,
    scoring: Scoring,
) -> list[torch.Tensor]:
    """The outputs of each range from `first` on, `[new, heads, size]`; the blocks have all tokens already.

    New keys and values are `[tokens, key heads, size]`, queries `[tokens, heads, size]`.
    """
    tables, size = step.on(queries.device, "tables"), rule.window.size if rule.window else 0
    outputs = []
    for number in range(first, len(step.ranges)):
        part, own = step.ranges[number], slice(step.bounds[number], step.bounds[number + 1])
        low = max(0, part.start + 1 - size) // step.block_size * step.block_size if size else 0
        if part.start:
            keys, values = blocks.read(tables[number], part.end, low)
        else:
            keys, values = (states[own].transpose(0, 1) for states in new)
        outputs.append(_attend_one(step, number, queries[own], keys, values, rule, low, scoring))
    return outputs


def attend_gathered(
    step: StepTensors, queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, scoring: Scoring
) -> torch.Tensor:
    """The same with the keys and values of all tokens of the step's sequences, `[1, key heads, tokens, size]`."""
    outputs, offset = [], 0
    for number, end in enumerate(step.ends):
        own = queries[step.bounds[number] : step.bounds[number + 1]]
        keys, values = (states[0, :, offset : offset + end] for states in (key, value))
        outputs.append(_attend_one(step, number, own, keys, values, rule, 0, scoring))
        offset += end
    return torch.cat(outputs)


def _attend_one(
    step: StepTensors,
    number: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: Rule,
    low: int,
    scoring: Scoring,
) -> torch.Tensor:
    """One range, `[new, heads, size]`, by its sequence's tokens from `low` on, `[key heads, tokens, size]`."""
    part, own = step.ranges[number], queries.transpose(0, 1)[None]
    places = range(part.start, part.end), range(low, part.end)
    output = _attend(step, own, keys[None], values[None], rule, *places, scoring)
    return output[0].transpose(0, 1)


def attend_row(
    row: PackedRow, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, scoring: Scoring
) -> torch.Tensor:
    """Whole sequences, `[1, heads, tokens, size]`, once for those of each length: `[tokens, heads, value_size]`."""
    outputs = []
    for start, count, length in row.groups:
        queries, keys, values = (
            states[0, :, start : start + count * length].view(states.shape[1], count, length, -1).transpose(0, 1)
            for states in (query, key, value)
        )
        parts = []
        for new, seen in window_parts(length, rule.window):
            own, at = queries[:, :, new.start : new.stop], slice(seen.start, seen.stop)
            output = _attend(row.step, own, keys[:, :, at], values[:, :, at], rule, new, seen, scoring)
            parts.append(output.transpose(1, 2))
        outputs.append((torch.cat(parts, 1) if len(parts) > 1 else parts[0]).flatten(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def window_parts(length: int, window: Window | None) -> list[tuple[range, range]]:
    """Parts of a sequence and the tokens within their windows: far less than all tokens of a long sequence."""
    if window is None or not 0 < window.size < length:
        return [(range(length), range(length))]
    parts = []
    for start in range(0, length, PART_TOKENS):
        end = min(start + PART_TOKENS, length)
        last = end if window.is_causal else min(length, end + window.size - 1)
        parts.append((range(start, end), range(max(0, start - window.size + 1), last)))
    return parts


def _attend(
    step: StepTensors,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: Rule,
    positions: range,
    columns: range,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention of tokens at `positions` of sequences to those at `columns`, in the model's own type.

    Queries and the result are `[sequences, heads, positions, size]`; heads that share keys are adjacent. Keys and
    values are `[sequences, key heads, columns, size]`.
    """
    scale, softcap, sinks = scoring
    heads, key_heads = queries.shape[1], keys.shape[1]
    is_plain = softcap is None and sinks is None
    is_causal = is_plain and positions == columns and len(positions) > 1 and _is_causal(rule.window, len(positions))
    mask = None if is_causal else rule.visible(positions, columns, queries.device, step.masks)
    if is_plain:
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": heads != key_heads}
        return scaled_dot_product_attention(queries, keys, values, mask, **options)
    grouped = queries.view(len(queries), key_heads, heads // key_heads, *queries.shape[2:])
    scores = grouped @ keys.unsqueeze(2).mT * scale  # [sequences, key heads, group, positions, columns]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32).to(queries.dtype)
    else:
        column = sinks.to(scores.dtype).view(key_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
        weights = (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
    output: torch.Tensor = weights @ values.unsqueeze(2)
    return output.flatten(1, 2)


def _is_causal(window: Window | None, length: int) -> bool:
    """Whether each of a sequence's tokens sees itself and all before."""
    return window is not None and window.is_causal and not 0 < window.size < length
