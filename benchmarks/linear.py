# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a few vectors on a CPU: `python benchmarks/linear.py`.

Milliseconds for 128 MB of weights as wide as those of some models, beyond what a cache holds: as torch has them, as
oneDNN computes with packed ones, and by the kernel of `hf_triton/runner/product.py`, in turn. `bound` is the larger one
of two times, measured here too: to read as many bytes, and to compute as much at the speed that oneDNN has with 512
vectors. The least of each counts, as the machines are shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import click
import torch
from torch import nn

from hf_triton.runner.cpu.linear import FewVectors, by_onednn

NUM_BYTES = 128e6
SHAPES = ((512, 512), (1408, 512), (4096, 4096))
"""Outputs and inputs."""
COUNTS = (1, 4, 8, 11, 16, 32, 64)
MANY = 512


class Layers:
    """As many equal layers as there are bytes for."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        count = max(2, round(NUM_BYTES / (outputs * inputs * dtype.itemsize)))
        self.plain = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
        self.packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in self.plain]
        self.few = [FewVectors(weight) for weight in self.packed]

    def ways(self, x: torch.Tensor) -> dict[str, Callable[[], None]]:
        def as_it_is() -> None:
            for weight in self.plain:
                nn.functional.linear(x, weight)

        def as_packed() -> None:
            for weight in self.packed:
                by_onednn(x, weight, None)

        def by_kernel() -> None:
            for each in self.few:
                each.multiply(x, None)

        def read() -> None:
            for weight in self.plain:
                weight.view(torch.int32).max()

        return {"plain": as_it_is, "oneDNN": as_packed, "kernel": by_kernel, "read": read}


def least_ms(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            found[name] = min(found[name], 1000 * (time.perf_counter() - started))
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Of each way.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
def main(rounds: int, threads: int) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(threads)
    columns = ("plain", "oneDNN", "kernel", "bound", "oneDNN/kernel", "bound/kernel")
    print(f"{'':28}" + "".join(f"{name:>15}" for name in columns))
    for dtype in (torch.float32, torch.bfloat16):
        for outputs, inputs in SHAPES:
            with torch.inference_mode():
                layers = Layers(outputs, inputs, dtype)
                if FewVectors.make(layers.packed[0], None) is None:
                    raise click.ClickException(f"there is no kernel for {dtype} on this processor, or no numba")
                many = layers.ways(torch.randn(MANY, inputs).to(dtype))["oneDNN"]
                compute_ms = least_ms({"many": many}, 3)["many"] / MANY
                for count in COUNTS:
                    ms = least_ms(layers.ways(torch.randn(count, inputs).to(dtype)), rounds)
                    ms["bound"] = max(ms["read"], count * compute_ms)
                    ms |= {"oneDNN/kernel": ms["oneDNN"] / ms["kernel"], "bound/kernel": ms["bound"] / ms["kernel"]}
                    case = f"{str(dtype).removeprefix('torch.')} {outputs}x{inputs}, {count}"
                    print(f"{case:28}" + "".join(f"{ms[name]:>15.2f}" for name in columns), flush=True)


if __name__ == "__main__":
    main()
