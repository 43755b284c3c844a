# SPDX-License-Identifier: Apache-2.0
"""Decode attention over blocks beside torch's over rectangles, on a CPU: `python benchmarks/paged_attention.py`.

Milliseconds of one layer's attention: torch's over rectangles without padding, and our kernel's over blocks. Each goes
through as many layers as exceed the processor's caches, in turn; blocks are in random order, which is the worst. The
minimum of each counts, because machines are shared; in one thread, of its own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import click
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_triton.runner.cpu.paged_attention import kernel_for

LOADS = ((16, 256), (16, 1024), (16, 2048), (1, 1024))
"""Rows, and tokens of each."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHES_BYTES = 2**26

Layer = tuple[torch.Tensor, torch.Tensor]


def layers_of(shape: tuple[int, ...], dtype: torch.dtype) -> list[Layer]:
    """Keys and values of as many layers as exceed the caches."""
    layer_bytes = 2 * torch.Size(shape).numel() * dtype.itemsize
    return [tuple(torch.randn(2, *shape).to(dtype)) for _ in range(-(-CACHES_BYTES // layer_bytes))]


def rectangles(query: torch.Tensor, key_heads: int, tokens: int) -> list[Callable[[], object]]:
    """Calls of torch's attention over rectangles, a layer each."""
    rows, heads, size = query.shape
    layers = layers_of((rows, key_heads, tokens, size), query.dtype)
    attend = partial(scaled_dot_product_attention, enable_gqa=heads != key_heads)
    return [partial(attend, query[:, :, None], *layer) for layer in layers]


def blocks(query: torch.Tensor, key_heads: int, tokens: int, block_size: int) -> list[Callable[[], object]]:
    """Calls of the kernel over blocks, a layer each."""
    rows, heads, size = query.shape
    width = -(-tokens // block_size)
    tables = torch.randperm(rows * width).view(rows, width).to(torch.int32)
    lengths = torch.full((rows,), tokens)
    layers = layers_of((rows * width, key_heads, block_size, size), query.dtype)
    kernels = [kernel_for(heads, *layer) for layer in layers]
    return [partial(kernel, query, None, None, tables, lengths, size**-0.5) for kernel in kernels if kernel]


def fastest_ms(ways: list[list[Callable[[], object]]], repetitions: int) -> list[float]:
    """The fastest layer of each way, in milliseconds, the ways in turn."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = [float("inf")] * len(ways)
    for _ in range(repetitions):
        for index, layers in enumerate(ways):
            started = clock()
            for attend_layer in layers:
                attend_layer()
            seconds[index] = min(seconds[index], (clock() - started) / len(layers))
    return [1000 * each for each in seconds]


@click.command()
@click.option("--heads", default=8, show_default=True, help="Heads of queries.")
@click.option("--key-heads", default=4, show_default=True, help="Heads of keys and values.")
@click.option("--size", default=64, show_default=True, help="Numbers of a head.")
@click.option("--block-size", default=64, show_default=True, help="Tokens of a block.")
@click.option("--repetitions", default=30, show_default=True, help="Repetitions of each way.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
@torch.inference_mode()
def main(heads: int, key_heads: int, size: int, block_size: int, repetitions: int, threads: int) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(threads)
    print(f"{'':24}{'torch':>10}{'blocks':>10}{'ratio':>8}")
    for dtype in DTYPES:
        for rows, tokens in LOADS:
            query = torch.randn(rows, heads, size).to(dtype)
            ways = [rectangles(query, key_heads, tokens), blocks(query, key_heads, tokens, block_size)]
            torch_ms, blocks_ms = fastest_ms(ways, repetitions)
            case = f"{str(dtype).removeprefix('torch.')} {rows} x {tokens}"
            print(f"{case:24}{torch_ms:>10.3f}{blocks_ms:>10.3f}{torch_ms / blocks_ms:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
