# SPDX-License-Identifier: Apache-2.0
"""Measures at load, by shape, which way of computing a linear layer is fastest on this processor.

A sample of the model's own layers runs in the model's order, so that caches hold what they hold during a forward.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from hf_triton.runner.cpu.linear import ALL_ROWS, MAX_ROWS, PackedLinear

ROW_LIMITS: Final = {1: 2, 4: 8, 16: MAX_ROWS}
"""Rows that are timed (one sequence decoding, a few, a batch), and the rows up to which each result is applied."""
ENCODER_ROWS: Final = (16, 256)
"""Tokens that are timed for an encoder."""
SAMPLE_BYTES: Final = 128 << 20
"""Weights in the sample: more than caches hold. Each shape has one layer in it at least."""


class LayerShape(NamedTuple):
    """What decides the speed of a layer."""

    layer_class: type[nn.Module]
    outputs: int
    inputs: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Choice:
    """How layers of one shape are computed."""

    is_packed: bool
    kernel_rows: frozenset[int]
    """Numbers of rows, of 1 to `MAX_ROWS`, for which our kernel computes packed weights; oneDNN does for the others."""


PACKED: Final = Choice(True, ALL_ROWS)
"""What `pack_weights: true` takes, without measuring."""
ONEDNN: Final = Choice(True, frozenset())
"""The same for an encoder."""


def shape_of(layer: Any) -> LayerShape:
    """The shape of a linear layer, transformers' `Conv1D` included."""
    outputs, inputs = weight_matrix(layer).shape
    return LayerShape(type(layer), outputs, inputs, layer.weight.dtype)


def weight_matrix(layer: Any) -> torch.Tensor:
    """A layer's weights as `[out_features, in_features]`."""
    weight: torch.Tensor = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.t()


class _Sample:
    """A layer and its packed copies, by the ways in which they compute."""

    def __init__(self, layer: Any) -> None:
        self.shape = shape_of(layer)
        weight = torch.ops.mkldnn._reorder_linear_weight(weight_matrix(layer), None)
        by_kernel = PackedLinear.of(weight, layer.bias)
        by_kernel.use_kernel()
        self.ways = {"torch": layer, "onednn": PackedLinear.of(weight, layer.bias)}
        if by_kernel.kernel:
            self.ways["kernel"] = by_kernel


@torch.inference_mode()
def time_layers(layers: Sequence[Any]) -> dict[LayerShape, Choice]:
    """Choose a way for each shape of layer; takes about a second for a small model, some seconds for billions.

    Raises:
        RuntimeError: oneDNN cannot compute with such weights on this processor.
    """
    samples = _samples(layers, SAMPLE_BYTES)
    best = _best_times(samples, ROW_LIMITS, ("torch", "onednn", "kernel"))
    return {shape: choose(shape, best) for shape in {sample.shape for sample in samples}}


@torch.inference_mode()
def time_encoder_layers(layers: Sequence[Any]) -> dict[LayerShape, Choice]:
    """Choose between torch and oneDNN for each shape of layer, for the rows of a short text and of many texts.

    In 16 bits it is oneDNN either way, which without packing generates code for every number of rows.

    Raises:
        RuntimeError: oneDNN cannot compute with such weights on this processor.
    """
    samples = _samples(layers, 0)
    best = _best_times(samples, ENCODER_ROWS, ("torch", "onednn"))

    def gain(shape: LayerShape) -> float:
        gains = [best[shape, "torch", rows] / best[shape, "onednn", rows] for rows in ENCODER_ROWS]
        return min(gains[0] / 0.97, statistics.geometric_mean(gains) / 1.03)

    shapes = {sample.shape for sample in samples}
    return {shape: Choice(shape.dtype != torch.float32 or gain(shape) >= 1, frozenset()) for shape in shapes}


def _best_times(
    samples: Sequence[_Sample], rows: Iterable[int], ways: Sequence[str]
) -> dict[tuple[LayerShape, str, int], float]:
    best: dict[tuple[LayerShape, str, int], float] = {}
    for num_rows in rows:
        inputs = {shape: torch.randn(num_rows, 1, shape.inputs).to(shape.dtype) for shape in {s.shape for s in samples}}
        started = time.perf_counter()
        for number in range(-1, 5):  # the first is not counted: oneDNN generates code in it
            if number >= 2 and time.perf_counter() - started > 0.4:  # s
                break
            for way in ways:
                spent: Counter[LayerShape] = Counter()
                for sample in samples:
                    if way in sample.ways:
                        begun = time.perf_counter()
                        sample.ways[way](inputs[sample.shape])
                        spent[sample.shape] += time.perf_counter() - begun  # type: ignore[assignment]
                for shape, seconds in spent.items() if number >= 0 else ():
                    key = shape, way, num_rows
                    best[key] = min(seconds, best.get(key, seconds))
    return best


def _samples(layers: Sequence[Any], max_bytes: int) -> list[_Sample]:
    """Layers of every shape; each once, and more while their weights fit `max_bytes`, in the model's order."""
    first = {shape_of(layer): layer for layer in reversed(layers)}
    chosen, num_bytes = {id(layer) for layer in first.values()}, sum(layer.weight.nbytes for layer in first.values())
    for layer in layers:
        if id(layer) not in chosen and num_bytes + layer.weight.nbytes <= max_bytes:
            chosen.add(id(layer))
            num_bytes += layer.weight.nbytes
    return [_Sample(layer) for layer in layers if id(layer) in chosen]


def choose(shape: LayerShape, best: Mapping[tuple[LayerShape, str, int], float]) -> Choice:
    """Choose by the best seconds of each way (`torch`, `onednn`, `kernel` if there is one) and number of rows."""
    kernel_rows, gains, first = set[int](), [], 1
    for num_rows, limit in ROW_LIMITS.items():
        onednn_s = best[shape, "onednn", num_rows]
        kernel_s = best.get((shape, "kernel", num_rows), onednn_s)
        if kernel_s < onednn_s:
            kernel_rows |= set(range(first, limit + 1))
        gains.append(best[shape, "torch", num_rows] / min(kernel_s, onednn_s))
        first = limit + 1
    # A lone request must not pay for batches; and packed weights must gain something, as they take memory of their own.
    is_packed = gains[0] >= 0.97 and statistics.geometric_mean(gains) >= 1.03
    return Choice(is_packed, frozenset(kernel_rows))
