# SPDX-License-Identifier: Apache-2.0
"""Compiles the attention kernels for devices that are not there, and prints what each takes of a processor.

    python benchmarks/gpu/compile_ahead.py [--capability 90 ...] [--cache FOLDER]

Needs Triton and torch, and no GPU. A row is a kernel for one form of model: its tile (rows x keys, warps), stages,
registers of a thread, bytes that did not fit in them, shared memory, how many programs are resident on a processor, and
how many copies stay under way while each loop waits (0: nothing overlaps). `*` is what a device would take: the first
that it has room for and that spills nothing. With `--cache`, what is compiled is kept there for a machine with the same
Triton: set `TRITON_CACHE_DIR` to a copy of the folder at the same path, a relative one; Triton keeps its files' paths.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hf_triton.runner.device_step import Places
from hf_triton.runner.torch_attention import Scoring

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of a program at most, by CUDA capability."""
PROCESSOR_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
"""Shared memory of a processor."""
REGISTERS = 65536
WAIT = re.compile(r"async_wait[^{]*\{num = (\d+)")
SHAPES = {
    "llama-3-8b": (32, 8, 128, 0),
    "qwen3-0.6b": (16, 8, 128, 0),
    "falcon-7b": (71, 1, 64, 0),
    "gemma, window": (8, 4, 256, 512),
}
"""Heads, heads of keys, numbers of a head, window."""
LOADS = {"64 decodes": (64, 1), "a prompt of 2,048": (1, 2048)}
"""Sequences and new tokens of each."""


def launch(shape: tuple[int, int, int, int], load: tuple[int, int], dtype: torch.dtype) -> None:
    """Launch the kernels of a load on empty tensors."""
    from hf_triton.runner.cuda import attention_launch

    (num_heads, num_key_heads, size, window), (num_sequences, new) = shape, load
    num_tokens = num_sequences * new
    rows = torch.empty(num_tokens, num_heads + 2 * num_key_heads, size, dtype=dtype)
    blocks = torch.empty(2, num_key_heads, 16, size, dtype=dtype)
    numbers = (torch.zeros(count, dtype=torch.int64) for count in (num_tokens, num_sequences + 1, *[num_sequences] * 3))
    states = rows.split([num_heads, num_key_heads, num_key_heads], 1)
    attention_launch.attend(*states, blocks, blocks, Places(*numbers), Scoring(size**-0.5, None, None), window)


class Compiler:
    """Compiles what is launched while it is entered, for one capability, and tells what a device would say."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.rows: list[dict[str, Any]] = []
        """What was compiled of `attend`."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import JITFunction, driver

        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: GPUTarget("cuda", self.capability, 32),
                get_current_device=lambda: self.capability,  # kernels are kept by device
                get_current_stream=lambda _: 0,
            )
        )
        with mock.patch.object(JITFunction, "__getitem__", lambda kernel, grid: partial(self._compile, kernel, grid)):
            yield

    def _compile(self, kernel: Any, grid: Any, *arguments: Any, **options: Any) -> Any:
        import triton

        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        if compiled.name != "attend":
            return compiled
        registers, spills = self._registers(compiled.asm["ptx"])
        shared, room = compiled.metadata.shared, SHARED_KIB[self.capability] * 1024
        num_threads = 32 * options["num_warps"]
        resident = PROCESSOR_KIB[self.capability] * 1024 // (shared + 1024)
        loops = compiled.asm["ttgir"].split("scf.for")[1:]
        self.rows.append(
            {
                "tile": f"{arguments[-2]} x {arguments[-1]}, {options['num_warps']}",
                "stages": options["num_stages"],
                "registers": registers,
                "spilt": spills,
                "shared_kib": round(shared / 1024),
                "resident": min(resident, REGISTERS // (registers * num_threads)),
                "waits": " ".join(min(WAIT.findall(loop.split("scf.yield")[0]), default="-") for loop in loops),
                "chosen": "*" if shared <= room and not spills else "",
            }
        )
        if shared > room:
            raise triton.OutOfResources(shared, room, "shared memory")
        return SimpleNamespace(n_spills=spills)

    def _registers(self, ptx: str) -> tuple[int, int]:
        """Registers of a thread, and bytes of them that go to memory, as the assembler says."""
        import triton

        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        ptxas = next(each for name in ("ptxas", "ptxas-blackwell") if (each := program / name).exists())
        architecture = re.search(r"\.target (\w+)", ptx)
        assert architecture is not None
        if self.capability >= 100 and (program / "ptxas-blackwell").exists():
            ptxas = program / "ptxas-blackwell"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.ptx")
            path.write_text(ptx)
            command = [ptxas, "-v", f"-arch={architecture[1]}", path, "-o", os.devnull]
            told = subprocess.run(command, capture_output=True, text=True, check=True)
        used, spilt = (re.search(each, told.stderr + told.stdout) for each in (r"Used (\d+)", r"(\d+) bytes spill st"))
        assert used is not None
        return int(used[1]), int(spilt[1]) if spilt else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", choices=SHARED_KIB, default=list(SHARED_KIB))
    parser.add_argument("--cache", type=Path, help="folder in which compiled kernels are kept")
    options = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(options.cache or tempfile.mkdtemp())
    from hf_triton.runner.cuda import attention_launch

    print(
        "capability | model | load | tile, warps | stages | registers | spilt | shared KiB | resident | waits | chosen"
    )
    for capability in options.capability:
        attention_launch._BEST.clear()
        for model, shape in SHAPES.items():
            for load, sizes in LOADS.items():
                compiler = Compiler(capability)
                with compiler.entered():
                    launch(shape, sizes, torch.bfloat16)
                for row in compiler.rows:
                    print(" | ".join(map(str, (capability, model, load, *row.values()))))
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
