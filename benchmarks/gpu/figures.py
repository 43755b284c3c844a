# SPDX-License-Identifier: Apache-2.0
"""What all parts of the run share: options, a file of figures, timing, and what the card itself reaches."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

PACKAGES = ("torch", "triton", "transformers", "numpy", "numba")
ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "constraints.txt", ROOT / "requirements-torch.txt"
"""The versions that the project tests, and the image's triton; a device has torch and triton of its own."""
FILE = "figures.jsonl"
FLUSHED_BYTES = 2**28
"""More than any cache of a card holds."""


QUEUE_CYCLES = 4_000_000
"""How long a device waits, about 2 ms, while the host launches what is timed: else its launches are timed too."""


class Figures:
    """Prints figures and appends each to `figures.jsonl` as soon as it is known, so that no stop loses it."""

    def __init__(self, part: str, out: Path) -> None:
        self._part = part
        self._path = out / FILE

    def add(self, **values: Any) -> None:
        line = json.dumps({"part": self._part, **{name: _rounded(value) for name, value in values.items()}})
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

    @contextmanager
    def attempt(self, **names: Any) -> Iterator[None]:
        """A failure is a figure too, and stops no other: out of memory, no such method, no kernel for the device."""
        try:
            yield
        except Exception as error:
            self.add(**names, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        release()


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def read_options(description: str | None, models: Sequence[str] = ()) -> argparse.Namespace:
    """`--small`, `--out`, and the model's name if there is a choice; adds the device."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    if models:
        parser.add_argument("model", choices=models)
    parser.add_argument("--small", action="store_true", help="tiny loads on a CPU, to test the benchmark itself")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of figures.jsonl")
    return check_options(parser, parser.parse_args())


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Options with the device added; ends the process where it is missing."""
    if not options.small and not torch.cuda.is_available():
        parser.error("no CUDA device; --small runs on a CPU")
    options.device = torch.device("cpu" if options.small else "cuda")
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def machine(device: torch.device) -> dict[str, Any]:
    """The card and the versions of everything."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "-"
    pins = re.findall(r"^([\w-]+)==([^\s;]+)", "\n".join(each.read_text() for each in LOCKS), re.MULTILINE)
    is_cuda = device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(device) if is_cuda else f"CPU, {platform.machine()}",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else 0,
        "cuda": torch.version.cuda or "-",
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "gcc": _first_line("gcc", "--version"),
        "python": platform.python_version(),
        **versions,
        "locked": {package: pinned for package, pinned in pins if package in PACKAGES},
        "commit": os.environ.get("COMMIT") or _first_line("git", "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _first_line(*command: str) -> str:
    """The first line of a program's output; `-`: it is not there, or fails."""
    if shutil.which(command[0]) is None:
        return "-"
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return (output.splitlines() or ["-"])[0]


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release() -> None:
    """Free the device's memory that nothing holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wall_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the device's work included."""
    finish(device)
    started_s = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - started_s


def median_s(work: Callable[[], object], device: torch.device, rounds: int = 20) -> float:
    """Median seconds of kernels on the device with cold caches, after a call that warms up."""
    work()
    if device.type != "cuda":
        return statistics.median(wall_s(work, device) for _ in range(3))
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]  # type: ignore[no-untyped-call]
    for began, ended in spans:
        flushed.zero_()
        torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
    finish(device)
    return float(statistics.median(began.elapsed_time(ended) / 1000 for began, ended in spans))


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes that a large copy reads and writes in a second: the bound of what reads memory."""
    source = torch.ones(2**31 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source), device)


def matmul_flops(device: torch.device) -> float:
    """Operations in a second of a large product of bfloat16 matrices: the bound of what computes."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return float(2 * size**3 / median_s(lambda: left @ right, device))


def main(options: argparse.Namespace) -> None:
    """The machine, and what it reaches in a copy and a product."""
    Figures("machine", options.out).add(
        **machine(options.device),
        copy_tb_per_s=copy_bytes_per_s(options.device) / 1e12,
        matmul_tflops=matmul_flops(options.device) / 1e12,
    )


if __name__ == "__main__":
    main(read_options(main.__doc__))
