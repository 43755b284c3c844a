# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a few vectors on a CPU: `python benchmarks/linear.py`.

Milliseconds for 128 MB of weights, more than a cache holds, as wide as those of some models: by torch, by oneDNN with
packed weights, and by the kernel of `hf_triton/runner/cpu/linear_kernel.py`, in turn. `bound` is the larger of two
times, measured here too: to read as many bytes, and to compute as much at oneDNN's speed with 512 rows. The smallest
time of each counts, as machines are shared. The exit status is 1 if the way that `pack_weights: auto` would choose is
more than 10 % slower than torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import click
import torch
from torch import nn

from hf_triton.runner.cpu.layer_timing import Choice, shape_of, time_layers
from hf_triton.runner.cpu.linear import PackedLinear

NUM_BYTES = 128e6
SHAPES = ((512, 512), (1408, 512), (4096, 4096))
"""Outputs and inputs."""
COUNTS = (1, 4, 8, 11, 16, 32, 64)
MANY = 512
TOLERANCE = 1.1
"""How much slower than torch a chosen way may be."""


class Layers:
    """Equal layers, as many as there are bytes for."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        count = max(2, round(NUM_BYTES / (outputs * inputs * dtype.itemsize)))
        self.plain = [nn.Linear(inputs, outputs, bias=False, dtype=dtype) for _ in range(count)]
        weights = [torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None) for layer in self.plain]
        self.packed = [PackedLinear.of(weight, None) for weight in weights]
        self.kernels = [PackedLinear.of(weight, None) for weight in weights]
        for layer in self.kernels:
            layer.use_kernel()

    def ways(self, x: torch.Tensor) -> dict[str, Callable[[], None]]:
        def by(layers: Sequence[nn.Module]) -> None:
            for layer in layers:
                layer(x)

        def read() -> None:
            for layer in self.plain:
                layer.weight.view(torch.int32).max()

        ways = {"torch": partial(by, self.plain), "oneDNN": partial(by, self.packed), "read": read}
        return ways | ({"kernel": partial(by, self.kernels)} if self.kernels[0].kernel else {})

    def choice(self) -> Choice:
        """What `pack_weights: auto` takes for such layers."""
        return time_layers(self.plain)[shape_of(self.plain[0])]


def least_ms(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], 1000 * (time.perf_counter() - started))
    return best


def chosen_way(choice: Choice, num_rows: int) -> str:
    if not choice.is_packed:
        return "torch"
    return "kernel" if num_rows in choice.kernel_rows else "oneDNN"


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Of each way.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
def main(rounds: int, threads: int) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(threads)
    columns = ("torch", "oneDNN", "kernel", "bound", "oneDNN/kernel", "bound/kernel", "torch/chosen")
    print(f"{'torch: ' + torch.backends.cpu.get_cpu_capability():28}" + "".join(f"{name:>15}" for name in columns))
    slower = []
    for dtype in (torch.float32, torch.bfloat16):
        for outputs, inputs in SHAPES:
            with torch.inference_mode():
                layers = Layers(outputs, inputs, dtype)
                choice = layers.choice()
                many = layers.ways(torch.randn(MANY, inputs).to(dtype))["oneDNN"]
                compute_ms = least_ms({"many": many}, 3)["many"] / MANY
                for count in COUNTS:
                    ms = least_ms(layers.ways(torch.randn(count, inputs).to(dtype)), rounds)
                    kernel_ms = ms.setdefault("kernel", float("nan"))
                    ms["bound"] = max(ms["read"], count * compute_ms)
                    ms |= {"oneDNN/kernel": ms["oneDNN"] / kernel_ms, "bound/kernel": ms["bound"] / kernel_ms}
                    ms["torch/chosen"] = ms["torch"] / ms[chosen_way(choice, count)]
                    case = f"{str(dtype).removeprefix('torch.')} {outputs}x{inputs}, {count}"
                    print(f"{case:28}" + "".join(f"{ms[name]:>15.2f}" for name in columns), flush=True)
                    if ms["torch/chosen"] * TOLERANCE < 1:
                        slower.append(case)
    if slower:
        raise click.ClickException(f"the chosen way is slower than torch: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
