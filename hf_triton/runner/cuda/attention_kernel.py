# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's language: attention of a packed row of tokens to keys in blocks, or in the row itself.

The grid is (tokens, key heads, splits), so it depends on nothing that only the device knows. A program works if its
token is the first of a tile, else it returns at once. A tile is some tokens of a sequence with all query heads of a key
head, one row of the matrix product each. It goes through the keys that its tokens attend to, `num_keys` at a time,
while maximum and total of the softmax move on (https://arxiv.org/abs/1805.02867).

Few tokens are few programs, so the keys are split among several. How many there are depends on the number of tokens;
how many of them a tile uses, on its keys. `combine` puts together what they found.

Arguments are those of `hf_triton.runner.cuda.attention.attend`. Keys and values are `[blocks, key_heads, block_size,
size]` with any strides; those of a row are one block of all its tokens, and `block_size` is None.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

MIN_SPLIT_KEYS: Final = tl.constexpr(128)
"""Keys of a split, before another one takes part."""
SPLIT_STEP: Final = tl.constexpr(64)
"""Its keys are a multiple."""
NO_SCORE: Final = tl.constexpr(-3e38)
"""The maximum of no scores, below all that are finite; the difference of two infinite ones would be no number."""
PLACES: Final = ["sequences", "bounds", "lengths", "starts", "tables"]
"""Views of a step's numbers, whose alignment is another one at each step: kernels for each would be compiled while
sequences wait."""


@triton.jit
def _read_sequence(sequence, bounds, lengths):
    """A sequence's tokens `[begin:end]` of the row, and how many it has with those before; int32."""
    begin, end = tl.load(bounds + sequence).to(tl.int32), tl.load(bounds + sequence + 1).to(tl.int32)
    length = end - begin if lengths is None else tl.load(lengths + sequence).to(tl.int32)
    return begin, end, length


@triton.jit
def _keys_of_tile(position, length, window, num_tokens: tl.constexpr, is_causal: tl.constexpr, num_splits):
    """The keys `[low:high]` of a tile whose first token is at `position`, and how many of them a split has."""
    ahead = 0 if is_causal else window - 1
    low = tl.maximum(position - window + 1, 0)
    high = tl.minimum(position + num_tokens + ahead, length)
    per_split = tl.maximum(tl.cdiv(high - low, num_splits * SPLIT_STEP) * SPLIT_STEP, MIN_SPLIT_KEYS)
    return low, high, per_split


@triton.jit(do_not_specialize_on_alignment=PLACES)
def attend(
    query,
    key_blocks,
    value_blocks,
    output,
    parts,
    logarithms,
    sequences,
    bounds,
    lengths,
    starts,
    tables,
    sinks,
    query_strides,
    key_strides,
    value_strides,
    scale,
    softcap,
    window,
    is_causal: tl.constexpr,
    block_size: tl.constexpr,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    value_size: tl.constexpr,
    padded_value_size: tl.constexpr,
    num_rows: tl.constexpr,
    num_keys: tl.constexpr,
):
    """Attention of one tile to one split of its keys.

    It goes to `output`; if the tile has several splits, to `parts`, `[tokens, heads, splits, value_size]` float32, with
    the logarithms of the softmax's totals, `[tokens, heads, splits]`. `group` is the query heads of a key head. Padded
    sizes are powers of two, as all sizes inside a program are.
    """
    first, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tokens: tl.constexpr = num_rows // group
    row, dim, value_dim = tl.arange(0, num_rows), tl.arange(0, padded_size), tl.arange(0, padded_value_size)
    token, head = first + row // group, key_head * group + row % group
    place = token.to(tl.int64) * num_heads + head
    output_at = output + place[:, None] * value_size + value_dim
    has_value = (value_dim < value_size)[None]
    sequence = tl.load(sequences + first)
    if sequence < 0:
        padding = tl.zeros([num_rows, padded_value_size], output.dtype.element_ty)
        tl.store(output_at, padding, mask=(row < group)[:, None] & has_value)
        return
    begin, end, length = _read_sequence(sequence, bounds, lengths)
    if (first - begin) % num_tokens != 0:
        return
    position = length - end + token
    low, high, per_split = _keys_of_tile(
        length - end + first, length, window, num_tokens, is_causal, tl.num_programs(2)
    )
    start, stop = low + split * per_split, tl.minimum(low + (split + 1) * per_split, high)
    if start >= stop:
        return

    is_row = (row < num_tokens * group) & (token < end)  # a group need not divide the rows: the rest is the next tile's
    query_at = query + (token.to(tl.int64) * query_strides[0] + head * query_strides[1])[:, None]
    has_number = dim < size
    queries = tl.load(query_at + dim * query_strides[2], mask=is_row[:, None] & has_number, other=0.0)
    maximum = tl.full([num_rows], NO_SCORE, tl.float32)
    total = tl.zeros([num_rows], tl.float32)
    sums = tl.zeros([num_rows, padded_value_size], tl.float32)
    if sinks is not None and split == 0:
        maximum = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        total += 1.0
    table = 0 if starts is None else tl.load(starts + sequence)
    ahead = 0 if is_causal else window - 1

    for column in range(start, stop, num_keys):
        columns = column + tl.arange(0, num_keys)
        exists = columns < stop
        if block_size is None:
            block, inside = 0, (begin + columns).to(tl.int64)
        else:
            block, inside = tl.load(tables + table + columns // block_size, mask=exists, other=0), columns % block_size
        key_at = key_blocks + block * key_strides[0] + key_head * key_strides[1] + inside * key_strides[2]
        keys = tl.load(
            key_at[None] + (dim * key_strides[3])[:, None], mask=exists[None] & has_number[:, None], other=0.0
        )
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if softcap is not None:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # softcap * tanh(scores / softcap)
        distance = position[:, None] - columns
        seen = exists & (distance < window) & (distance >= -ahead)
        scores = tl.where(seen, scores, NO_SCORE)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - new_maximum[:, None]), 0.0)
        fade = tl.exp(maximum - new_maximum)
        total = total * fade + tl.sum(weights, 1)
        value_at = value_blocks + block * value_strides[0] + key_head * value_strides[1] + inside * value_strides[2]
        values = tl.load(value_at[:, None] + value_dim * value_strides[3], mask=exists[:, None] & has_value, other=0.0)
        sums = sums * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        maximum = new_maximum

    sums /= tl.where(total > 0, total, 1.0)[:, None]  # a token may see none of a split's keys
    mask = is_row[:, None] & has_value
    if parts is not None and high - low > per_split:
        part = place * tl.num_programs(2) + split
        tl.store(parts + part[:, None] * value_size + value_dim, sums, mask=mask)
        tl.store(logarithms + part, maximum + tl.log(total), mask=is_row)
        return
    tl.store(output_at, sums.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=PLACES, do_not_specialize=["num_splits"])
