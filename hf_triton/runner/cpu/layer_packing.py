# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a model on a CPU, with their weights laid out once as oneDNN computes with them.

torch by itself gives a float32 product to a BLAS that is half as fast on many processors, and lays out bfloat16 weights
at every call. The packed model is tried: if it computes something else, or reads its own weights, it is restored.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_triton.runner.cpu.layer_timing import (
    ONEDNN,
    PACKED,
    Choice,
    LayerShape,
    shape_of,
    time_encoder_layers,
    time_layers,
    weight_matrix,
)
from hf_triton.runner.cpu.linear import PackedLinear
from hf_triton.runner.faults import described
from hf_triton.runner.model_comparison import Comparison
from hf_triton.runner.numerics import agree
from hf_triton.runner.reference import logits_after, make_continuation, make_prompt

logger = logging.getLogger(__name__)

MIN_BYTES: Final = 4 << 20
"""Fewer weights stay in the caches however they are laid out: the layers are not timed, and stay as they are."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
CHUNKS: Final = ("local_attn_chunk_length", "lsh_attn_chunk_length")
"""Tokens, by their names in a config, beyond which a model (Reformer) reads its weights."""


def pack(model: nn.Module, which: Literal["auto", "all"] = "all") -> int:
    """Pack linear layers of a model in place, freeing the memory of their former weights; how many were packed.

    A model with parts that are not on the CPU stays as it is. `auto` packs the shapes that are faster so.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return 0
    num_bytes = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, nn.Linear | Conv1D))
    if which == "auto" and num_bytes < MIN_BYTES:
        return 0
    length = 1 + max(getattr(model.config, name, None) or 2 for name in CHUNKS)
    try:
        prompt, after = make_prompt(model, length, seed=1), make_continuation(model, 1, seed=5)
        comparison = Comparison(model, lambda: logits_after(model, [prompt], [after])[:, 0])
    except Exception:  # it cannot generate: the choice of an engine says so
        return 0
    time_all = time_layers if which == "auto" else None
    return _pack(model, time_all, PACKED, comparison)


def pack_encoder(model: nn.Module, compute: Callable[[], torch.Tensor], which: Literal["auto", "all"] = "all") -> int:
    """Pack linear layers of a model that computes many rows at a time and does not generate, see `pack`.

    Our kernel for few rows is left out. `compute` returns the model's outputs, the same at every call.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return 0
    try:
        comparison = Comparison(model, lambda: compute()[None].float())
    except Exception:  # a head that wants certain tokens
        return 0
    time_all = time_encoder_layers if which == "auto" else None
    return _pack(model, time_all, ONEDNN, comparison)


def _pack(
    model: nn.Module,
    time_all: Callable[[list[Any]], dict[LayerShape, Choice]] | None,
    default: Choice,
    comparison: Comparison,
) -> int:
    """Pack the layers that `time_all` chooses, or all by `default`; undone if the model computes something else."""
    packed: list[_Packed] = []
    started = time.perf_counter()
    try:
        layers = [layer for layer in model.modules() if _is_linear(layer)]
        if not layers:
            return 0
        choices = time_all(layers) if time_all else {}
        timed_s = time.perf_counter() - started
        num_users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
        for layer in layers:
            choice = choices.get(shape_of(layer), default)
            if choice.is_packed:
                packed.append(_Packed.make(layer, choice, is_shared=num_users[id(layer.weight)] > 1))
        obstacle = None
        if packed and not (verdict := comparison.judge(comparison.reference)).is_right:
            obstacle = f"the outputs differ from the original model's by {verdict.text}"
    except Exception as error:
        obstacle = described(error)
    if obstacle is not None:
        for change in packed:
            change.undo()
        logger.info("linear layers not packed for oneDNN (%s)", obstacle)
        return 0
    logger.info(
        "%d of %d linear layers packed for oneDNN, %d of them with our kernel for few rows%s",
        len(packed),
        len(layers),
        sum(change.layer.kernel is not None for change in packed),
        f" (chosen by timing, {timed_s:.1f} s)" if time_all else "",
    )
    return len(packed)


@dataclass(frozen=True)
class _Packed:
    """A layer that was packed, and what it was before."""

    layer: Any
    layer_class: type[nn.Module]
    shared_weight: nn.Parameter | None
    """Kept if another module, such as the input embedding, has it too."""

    @classmethod
    def make(cls, layer: Any, choice: Choice, *, is_shared: bool) -> _Packed:
        """Pack a layer; raises RuntimeError if oneDNN cannot compute with such weights on this processor."""
        packed = cls(layer, type(layer), layer.weight if is_shared else None)
        weight = torch.ops.mkldnn._reorder_linear_weight(weight_matrix(layer), None)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.out_features, layer.in_features = weight.shape
        layer.__class__ = PackedLinear
        layer.use_kernel(choice.kernel_rows)
        return packed

    def undo(self) -> None:
        weight = self.shared_weight
        if weight is None:
            dense = self.layer.weight.to_dense()
            weight = nn.Parameter(dense.t() if self.layer_class is Conv1D else dense, requires_grad=False)
        self.layer.__class__ = self.layer_class
        self.layer.weight = weight
        vars(self.layer).pop("kernel", None)


def _is_linear(layer: Any) -> bool:
    """Whether all that a layer does is `x @ weight.T + bias`."""
    is_plain = type(layer) in (nn.Linear, Conv1D)
    if "forward" in vars(layer) or not (is_plain or isinstance(layer, nn.Linear)):
        return False
    is_quantized = type(layer.weight) is not nn.Parameter
    if is_quantized or layer.weight.dtype not in DTYPES:
        return False
    names = {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())}
    has_nothing_else = names <= {"weight", "bias"} and not any(layer.children())
    return is_plain or (has_nothing_else and _computes_the_same(layer))


@torch.inference_mode()
def _computes_the_same(layer: nn.Linear) -> bool:
    """Whether a subclass, such as Falcon's, computes what `nn.Linear` computes: tried with one row."""
    x = torch.linspace(-1, 1, layer.in_features, dtype=layer.weight.dtype)[None]
    try:
        return agree(nn.functional.linear(x, layer.weight, layer.bias), layer(x))
    except Exception:  # its input or output is something else
        return False
