# SPDX-License-Identifier: Apache-2.0
"""The attention kernels of CUDA devices: in Triton's interpreter beside torch, and compiled for devices."""

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_triton.runner import cuda
from hf_triton.runner.cuda import attention, attention_reference, fused_operations, kernel_cache
from hf_triton.runner.device_step import NO_SEQUENCE, Places, StepSize
from hf_triton.runner.mask_rules import Window
from hf_triton.runner.torch_attention import Scoring
from tests.support.paths import ROOT
from tests.support.triton_language import FOLDER, Call

pytestmark = pytest.mark.full
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Row:
    """New tokens of sequences, and how they attend."""

    tokens: tuple[int, ...] = (1, 5, 1, 9)
    """New ones of each sequence."""
    lengths: tuple[int, ...] = (23, 5, 1, 40)
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (32, 32)
    dtype: torch.dtype = torch.float32
    padding: int = 0
    block_size: int = 16
    splits: int = 1
    few_tokens: int = 64
    """A row of more has large tiles."""
    many_tokens: int = 1024
    """A row of more has no small ones."""
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    is_written: bool = False
    is_causal: bool = True
    scale: float | None = None


LONG = Row(tokens=(20, 20, 1, 1), lengths=(700, 143, 20, 256), heads=(2, 1), splits=4)
"""Splits begin within a tile, where its first tokens see none of their keys; the keys of the last one fill two."""
ROWS = {
    "MHA in bfloat16": Row(heads=(3, 3), dtype=torch.bfloat16),
    "GQA in float16": Row(heads=(8, 2), dtype=torch.float16),
    "71 heads, one of keys": Row(tokens=(1, 3), lengths=(20, 3), heads=(71, 1), sizes=(64, 64)),
    "a group that does not divide the tile, padding": Row(heads=(6, 2), padding=3),
    "splits, of which short sequences use one": LONG,
    "splits, padding, small heads, in bfloat16": replace(LONG, padding=2, sizes=(16, 16), dtype=torch.bfloat16),
    "splits of a window": replace(LONG, window=250),
    "splits with sinks": replace(LONG, has_sinks=True),
    "a window that ends within a tile": Row(window=7),
    "softcap": Row(softcap=2.0, window=9),
    "sinks": Row(has_sinks=True, dtype=torch.bfloat16),
    "limited scores, sinks, splits": replace(LONG, softcap=2.0, has_sinks=True, window=200),
    "scores as large as there are": Row(dtype=torch.bfloat16, scale=1e36),
    "values of another size, blocks of 5": Row(sizes=(80, 48), block_size=5),
    "the largest heads, written before": Row(sizes=(256, 256), is_written=True, dtype=torch.float16),
    "large tiles": Row(tokens=(40, 1, 30), lengths=(60, 50, 30), few_tokens=4, many_tokens=4, dtype=torch.bfloat16),
    "small tiles and large ones": Row(tokens=(1, 40, 8, 9), lengths=(150, 60, 9, 9), few_tokens=4, padding=3),
    "both, splits, many of padding": replace(
        LONG, tokens=(1, 20, 1, 9), lengths=(500, 343, 2, 130), few_tokens=4, padding=9
    ),
    "71 heads, tokens that end within a tile": Row(
        tokens=(9, 1, 4), lengths=(30, 200, 4), heads=(71, 1), sizes=(64, 64), few_tokens=4, many_tokens=4
    ),
    "keys that all rows see, in several turns": Row(
        tokens=(3, 2, 1), lengths=(170, 96, 65), heads=(8, 2), has_sinks=True, softcap=3.0
    ),
    "a window of one token": Row(window=1, few_tokens=4),
}
ALL = Row(tokens=(1, 40, 7), heads=(4, 4), is_causal=False)
PACKED_ROWS = {
    "all tokens": ALL,
    "sequences of one token and of none": replace(ALL, tokens=(1, 0, 1, 0, 0, 9, 0), window=2),
    "a window on both sides": replace(ALL, window=9, sizes=(64, 64)),
    "GQA, causal, a window": replace(ALL, heads=(4, 2), is_causal=True, window=6, dtype=torch.float16),
    "limited scores, sinks": replace(ALL, has_sinks=True, softcap=2.0),
    "large tiles, padding": replace(ALL, few_tokens=4, padding=2, dtype=torch.bfloat16, sizes=(24, 40)),
    "padding of more than a tile": replace(ALL, tokens=(3, 2), padding=40, heads=(6, 2)),
    "71 heads, causal": replace(ALL, heads=(71, 1), is_causal=True, few_tokens=4),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_attention_to_blocks_is_torch_s(row: Row, interpreted: Call) -> None:
    interpreted(compare_paged, row)


@pytest.mark.parametrize("row", PACKED_ROWS.values(), ids=PACKED_ROWS)
def test_attention_within_a_row_is_torch_s(row: Row, interpreted: Call) -> None:
    interpreted(compare_packed, row)


def test_kernels_compile_ahead(compiled: Call) -> None:
    names = []
    for row in (
        Row(heads=(32, 8), sizes=(128, 128), dtype=torch.bfloat16, splits=8),
        Row(tokens=(700,), lengths=(700,), heads=(71, 1), sizes=(64, 64), dtype=torch.float16, few_tokens=4),
        Row(heads=(8, 4), sizes=(256, 256), has_sinks=True, softcap=2.0),
    ):
        kernels = compiled(80, launch_paged, row)
        assert not any("tf32" in kernel.ptx for kernel in kernels), "of float32 it keeps 10 bits"
        names += [kernel.name for kernel in kernels]
    assert names == ["write", "attend", "combine", "write", "attend", "attend", "write", "attend"]
    [kernel] = compiled(80, launch_packed, replace(ALL, dtype=torch.bfloat16, sizes=(64, 64)))
    assert "mma" in kernel.ptx


def test_the_first_tile_fits_devices_with_little_memory_and_its_loads_overlap() -> None:
    capabilities = ("89",)  # 99 KB for each program; 90 has 227
    if not (FOLDER / ".set-up").exists():
        pytest.skip(f"Triton's language is not in {FOLDER}: make test-all installs it")
    command = sys.executable, "benchmarks/gpu/compile_ahead.py", "--capability", *capabilities
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    names, *rows = ([cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines())
    told = [dict(zip(names, row, strict=True)) for row in rows]
    assert len(told) == 8 * len(capabilities), "a tile or number of stages was refused"
    for row in told:
        assert (row["chosen"], row["spilt"], row["stages"]) == ("*", "0", "5"), row
        assert all(int(waits) >= 4 for waits in row["waits"].split()), row


def test_steps_of_all_sizes_launch_the_same_kernels(compiled: Call) -> None:
    kernels = compiled(90, launch_steps)
    assert Counter(kernel.name for kernel in set(kernels)) == {"write": 1, "attend": 1}, "one more is compiled"


def test_tiles_and_splits_of_all_shapes(interpreted: Call) -> None:
    interpreted(check_tiles)


def check_tiles() -> None:
    from hf_triton.runner.cuda.attention_launch import MAX_SPLITS, choose_splits, kinds_of

    for num_tokens, group, size, dtype, is_packed in itertools.product(
        (1, 64, 65, 1024, 9000), (1, 2, 3, 7, 16, 71, 128), (16, 64, 128, 256), TOLERANCE, (False, True)
    ):
        kinds = kinds_of(num_tokens, group, size, dtype, is_packed=is_packed)
        assert [kind.min_new for kind in kinds] == [0, *(kind.max_new + 1 for kind in kinds[:-1])]
        assert kinds[-1].max_new > 2**24, "each sequence has tiles of one kind"
        for tile in (tile for kind in kinds for tile in kind.tiles):
            assert 16 <= tile.num_rows <= 128
            assert tile.num_rows * size <= 128 * 128 or tile.num_rows <= 32
            assert tile.num_keys >= 16
    for num_programs in (1, 3, 16, 100, 528, 1000):
        splits = choose_splits(num_programs, 528)
        assert splits in (1, 2, 4, 8, 16, MAX_SPLITS)
        assert splits == 1 or 528 / 2 < splits * num_programs <= 528 or splits == MAX_SPLITS


def test_prompts_and_decodes_start_few_programs_that_do_nothing(interpreted: Call) -> None:
    prompt = Row(tokens=(2048,), lengths=(2048,), heads=(32, 8), sizes=(128, 128), dtype=torch.bfloat16)
    assert interpreted(count_programs, prompt) <= 1040
    decodes = replace(prompt, tokens=(1,) * 64, lengths=(1024,) * 64)
    assert interpreted(count_programs, decodes) <= 1.3 * 64 * 8, "one split"
    assert interpreted(count_programs, replace(prompt, tokens=(1,), lengths=(8192,))) >= 8 * 32


def count_programs(row: Row) -> int:
    from hf_triton.runner.cuda import attention_kernel, attention_launch

    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    with mock.patch.multiple(attention_kernel, attend=Kernel(), combine=mock.MagicMock(), write=mock.MagicMock()):
        attention_launch.attend(*paged_arguments(row))
    return sum(math.prod(grid) for grid in grids)


def test_a_device_takes_what_it_has_room_for_and_what_spills_no_registers(interpreted: Call) -> None:
    interpreted(check_choice)


def check_choice() -> None:
    import triton

    from hf_triton.runner.cuda.attention_launch import Kind, Tile, _launch_best

    large, medium, small = Tile(64, 64, 4), Tile(64, 32, 4), Tile(32, 32, 4)
    kind = Kind(0, 9, [large, medium, small])

    def choose(room: int, spills: dict[Tile, int]) -> tuple[Tile, int]:
        """What is launched the second time; the first time gives an output as well."""
        launched: list[tuple[Tile, int]] = []

        def launch(kind: Kind, tile: Tile, num_stages: int) -> Any:
            if tile.num_rows * tile.num_keys * num_stages > room:
                raise triton.OutOfResources(room + 1, room, "shared memory")
            launched.append((tile, num_stages))
            return SimpleNamespace(n_spills=spills.get(tile, 0))

        known = object()
        for _ in range(2):
            _launch_best(known, kind, launch)
            assert launched
        return launched[-1]

    assert choose(99_999, {}) == (large, 5)
    assert choose(99_999, {large: 8}) == (medium, 5)
    assert choose(64 * 32 * 5, {}) == (medium, 5)
    assert choose(32 * 32 * 3, {}) == (small, 3)
    assert choose(64 * 32 * 2, {medium: 4, small: 8}) == (medium, 2)
    with pytest.raises(triton.OutOfResources):
        choose(9, {})


def test_all_kernels_are_kept_in_a_writable_folder(interpreted: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    own = tmp_path / "file" / "triton"
    assert own not in (folders := interpreted(load_kernels, own))
    assert len(folders) == 3
    assert all(folder.is_dir() for folder in folders)


def load_kernels(own: Path) -> list[Path]:
    """Load each module with kernels, first of all; where they are kept then."""
    from triton import knobs

    folders, no_rows = [], torch.ones(6, 1)
    draws = partial(cuda.draw, torch.zeros(1, 8), *no_rows[:4], no_rows[5].to(torch.int64))
    for load in (attention._kernels, fused_operations._kernels, draws):
        kernel_cache.have_kernel_cache.cache_clear()
        knobs.cache.dir = str(own)
        load()
        folders.append(Path(knobs.cache.dir))
    return folders


def test_the_reason_says_what_triton_finds_no_compiler_for(interpreted: Call, tmp_path: Path) -> None:
    assert interpreted(why_no_launcher, tmp_path, {"PATH": ""}).startswith("RuntimeError: Failed to find C compiler.")
    reason = interpreted(why_no_launcher, tmp_path, {"CC": "/bin/false"})  # as gcc without Python.h
    assert reason == "/bin/false failed: the headers of C or of Python, Python.h, may be missing"


def why_no_launcher(folder: Path, environment: dict[str, str]) -> str | None:
    """Compile as Triton compiles the C module that launches kernels."""
    from triton import knobs
    from triton.runtime.build import compile_module_from_src

    knobs.cache.dir = str(folder)
    with mock.patch.dict(os.environ, environment):
        return cuda.why_no_kernel(lambda: bool(compile_module_from_src("#include <Python.h>", "launcher")))


def launch_steps() -> None:
    """Steps larger than any graph, whose numbers begin at other places of one tensor each."""
    numbers = torch.zeros(2**14, dtype=torch.int64)
    blocks = torch.zeros(2, 2, 16, 64)
    for num_tokens, num_sequences, num_rows in itertools.product((1025, 1200), (1, 5, 6), (3, 4)):
        states = (torch.zeros(num_tokens, heads, 64) for heads in (4, 2, 2))
        places = StepSize(num_tokens, num_sequences, num_rows).split(numbers).places()
        launch_paged(Row(), [*states, blocks, blocks, places, Scoring(0.125, None, None), 0])


def compare_paged(row: Row) -> None:
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    arguments = paged_arguments(row)
    expected_arguments = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    expected = attention_reference.attend(*expected_arguments)
    torch.testing.assert_close(launch_paged(row, arguments), expected, rtol=0, atol=TOLERANCE[row.dtype])
    for blocks, expected_blocks in zip(arguments[3:5], expected_arguments[3:5], strict=True):
        torch.testing.assert_close(blocks, expected_blocks, rtol=0, atol=0, equal_nan=True)


def compare_packed(row: Row) -> None:
    torch.use_deterministic_algorithms(True)
    arguments = packed_arguments(row)
    expected = attention_reference.attend_packed(*arguments)
    torch.testing.assert_close(launch_packed(row), expected, rtol=0, atol=TOLERANCE[row.dtype])


def launch_paged(row: Row, arguments: Any = None) -> torch.Tensor:
    from hf_triton.runner.cuda import attention_launch

    with limits(row):
        return attention_launch.attend(*(arguments or paged_arguments(row)))


def launch_packed(row: Row) -> torch.Tensor:
    from hf_triton.runner.cuda import attention_launch

    with limits(row):
        return attention_launch.attend_packed(*packed_arguments(row))


def limits(row: Row) -> Any:
    from hf_triton.runner.cuda import attention_launch

    sizes = {"FEW_TOKENS": row.few_tokens, "MANY_TOKENS": row.many_tokens}
    return mock.patch.multiple(attention_launch, choose_splits=lambda *_: row.splits, **sizes)


def paged_arguments(row: Row) -> list[Any]:
    """Of `attend`; blocks that no sequence has, and places behind a sequence's end, are NaN."""
    states, sequences, bounds = states_of(row)
    counts = [-(-length // row.block_size) for length in row.lengths]
    starts = torch.tensor([0, *counts]).cumsum(0)[:-1]
    tables = torch.randperm(sum(counts) + 2, generator=generator(1))[: sum(counts)]
    blocks = [
        torch.full((sum(counts) + 2, row.heads[1], row.block_size, size), torch.nan, dtype=row.dtype)
        for size in row.sizes
    ]
    for start, new, length in zip(starts.tolist(), row.tokens, row.lengths, strict=True):
        positions = torch.arange(length if row.is_written else length - new)
        places = tables[start + positions // row.block_size], slice(None), positions % row.block_size
        for each in blocks:
            each[places] = torch.randn(each[places].shape, generator=generator(length)).to(row.dtype)
    new_states = (None, None) if row.is_written else states[1:]
    sinks = torch.randn(row.heads[0], generator=generator(2)) if row.has_sinks else None
    places = Places(sequences, bounds, torch.tensor(row.lengths), starts, tables)
    scoring = Scoring(row.scale or row.sizes[0] ** -0.5, row.softcap or None, sinks)
    return [states[0], *new_states, *blocks, places, scoring, row.window]


def packed_arguments(row: Row) -> list[Any]:
    states, sequences, bounds = states_of(row)
    sinks = torch.randn(row.heads[0], generator=generator(2)) if row.has_sinks else None
    scoring = Scoring(row.sizes[0] ** -0.5, row.softcap or None, sinks)
    return [*states, Places(sequences, bounds), scoring, Window(row.window, is_causal=row.is_causal)]


def states_of(row: Row) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Queries, keys and values with the strides of views of one tensor, and of each other; NaN for padding."""
    num_tokens, (heads, key_heads), (size, value_size) = sum(row.tokens), row.heads, row.sizes
    width = max(size, value_size)
    all_states = torch.full((heads + 2 * key_heads, num_tokens + row.padding, width), torch.nan).to(row.dtype)
    all_states[:, :num_tokens] = torch.randn((len(all_states), num_tokens, width), generator=generator(0))
    queries, keys, values = all_states.transpose(0, 1).split([heads, key_heads, key_heads], 1)
    sequences = torch.repeat_interleave(torch.arange(len(row.tokens)), torch.tensor(row.tokens))
    sequences = torch.cat([sequences, torch.full((row.padding,), NO_SEQUENCE)])
    bounds = torch.tensor([0, *row.tokens]).cumsum(0)
    return [queries[..., :size], keys[..., :size], values[..., :value_size]], sequences, bounds


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
