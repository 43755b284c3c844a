# SPDX-License-Identifier: Apache-2.0
"""Products of one input on a CPU, apart and as one: `python benchmarks/merged.py`.

Query, key and value, and gate and up, of some models: 128 MB of weights, more than a cache holds, and each product by
the fastest way of `pack_weights: auto` for its rows (torch, oneDNN, our kernel). A figure is the time apart divided by
the time of the merged product with its division into parts; above 1, merging is faster. The two run in turns, and the
smallest processor time of each counts, as machines are shared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import click
import torch
from torch import nn

from hf_triton.runner.cpu.linear import PackedLinear

NUM_BYTES = 128e6
MODELS = {
    "SmolLM2-135M": (576, (576, 192, 192), (1536, 1536)),
    "Qwen3-0.6B": (1024, (2048, 1024, 1024), (3072, 3072)),
    "Llama-3.2-1B": (2048, (2048, 512, 512), (8192, 8192)),
    "Llama-3-8B": (4096, (4096, 1024, 1024), (14336, 14336)),
}
"""Inputs; outputs of query, key and value; of gate and up."""
COUNTS = (1, 4, 16)


def ways(weights: Sequence[torch.Tensor]) -> list[list[nn.Module]]:
    """The same products by torch, by oneDNN, and by our kernel where there is one."""
    plain: list[nn.Module] = [nn.Linear(weight.shape[1], len(weight), bias=False, device="meta") for weight in weights]
    for layer, weight in zip(plain, weights, strict=True):
        layer.weight = nn.Parameter(weight, requires_grad=False)
    try:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    except RuntimeError:  # oneDNN cannot compute with such weights on this processor
        return [plain]
    onednn, kernel = ([PackedLinear.of(weight, None) for weight in packed] for _ in range(2))
    for layer in kernel:
        layer.use_kernel()
    by_kernel: list[list[nn.Module]] = [[*kernel]] if all(layer.kernel for layer in kernel) else []
    return [plain, [*onednn], *by_kernel]


def least_s(candidates: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    best = [float("inf")] * len(candidates)
    for _ in range(rounds):
        for number, run in enumerate(candidates):
            started = time.process_time()
            run()
            best[number] = min(best[number], time.process_time() - started)
    return best


@torch.inference_mode()
def ratio(inputs: int, outputs: tuple[int, ...], dtype: torch.dtype, num_rows: int, rounds: int) -> float:
    """The time apart divided by the time merged, each by its fastest way."""
    count = max(2, round(NUM_BYTES / (sum(outputs) * inputs * dtype.itemsize)))
    merged_weights = [(torch.randn(sum(outputs), inputs) / inputs**0.5).to(dtype) for _ in range(count)]
    apart = ways([part.contiguous() for weight in merged_weights for part in weight.split(outputs)])
    merged = ways(merged_weights)
    x = torch.randn(1, num_rows, inputs).to(dtype)

    def run_apart(layers: Sequence[nn.Module]) -> None:
        for layer in layers:
            layer(x)

    def run_merged(layers: Sequence[nn.Module]) -> None:
        for layer in layers:
            layer(x).split(outputs, -1)

    candidates = [*(partial(run_apart, each) for each in apart), *(partial(run_merged, each) for each in merged)]
    times = least_s(candidates, rounds)
    return min(times[: len(apart)]) / min(times[len(apart) :])


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Of each way.")
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), help="Of weights and inputs.")
def main(rounds: int, dtypes: tuple[str, ...]) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    print(f"torch: {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'apart/merged':32}" + "".join(f"{f'{count} rows':>10}" for count in COUNTS))
    for name_of_dtype in dtypes:
        dtype = getattr(torch, name_of_dtype)
        every = []
        for name, (inputs, *products) in MODELS.items():
            for outputs in products:
                ratios = [ratio(inputs, outputs, dtype, count, rounds) for count in COUNTS]
                every += ratios
                case = f"{name_of_dtype} {name} {len(outputs)} x {inputs}"
                print(f"{case:32}" + "".join(f"{each:>10.2f}" for each in ratios), flush=True)
        print(f"{'geometric mean':32}{statistics.geometric_mean(every):>10.2f}")


if __name__ == "__main__":
    main()