def combine(
    output,
    parts,
    logarithms,
    sequences,
    bounds,
    lengths,
    window,
    num_splits,
    num_heads: tl.constexpr,
    value_size: tl.constexpr,
    padded_value_size: tl.constexpr,
    num_tokens: tl.constexpr,
    max_splits: tl.constexpr,
):
    """The output of one token's head from the parts of its splits, if they are several; `num_tokens` are a tile's."""
    token, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + token)
    if sequence < 0:
        return
    begin, end, length = _read_sequence(sequence, bounds, lengths)
    first = token - (token - begin) % num_tokens
    low, high, per_split = _keys_of_tile(length - end + first, length, window, num_tokens, True, num_splits)
    if high - low <= per_split:
        return
    split, dim = tl.arange(0, max_splits), tl.arange(0, padded_value_size)
    is_used, has_value = split * per_split < high - low, dim < value_size
    place = token.to(tl.int64) * num_heads + head
    part = place * num_splits + split
    found = tl.load(logarithms + part, mask=is_used, other=NO_SCORE)
    weights = tl.where(is_used, tl.exp(found - tl.max(found, 0)), 0.0)
    values = tl.load(parts + part[:, None] * value_size + dim, mask=is_used[:, None] & has_value, other=0.0)
    combined = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(output + place * value_size + dim, combined.to(output.dtype.element_ty), mask=has_value)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def write(
    keys,
    values,
    key_blocks,
    value_blocks,
    sequences,
    bounds,
    lengths,
    starts,
    tables,
    key_strides,
    value_strides,
    block_size: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    padded_size: tl.constexpr,
):
    """One token's key and value of one head to their blocks, which are contiguous."""
    token, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + token)
    if sequence < 0:
        return
    _, end, length = _read_sequence(sequence, bounds, lengths)
    position = length - end + token
    block = tl.load(tables + tl.load(starts + sequence) + position // block_size)
    place = (block * tl.num_programs(1) + head) * block_size + position % block_size
    dim, row = tl.arange(0, padded_size), token.to(tl.int64)
    key = tl.load(keys + row * key_strides[0] + head * key_strides[1] + dim * key_strides[2], mask=dim < size)
    tl.store(key_blocks + place * size + dim, key, mask=dim < size)
    value = tl.load(
        values + row * value_strides[0] + head * value_strides[1] + dim * value_strides[2], mask=dim < value_size
    )
    tl.store(value_blocks + place * value_size + dim, value, mask=dim < value_size)
