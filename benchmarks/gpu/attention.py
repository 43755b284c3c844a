# SPDX-License-Identifier: Apache-2.0
"""The operation `hf_triton::attend` alone: its error and its time, beside torch's attention and a copy's bandwidth.

    python benchmarks/gpu/attention.py --out FOLDER

A load is sequences x cached tokens + new tokens of each. The error is the largest difference from the operation's CPU
implementation in float32, of some tokens of some sequences. `rows_us` is torch's attention to keys and values in padded
rectangles with a mask, `sdpa_us` the same without one; both are given rectangles that are there already. Rows with a
name are of other splits and tiles than the kernel chooses.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from figures import Figures, copy_bytes_per_s, median_s, read_options

from hf_triton.runner.cuda.attention import attend
from hf_triton.runner.device_step import Places
from hf_triton.runner.torch_attention import Scoring

SHAPES = {
    "llama-3-8b": (32, 8, 128),
    "qwen3-0.6b": (16, 8, 128),
    "falcon-7b": (71, 1, 64),
    "32 heads": (32, 32, 128),
    "gemma": (8, 4, 256),
}
"""Heads, heads of keys, numbers of a head."""
DECODES = ((1, 512), (1, 8192), (16, 1024), (64, 1024), (256, 512))
LOADS = (*((*each, 1) for each in DECODES), (1, 0, 2048), (1, 6144, 2048), (8, 1024, 64))
SMALL_SHAPES, SMALL_LOADS = {"small": (6, 2, 16)}, ((2, 20, 1), (1, 5, 6))
BLOCK_SIZE = 16
MAX_CHECKED = 4, 64
"""Sequences and new tokens of each that are compared."""

SWEPT = ((1, 512, 1), (64, 1024, 1), (1, 0, 2048))
"""Loads of the first shape; the last one is a prompt."""
SPLITS = (1, 2, 4, 8, 16, 32)
TILES = ((16, 32, 4), (16, 64, 4), (64, 32, 4), (64, 64, 4), (128, 64, 8))
"""Rows, keys at a time, and warps."""

Case = dict[str, Any]
"""The arguments of `attend`."""


def build_case(shape: tuple[int, int, int], load: tuple[int, int, int], device: torch.device) -> Case:
    """Blocks in a random order, as after hours of serving."""
    (num_heads, num_key_heads, size), (num_sequences, cached, new) = shape, load
    num_blocks = -(-(cached + new) // BLOCK_SIZE)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device=device)

    sequences = torch.arange(num_sequences)
    numbers = (
        sequences.repeat_interleave(new),
        torch.arange(num_sequences + 1) * new,
        torch.full((num_sequences,), cached + new),
        sequences * num_blocks,
        torch.randperm(num_sequences * num_blocks),
    )
    return {
        "query": randn(num_sequences * new, num_heads, size),
        "keys": randn(num_sequences * new, num_key_heads, size),
        "values": randn(num_sequences * new, num_key_heads, size),
        "key_blocks": randn(num_sequences * num_blocks, num_key_heads, BLOCK_SIZE, size),
        "value_blocks": randn(num_sequences * num_blocks, num_key_heads, BLOCK_SIZE, size),
        "places": Places(*(each.to(device) for each in numbers)),
        "scoring": Scoring(size**-0.5, None, None),
        "window": 0,
    }


def largest_error(case: Case, output: torch.Tensor, load: tuple[int, int, int]) -> float:
    """The difference from float32 of the first sequences' last tokens, whose keys and values are in their blocks."""
    num_sequences, num_new = min(MAX_CHECKED[0], load[0]), min(MAX_CHECKED[1], load[2])
    ends = torch.arange(1, num_sequences + 1) * load[2]
    rows = (ends[:, None] - num_new + torch.arange(num_new)).flatten().to(output.device)
    places: Places = case["places"]
    assert places.lengths is not None
    assert places.tables is not None
    tables = places.tables[: num_sequences * -(-(load[1] + load[2]) // BLOCK_SIZE)]
    sequences, each = torch.arange(num_sequences), len(tables) // num_sequences
    numbers = sequences.repeat_interleave(num_new), torch.arange(num_sequences + 1) * num_new
    lengths = places.lengths[:num_sequences].cpu()
    expected = attend(
        case["query"][rows].float().cpu(),
        None,
        None,
        case["key_blocks"][tables].float().cpu(),
        case["value_blocks"][tables].float().cpu(),
        Places(*numbers, lengths, sequences * each, torch.arange(len(tables))),
        case["scoring"],
        case["window"],
    )
    return float((output[rows].float().cpu() - expected).abs().max())


def torch_ways(case: Case, load: tuple[int, int, int]) -> dict[str, Callable[[], torch.Tensor]]:
    """The same by torch's attention to rectangles."""
    num_sequences, cached, new = load
    query = case["query"].unflatten(0, (num_sequences, new)).transpose(1, 2)
    tables = case["places"].tables.view(num_sequences, -1)
    keys, values = (
        case[name][tables].transpose(1, 2).flatten(2, 3)[:, :, : cached + new].contiguous()
        for name in ("key_blocks", "value_blocks")
    )  # [sequences, heads, tokens, size]
    mask = torch.ones(num_sequences, 1, new, cached + new, dtype=torch.bool, device=query.device).tril(cached)
    sdpa, is_causal = torch.nn.functional.scaled_dot_product_attention, new > 1 and cached == 0
    ways = {"rows_us": lambda: sdpa(query, keys, values, mask, enable_gqa=True)}
    if new == 1 or is_causal:
        ways["sdpa_us"] = lambda: sdpa(query, keys, values, is_causal=is_causal, enable_gqa=True)
    return ways


def sweep(figures: Figures, shape: tuple[int, int, int], device: torch.device) -> None:
    """Times of other splits and tiles."""
    if device.type != "cuda":
        figures.add(name="sweep", skipped="splits and tiles are those of a CUDA device")
        return
    from hf_triton.runner.cuda import attention_launch as launch

    for load, (tile, stages) in itertools.product(SWEPT, itertools.product(TILES, launch.STAGES)):
        if (tile[0] > 32) == (load[2] == 1):  # small tiles are for decoding, large ones for prompts
            continue
        names = {"model": "sweep", "load": f"{load[0]} x {load[1]} + {load[2]}", "name": f"tile {tile} stages {stages}"}
        kind = launch.Kind(0, launch.ANY_NUMBER, [launch.Tile(*tile)])
        chosen = mock.patch.multiple(launch, kinds_of=lambda *_, kind=kind, **__: [kind], STAGES=[stages])
        with figures.attempt(**names), chosen:
            time_case(figures, names, shape, load, device)
    for load, splits in itertools.product(SWEPT[:-1], SPLITS):
        names = {"model": "sweep", "load": f"{load[0]} x {load[1]} + {load[2]}", "name": f"splits {splits}"}
        with figures.attempt(**names), mock.patch.object(launch, "choose_splits", return_value=splits):
            time_case(figures, names, shape, load, device)


def time_case(
    figures: Figures,
    names: dict[str, str],
    shape: tuple[int, int, int],
    load: tuple[int, int, int],
    device: torch.device,
) -> None:
    """Adds the time of one load."""
    case = build_case(shape, load, device)
    took_s = median_s(lambda: attend(**case), device)
    figures.add(**names, us=1e6 * took_s, error=largest_error(case, attend(**case), load))


@torch.inference_mode()
def main(options: Namespace) -> None:
    figures, device = Figures("attention", options.out), options.device
    bandwidth = copy_bytes_per_s(device)
    shapes, loads = (SMALL_SHAPES, SMALL_LOADS) if options.small else (SHAPES, LOADS)
    for (name, shape), load in itertools.product(shapes.items(), loads):
        num_sequences, cached, new = load
        names = {"model": name, "load": f"{num_sequences} x {cached} + {new}"}
        with figures.attempt(**names):
            case = build_case(shape, load, device)
            error = largest_error(case, attend(**case), load)
            took_s = median_s(lambda case=case: attend(**case), device)  # type: ignore[misc]
            read_bytes = 2 * num_sequences * (cached + new) * shape[1] * shape[2] * case["query"].element_size()
            num_operations = 4 * num_sequences * new * (cached + new / 2) * shape[0] * shape[2]
            others = {}
            for way, run in torch_ways(case, load).items():
                with figures.attempt(**names, way=way):
                    others[way] = 1e6 * median_s(run, device)
            figures.add(
                **names,
                us=1e6 * took_s,
                tb_per_s=read_bytes / took_s / 1e12,
                of_copy=read_bytes / took_s / bandwidth,
                tflops=num_operations / took_s / 1e12,
                error=error,
                **others,
            )


@torch.inference_mode()
def main_sweep(options: Namespace) -> None:
    """Other splits and tiles of the first model."""
    shapes = SMALL_SHAPES if options.small else SHAPES
    sweep(Figures("attention", options.out), next(iter(shapes.values())), options.device)


if __name__ == "__main__":
    main(read_options(__doc__))
