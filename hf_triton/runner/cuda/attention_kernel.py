# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's language: attention of a packed row of tokens to keys in blocks, or in the row itself.

A key head's rows are its query heads of every token of a sequence, one token behind the other. A tile is so many of
them, whatever the heads of a token are, and one program computes it: the grid is (tiles, key heads, splits). How many
tiles there can be depends on the numbers of tokens and of sequences alone, so it depends on nothing that only the
device knows; a program finds its sequence by the sequences' bounds, and one without rows returns at once.

A tile goes through the keys that its tokens attend to, `num_keys` at a time, while maximum and total of the softmax
move on (https://arxiv.org/abs/1805.02867), to the base 2. Keys that all its rows see are read without a mask.

Few tokens are few programs, so the keys are split among several. How many there are depends on the number of tokens;
how many of them a tile uses, on its keys. `combine` puts together what they found.

Tensors are those of `hf_triton.runner.cuda.attention.attend`. Keys and values are `[blocks, key_heads, block_size,
size]` with any strides; those of a row are one block of all its tokens, and `block_size` is None. Behind the sequences
of the row is its padding, which is zeros.
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
LOG2_E: Final = tl.constexpr(1.4426950408889634)
PLACES: Final = ["sequences", "bounds", "lengths", "starts", "tables"]
"""Views of a step's numbers, whose alignment is another one at each step: kernels for each would be compiled while
sequences wait."""
NUMBERS: Final = ["num_tokens", "num_sequences", "num_splits", "min_new", "max_new"]
"""Every step has others."""


@triton.jit
def _find_sequence(tile, bounds, num_sequences, group: tl.constexpr, num_rows: tl.constexpr):
    """The sequence of a tile, `num_sequences` for padding: the tiles of sequence `i` begin at `_first_tile` of it."""
    low, high = 0, num_sequences + 1
    while low < high:
        middle = (low + high) // 2
        if _first_tile(middle, tl.load(bounds + middle).to(tl.int32), group, num_rows) <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _first_tile(sequence, begin, group: tl.constexpr, num_rows: tl.constexpr):
    """So many that those of the sequences before, which may end within a tile each, have room."""
    return begin * group // num_rows + sequence


@triton.jit
def _read_sequence(sequence, bounds, lengths):
    """A sequence's tokens `[begin:end]` of the row, and how many it has with those before; int32."""
    begin, end = tl.load(bounds + sequence).to(tl.int32), tl.load(bounds + sequence + 1).to(tl.int32)
    length = end - begin if lengths is None else tl.load(lengths + sequence).to(tl.int32)
    return begin, end, length


@triton.jit
def _keys_of_tile(first, last, length, window, has_window: tl.constexpr, is_causal: tl.constexpr, num_splits):
    """The keys `[low:high]` that tokens at the positions `first` to `last` see, and how many of them a split has."""
    low, high = 0, length
    if has_window:
        low = tl.maximum(first - window + 1, 0)
    if is_causal:
        high = tl.minimum(last + 1, length)
    elif has_window:
        high = tl.minimum(last + window, length)
    per_split = tl.maximum(tl.cdiv(high - low, num_splits * SPLIT_STEP) * SPLIT_STEP, MIN_SPLIT_KEYS)
    return low, high, per_split


@triton.jit
def _attend_to_keys(
    found,
    queries,
    position,
    start,
    stop,
    key_head,
    begin,
    table,
    key_blocks,
    value_blocks,
    key_strides,
    value_strides,
    scale,
    softcap,
    window,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
    is_causal: tl.constexpr,
    block_size: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    value_size: tl.constexpr,
    padded_value_size: tl.constexpr,
    num_keys: tl.constexpr,
):
    """Maximum, total and sums, `found` so far, with the keys `[start:stop]`; not masked, all rows see all of them.

    A function of its own, as the compiler overlaps the loads of the turns of each loop.
    """
    maximum, total, sums = found
    dim, value_dim = tl.arange(0, padded_size), tl.arange(0, padded_value_size)
    has_number, has_value = (dim < size)[:, None], (value_dim < value_size)[None]
    for column in range(start, stop, num_keys):
        columns = column + tl.arange(0, num_keys)
        exists = columns < stop
        if block_size is None:
            block, inside = 0, (begin + columns).to(tl.int64)
        elif is_masked:
            block, inside = tl.load(table + columns // block_size, mask=exists, other=0), columns % block_size
        else:
            block, inside = tl.load(table + columns // block_size), columns % block_size
        key_mask, value_mask = has_number, has_value
        if is_masked:
            key_mask, value_mask = exists[None] & has_number, exists[:, None] & has_value
        key_at = key_blocks + block * key_strides[0] + key_head * key_strides[1] + inside * key_strides[2]
        keys = tl.load(key_at[None] + (dim * key_strides[3])[:, None], mask=key_mask, other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee")
        if softcap is None:
            scores *= scale * LOG2_E
        else:  # softcap * tanh(scores / softcap)
            scores = softcap * LOG2_E * (2 * tl.sigmoid(2 * scale * scores / softcap) - 1)
        if is_masked:
            seen, distance = exists[None], position[:, None] - columns
            if is_causal:
                seen = seen & (distance >= 0)
            if has_window:
                seen = seen & (distance < window) & (distance > -window)
            scores = tl.where(seen, scores, NO_SCORE)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        if is_masked:  # of rows that have seen nothing yet
            weights = tl.where(seen, weights, 0.0)
        fade = tl.exp2(maximum - new_maximum)
        total = total * fade + tl.sum(weights, 1)
        value_at = value_blocks + block * value_strides[0] + key_head * value_strides[1] + inside * value_strides[2]
        values = tl.load(value_at[:, None] + value_dim * value_strides[3], mask=value_mask, other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, sums


@triton.jit(do_not_specialize_on_alignment=PLACES, do_not_specialize=NUMBERS)
def attend(
    query,
    key_blocks,
    value_blocks,
    output,
    parts,
    logarithms,
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
    num_tokens,
    num_sequences,
    min_new,
    max_new,
    has_window: tl.constexpr,
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
    """Attention of one tile to one split of its keys, if its sequence has `min_new` to `max_new` tokens in the row.

    It goes to `output`; if the tile has several splits, to `parts`, `[tokens, heads, splits, value_size]` float32, with
    the binary logarithms of the softmax's totals, `[tokens, heads, splits]`. `group` is the query heads of a key head.
    Padded sizes are powers of two, as all sizes inside a program are.
    """
    tile, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = _find_sequence(tile, bounds, num_sequences, group, num_rows)
    is_padding = sequence == num_sequences
    if is_padding:
        begin = tl.load(bounds + sequence).to(tl.int32)
        end, length = num_tokens, 0
    else:
        begin, end, length = _read_sequence(sequence, bounds, lengths)
    first_row = (tile - _first_tile(sequence, begin, group, num_rows)) * num_rows
    num_new = end - begin
    if (first_row >= num_new * group) | (num_new < min_new) | (num_new > max_new):
        return
    row, dim, value_dim = tl.arange(0, num_rows), tl.arange(0, padded_size), tl.arange(0, padded_value_size)
    token, head = begin + (first_row + row) // group, key_head * group + (first_row + row) % group
    is_row = token < end
    place = token.to(tl.int64) * num_heads + head
    output_at = output + place[:, None] * value_size + value_dim
    mask = is_row[:, None] & (value_dim < value_size)[None]
    if is_padding:
        tl.store(output_at, tl.zeros([num_rows, padded_value_size], output.dtype.element_ty), mask=mask)
        return
    position = length - end + token
    first = length - num_new + first_row // group
    last = tl.minimum(length - num_new + (first_row + num_rows - 1) // group, length - 1)
    low, high, per_split = _keys_of_tile(first, last, length, window, has_window, is_causal, tl.num_programs(2))
    start, stop = low + split * per_split, tl.minimum(low + (split + 1) * per_split, high)
    if start >= stop:
        return
    query_at = query + (token.to(tl.int64) * query_strides[0] + head * query_strides[1])[:, None]
    queries = tl.load(query_at + dim * query_strides[2], mask=is_row[:, None] & (dim < size)[None], other=0.0)
    maximum = tl.full([num_rows], NO_SCORE, tl.float32)
    total = tl.zeros([num_rows], tl.float32)
    sums = tl.zeros([num_rows, padded_value_size], tl.float32)
    if sinks is not None and split == 0:
        maximum = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    table = tables
    if block_size is not None:
        table += tl.load(starts + sequence)
    found = maximum, total, sums
    if not has_window:
        seen_by_all = tl.minimum(first + 1, stop) if is_causal else stop
        between = start + tl.maximum(seen_by_all - start, 0) // num_keys * num_keys
        found = _attend_to_keys(
            found, queries, position, start, between, key_head, begin, table, key_blocks, value_blocks, key_strides,
            value_strides, scale, softcap, window, False, has_window, is_causal, block_size, size, padded_size,
            value_size, padded_value_size, num_keys,
        )  # fmt: skip
        start = between
    maximum, total, sums = _attend_to_keys(
        found, queries, position, start, stop, key_head, begin, table, key_blocks, value_blocks, key_strides,
        value_strides, scale, softcap, window, True, has_window, is_causal, block_size, size, padded_size, value_size,
        padded_value_size, num_keys,
    )  # fmt: skip
    sums /= tl.where(total > 0, total, 1.0)[:, None]  # a token may see none of a split's keys
    if parts is not None and high - low > per_split:
        part = place * tl.num_programs(2) + split
        tl.store(parts + part[:, None] * value_size + value_dim, sums, mask=mask)
        tl.store(logarithms + part, maximum + tl.log2(total), mask=is_row)
        return
    tl.store(output_at, sums.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=PLACES, do_not_specialize=NUMBERS)
def combine(
    output,
    parts,
    logarithms,
    sequences,
    bounds,
    lengths,
    window,
    num_splits,
    min_new,
    max_new,
    has_window: tl.constexpr,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    value_size: tl.constexpr,
    padded_value_size: tl.constexpr,
    num_rows: tl.constexpr,
    max_splits: tl.constexpr,
):
    """The output of one token's head from the parts of its splits, if they are several; `num_rows` are a tile's."""
    token, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + token)
    if sequence < 0:
        return
    begin, end, length = _read_sequence(sequence, bounds, lengths)
    num_new = end - begin
    if (num_new < min_new) | (num_new > max_new):
        return
    first_row = ((token - begin) * group + head % group) // num_rows * num_rows
    first = length - num_new + first_row // group
    last = tl.minimum(length - num_new + (first_row + num_rows - 1) // group, length - 1)
    low, high, per_split = _keys_of_tile(first, last, length, window, has_window, True, num_splits)
    if high - low <= per_split:
        return
    split, dim = tl.arange(0, max_splits), tl.arange(0, padded_value_size)
    is_used, has_value = split * per_split < high - low, dim < value_size
    place = token.to(tl.int64) * num_heads + head
    part = place * num_splits + split
    found = tl.load(logarithms + part, mask=is_used, other=NO_SCORE)
    weights = tl.where(is_used, tl.exp2(found - tl.max(found, 0)), 0.0)
    values = tl.load(parts + part[:, None] * value_size + dim, mask=is_used[:, None] & has_value, other=0.0)
    combined = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(output + place * value_size + dim, combined.to(output.dtype.element_ty), mask=has_value)


@triton.jit
def find_place(token, head, num_heads, sequence, bounds, lengths, starts, tables, block_size: tl.constexpr):
    """Count the heads in the blocks, which are contiguous, before that of a token of a sequence."""
    _, end, length = _read_sequence(sequence, bounds, lengths)
    position = length - end + token
    block = tl.load(tables + tl.load(starts + sequence) + position // block_size)
    return (block * num_heads + head) * block_size + position % block_size


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
    place = find_place(token, head, tl.num_programs(1), sequence, bounds, lengths, starts, tables, block_size)
    dim, row = tl.arange(0, padded_size), token.to(tl.int64)
    key = tl.load(keys + row * key_strides[0] + head * key_strides[1] + dim * key_strides[2], mask=dim < size)
    tl.store(key_blocks + place * size + dim, key, mask=dim < size)
    value = tl.load(
        values + row * value_strides[0] + head * value_strides[1] + dim * value_strides[2], mask=dim < value_size
    )
    tl.store(value_blocks + place * value_size + dim, value, mask=dim < value_size)
