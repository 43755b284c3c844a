# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a model on a CPU, with their weights laid out once as oneDNN computes with them.

torch by itself gives a float32 product to a BLAS that is half as fast on many processors, and has bfloat16 weights laid
out anew at every call. Products of a few vectors are for `product.py`. What was packed is tried out: a model that
computes something else with it, or looks into its own weights, is put back as it was.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_triton.runner.cpu.linear import FewVectors, by_onednn
from hf_triton.runner.faults import kind
from hf_triton.runner.numerics import agree
from hf_triton.runner.probe import same_logits, sample_logits

logger = logging.getLogger(__name__)

MAX_REASON: Final = 160  # characters of torch's words in the log
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


SIZES: Final = (*range(1, 17), *range(24, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
"""Vectors that are multiplied at a time. For every number of them oneDNN makes code, which takes a millisecond and half
a mebibyte that it never gives back: others are filled up with zeros to one of these, or divided."""
_SIZES: Final = frozenset(SIZES)
CHUNKS: Final = ("local_attn_chunk_length", "lsh_attn_chunk_length")
"""Tokens, by their names in a config, beyond which a model (Reformer) looks into its weights."""


class PackedLinear(nn.Linear):
    """`x @ weight.T + bias`, for inference on a CPU: what a linear layer becomes, in place.

    Its `weight` has shape and dtype, and nobody but oneDNN and `product.py` reads it.
    """

    few_vectors: FewVectors | None = None
    """What needs no oneDNN where they are few."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        few = self.few_vectors
        if few is not None and few.suits(x, self.weight):
            return few.multiply(x, self.bias)
        if x.numel() // x.shape[-1] in _SIZES:
            return by_onednn(x, self.weight, self.bias)
        parts = torch.split(x.reshape(-1, x.shape[-1]), SIZES[-1])
        products = [by_onednn(_filled_up(part), self.weight, self.bias)[: len(part)] for part in parts]
        return torch.cat(products).view(*x.shape[:-1], self.weight.shape[0])

    def extra_repr(self) -> str:
        """Sizes, for those who print the model."""
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


def _filled_up(vectors: torch.Tensor) -> torch.Tensor:
    size = SIZES[bisect.bisect_left(SIZES, len(vectors))]
    return nn.functional.pad(vectors, (0, 0, 0, size - len(vectors)))


def pack(model: nn.Module) -> int:
    """Pack the linear layers of a model in place; how many. The memory of the weights as they were is given back.

    Args:
        model: A transformers model that generates, in eval mode. One that is not all on the CPU is left as it is.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return 0
    length = 1 + max(getattr(model.config, name, None) or 2 for name in CHUNKS)
    try:
        plain = sample_logits(model, length)
    except Exception:  # it cannot generate: the choice of an engine says so
        return 0
    changes: list[_Change] = []
    try:
        num_users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
        for layer in model.modules():
            if _is_linear(layer):
                changes.append(_Change.make(layer, is_shared=num_users[id(layer.weight)] > 1))
        obstacle = None if same_logits(model, plain, sample_logits(model, length)) else "its logits are others then"
    except Exception as error:
        obstacle = f"{kind(error)}: {str(error)[:MAX_REASON]}"
    if obstacle is None:
        num_quick = sum(change.layer.few_vectors is not None for change in changes)
        logger.info(
            "%d linear layers packed for oneDNN, %d of them with a kernel for few vectors", len(changes), num_quick
        )
        return len(changes)
    for change in changes:
        change.undo()
    logger.info("linear layers are not packed for oneDNN: %s", obstacle)
    return 0


@dataclass(frozen=True)
class _Change:
    """A layer that was packed, and how it was before."""

    layer: Any
    layer_class: type[nn.Module]
    shared_weight: nn.Parameter | None
    """Kept where another module, such as the input embedding, has it too."""

    @classmethod
    def make(cls, layer: Any, *, is_shared: bool) -> _Change:
        """Pack a layer.

        Raises:
            RuntimeError: oneDNN cannot compute with such weights on this processor.
        """
        change = cls(layer, type(layer), layer.weight if is_shared else None)
        packed = torch.ops.mkldnn._reorder_linear_weight(_matrix(layer), None)
        weight = nn.Parameter(packed, requires_grad=False)
        few_vectors = FewVectors.make(weight, layer.bias)
        layer.weight, layer.few_vectors = weight, few_vectors
        layer.__class__ = PackedLinear
        return change

    def undo(self) -> None:
        weight = self.shared_weight
        if weight is None:
            dense = self.layer.weight.to_dense()
            weight = nn.Parameter(dense.t() if self.layer_class is Conv1D else dense, requires_grad=False)
        self.layer.__class__ = self.layer_class
        self.layer.weight = weight
        del self.layer.few_vectors


def _is_linear(layer: Any) -> bool:
    """Whether all that a layer does is `x @ weight.T + bias`."""
    is_plain = type(layer) in (nn.Linear, Conv1D)
    if "forward" in vars(layer) or not (is_plain or isinstance(layer, nn.Linear)):
        return False
    is_quantized = type(layer.weight) is not nn.Parameter
    if is_quantized or layer.weight.dtype not in DTYPES:
        return False
    return is_plain or (_has_nothing_else(layer) and _computes_the_same(layer))


def _has_nothing_else(layer: nn.Module) -> bool:
    tensors = {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())}
    return tensors <= {"weight", "bias"} and not any(layer.children())


@torch.inference_mode()
def _computes_the_same(layer: nn.Linear) -> bool:
    """Of a class of its own, such as Falcon's: tried with one vector."""
    x = torch.linspace(-1, 1, layer.in_features, dtype=layer.weight.dtype)[None]
    try:
        return agree(nn.functional.linear(x, layer.weight, layer.bias), layer(x), layer.weight.dtype)
    except Exception:  # it takes or gives something else
        return False


def _matrix(layer: Any) -> torch.Tensor:
    """A layer's weights as `[out_features, in_features]`."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight
