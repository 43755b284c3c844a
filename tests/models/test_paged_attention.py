# SPDX-License-Identifier: Apache-2.0
"""Decode attention over blocks by a kernel: it equals torch's in float64, or there is none."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_triton.runner.cpu import paged_attention
from hf_triton.runner.cpu.paged_attention import attend_decode, kernel_for, write_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernel for small heads too, with all threads."""
    monkeypatch.setattr(paged_attention, "MIN_WIDTH", 0)
    monkeypatch.setattr(paged_attention, "MIN_PARALLEL_PRODUCTS", 0)


class Rows:
    """Rows of random numbers, their tokens in blocks of a pool in random order; what nobody wrote is nan."""

    def __init__(
        self,
        lengths: list[int],
        heads: int = 4,
        key_heads: int = 2,
        size: int = 16,
        value_size: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        source = torch.Generator().manual_seed(sum(lengths) + heads)
        width = -(-max(lengths) // block_size)
        num_blocks = len(lengths) * width + 1
        self.lengths = torch.tensor(lengths)
        self.query = torch.randn(len(lengths), heads, size, generator=source).to(dtype)
        self.tokens = [
            tuple(torch.randn(length, key_heads, wide, generator=source).to(dtype) for wide in (size, value_size))
            for length in lengths
        ]
        self.key_blocks = torch.full((num_blocks, key_heads, block_size, size), torch.nan, dtype=dtype)
        self.value_blocks = torch.full((num_blocks, key_heads, block_size, value_size), torch.nan, dtype=dtype)
        order = torch.randperm(num_blocks - 1, generator=source) + 1
        self.tables = order.view(len(lengths), width).to(torch.int32)
        for row, (keys, values) in enumerate(self.tokens):
            positions = torch.arange(len(keys))
            slots = self.tables[row].long()[positions // block_size] * block_size + positions % block_size
            write_tokens(self.key_blocks, self.value_blocks, keys, values, slots)
            self.tables[row, -(-len(keys) // block_size) :] = 0

    def attend(self, scale: float = 0.25, window: int = 0) -> torch.Tensor | None:
        return attend_decode(self.query, self.key_blocks, self.value_blocks, self.tables, self.lengths, scale, window)

    def exact(self, scale: float = 0.25, window: int = 0) -> torch.Tensor:
        rows = []
        for query, (keys, values) in zip(self.query, self.tokens, strict=True):
            shown = (tensor[-window:].transpose(0, 1).double() for tensor in (keys, values))
            rows.append(scaled_dot_product_attention(query[:, None].double(), *shown, scale=scale, enable_gqa=True))
        return torch.stack(rows).squeeze(2).to(self.query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "value_size"), [(4, 4, 16, 16), (6, 2, 80, 24), (71, 1, 64, 64), (2, 1, 128, 128)]
)
@torch.inference_mode()
def test_rows_attend_to_their_own_tokens(
    heads: int, key_heads: int, size: int, value_size: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 2 * block_size + 5]
    rows = Rows(lengths, heads, key_heads, size, value_size, block_size, dtype)
    torch.testing.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 1000])
@torch.inference_mode()
def test_a_window_shows_the_last_tokens(window: int) -> None:
    rows = Rows([1, 15, 16, 17, 70])
    torch.testing.assert_close(rows.attend(window=window), rows.exact(window=window))


@torch.inference_mode()
def test_a_kernel_writes_the_newest_token() -> None:
    rows = Rows([1, 15, 16, 17, 70])
    wanted, blocks = rows.exact(), (rows.key_blocks.clone(), rows.value_blocks.clone())
    kernel = kernel_for(4, rows.key_blocks, rows.value_blocks)
    assert kernel is not None
    for row, length in enumerate(rows.lengths.tolist()):
        block = rows.tables[row, (length - 1) // 16]
        rows.key_blocks[block, :, (length - 1) % 16] = rows.value_blocks[block, :, (length - 1) % 16] = torch.nan
    keys, values = (torch.stack([tokens[kind][-1] for tokens in rows.tokens]) for kind in (0, 1))
    torch.testing.assert_close(kernel(rows.query, keys, values, rows.tables, rows.lengths, 0.25), wanted)
    for found, expected in zip((rows.key_blocks, rows.value_blocks), blocks, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
