# SPDX-License-Identifier: Apache-2.0
"""Gives a language model linear layers of 8 or 4 bits, each as soon as transformers' loader has read its weight.

Layers of the language model get the bits that are asked for. The output head has 8 bits in any case, since its rounding
is that of every logit, and so have the embeddings, which share its codes if they are tied. What does not fit stays
plain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_triton.runner.cpu.grouped_linear import GroupedEmbedding, GroupedLinear
from hf_triton.runner.direct_weights import read_directly
from hf_triton.runner.numerics import agree

logger = logging.getLogger(__name__)

GROUP: Final = 32
"""Inputs of an output that share a scale, and in 4 bits a minimum."""
MIDDLE: Final = 128
"""The code of zero in 8 bits."""
SMALLEST_SCALE: Final = 2.0**-18
"""Below it, float16 rounds a scale by more than what codes of 8 bits are rounded by."""
PART: Final = 1 << 20
"""Weights that are rounded at a time."""
METHOD: Final = "hf_triton"
ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of small layers that choose a token's experts: rounding would choose others."""
TIMED_ROWS: Final = 1, 64
TIMED_WEIGHTS: Final = 1 << 25
"""Weights of layers that are timed beside plain ones, which are made for it."""


def round_weight(weight: torch.Tensor, bits: int, bias: torch.Tensor | None = None) -> GroupedLinear | None:
    """A layer of 8 or 4 bits next to one of weights `[out_features, in_features]`; None: float16 has no such scales.

    The codes are those that are nearest with scales, and minimums, as they are kept.
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device="cpu")
    scales = torch.empty(outputs, inputs // GROUP, dtype=torch.float16, device="cpu")
    minimums = torch.empty_like(scales) if bits == 4 else None
    largest_scale = 0.0
    size = max(1, PART // inputs)
    for start in range(0, outputs, size):
        part = slice(start, start + size)
        groups = weight[part].detach().float().view(-1, inputs // GROUP, GROUP)
        low, high = groups.aminmax(dim=-1)
        wanted = torch.maximum(high, -low) / (MIDDLE - 1) if minimums is None else (high - low) / 15
        scales[part], largest_scale = wanted, max(largest_scale, float(wanted.amax()))
        if minimums is None:
            origin = torch.full_like(low, 0)[..., None]
            first, last, zero = 1, 2 * MIDDLE - 1, MIDDLE
        else:
            minimums[part] = low
            origin = minimums[part].float()[..., None]
            first, last, zero = 0, 15, 0
        if not bool(scales[part].isfinite().all() and origin.isfinite().all()):
            return None
        step = scales[part].float()[..., None].clamp(min=torch.finfo(torch.float32).tiny)
        exact = (groups - origin).div_(step).round_().add_(zero).clamp_(first, last)
        codes[part] = exact.to(torch.uint8).flatten(1)
    if 0 < largest_scale < SMALLEST_SCALE:
        return None
    return GroupedLinear(codes, scales, minimums, bias, bits=bits, zero=0 if bits == 4 else MIDDLE)


class ScaledEmbedding(GroupedEmbedding):
    """Embeddings that are multiplied by a factor, as Gemma's are."""

    def __init__(self, rows: GroupedLinear, dtype: torch.dtype, factor: torch.Tensor) -> None:
        super().__init__(rows, dtype)
        self.factor = factor.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor


@register_quantization_config(METHOD)
class SmallWeights(QuantizationConfigMixin):
    """What has transformers load a model with layers of 8 or 4 bits: its argument `quantization_config`."""

    def __init__(self, bits: int) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.bits = bits


@register_quantizer(METHOD)
class _Loader(HfQuantizer):
    """Has each weight rounded when transformers has read it, before it reads the next one."""

    quantization_config: SmallWeights

    def __init__(self, config: SmallWeights, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.plan: dict[str, int] = {}
        self.layers: dict[str, GroupedLinear] = {}

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        self.plan = plan_layers(model, self.quantization_config.bits)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        layer, dot, own = param_name.rpartition(".")
        return bool(dot) and own == "weight" and layer in self.plan

    def get_quantize_ops(self) -> ConversionOps:
        return _Round(self)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        for name, layer in self.layers.items():
            replace_linear(model, name, layer)
        self.layers = {}
        _finish(model)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Round(ConversionOps):
    """Makes small layers of weights that were read, and leaves their places in the model empty."""

    def __init__(self, loader: _Loader) -> None:
        self.hf_quantizer = loader

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **more: Any
    ) -> dict[str, Any]:
        loader, model, rest = self.hf_quantizer, more["model"], {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            layer, _, kind = name.rpartition(".")
            bits = loader.plan.pop(layer, None) if kind == "weight" else None
            own: Any = model.get_submodule(layer) if bits else None
            small = None
            if bits and weight.shape == own.weight.shape:
                small = round_weight(weight.t() if isinstance(own, Conv1D) else weight, bits)
            if small is None:  # a wrong shape, and numbers that are not finite, are refused as those of any parameter
                rest[name] = value
                continue
            loader.layers[layer] = small
            own.weight._is_hf_initialized = True  # it stays on torch's device `meta` until the layer is replaced
            more["missing_keys"].discard(name)
        return rest


def plan_layers(model: Any, bits: int) -> dict[str, int]:
    """Names of the linear layers of a language model that become small when they are read, and their bits.

    Layers of other parts, such as vision towers, do not, nor those whose weights the model's code reads; a tied head
    does when all is read.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(module) for module in (decoder or model).modules()}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    kept = {*(getattr(model, "_keep_in_fp32_modules", None) or ()), *ROUTERS}
    read, plan = read_directly(model), {}
    for name, layer in model.named_modules():
        is_head = layer is head
        is_chosen = f"{name}.weight" not in tied if is_head else id(layer) in inside
        parts = name.split(".")
        if is_chosen and _fits(layer) and parts[-1] not in read and not kept & {*parts}:
            plan[name] = 8 if is_head else bits
    return plan


def replace_linear(model: Any, name: str, module: GroupedLinear) -> None:
    """Put a small layer in the place of a linear layer, whose bias it takes if it has none of its own."""
    parent, _, own = name.rpartition(".")
    owner = model.get_submodule(parent)
    bias = getattr(getattr(owner, own), "bias", None)
    if module.bias is None and bias is not None:
        module.bias = nn.Parameter(bias.detach(), requires_grad=False)
    setattr(owner, own, module.eval())


def make_small(model: Any, bits: int) -> None:
    """Give a model whose weights are in memory small layers: random weights are not read."""
    for name, own_bits in plan_layers(model, bits).items():
        layer = model.get_submodule(name)
        weight = layer.weight.detach()
        small = round_weight(weight.t() if isinstance(layer, Conv1D) else weight, own_bits)
        if small is not None:
            replace_linear(model, name, small)
    _finish(model)


def small_bytes(model: Any, bits: int) -> int:
    """What a model on torch's device `meta` takes when its layers are small."""
    total, embedding = model.get_memory_footprint(), model.get_input_embeddings()
    weights = [(model.get_submodule(name).weight, own) for name, own in plan_layers(model, bits).items()]
    if _has_small_table(model):
        weights.append((embedding.weight, 8))
    groups = ((weight, own * GROUP // 8 + (4 if own == 4 else 2)) for weight, own in weights)
    return int(total + sum(weight.numel() // GROUP * size - weight.nbytes for weight, size in groups))


def _finish(model: Any) -> None:
    """Give a model embeddings of 8 bits, and its head if that is tied, and say what is small and what is not."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if _has_small_table(model) and (rows := round_weight(embedding.weight, 8)) is not None:
        if head is not None and getattr(head, "weight", None) is embedding.weight:
            replace_linear(model, next(name for name, module in model.named_modules() if module is head), rows)
        factor, dtype = getattr(embedding, "embed_scale", None), embedding.weight.dtype
        if factor is None:
            model.set_input_embeddings(GroupedEmbedding(rows, dtype).eval())
        else:
            model.set_input_embeddings(ScaledEmbedding(rows, dtype, torch.as_tensor(factor)).eval())
    small = {id(layer): layer.bits for layer in model.modules() if isinstance(layer, GroupedLinear)}
    plain = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    logger.info(
        "weights: %d linear layers and tables of 8 bits, %d of 4; all weights take %.3g GB%s",
        sum(bits == 8 for bits in small.values()),
        sum(bits == 4 for bits in small.values()),
        model.get_memory_footprint() / 1e9,
        f"; {len(plain)} stay plain ({', '.join(plain[:3])}{', ...' if plain[3:] else ''})" if plain else "",
    )


def _has_small_table(model: Any) -> bool:
    """Whether the embeddings, and a head that is tied to them, become small."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.embedding_dim % GROUP or not _computes_rows(embedding):
        return False
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if module is embedding}
    if names & read_directly(model, tables=True):
        return False
    if getattr(head, "weight", None) is not embedding.weight:
        return True
    own = {name.rpartition(".")[2] for name, module in model.named_modules() if module is head}
    return _fits(head) and not own & read_directly(model)


def _fits(layer: Any) -> bool:
    """Whether a layer computes `x @ weight.T + bias`, and has whole groups of inputs."""
    kind: Any = type(layer)
    return _computes_product(kind) and layer.weight.shape[0 if kind is Conv1D else 1] % GROUP == 0


@cache
def _computes_product(kind: Any) -> bool:
    """Whether a class is that of linear layers: a subclass, such as Falcon's, is tried with a small layer."""
    if kind in (nn.Linear, Conv1D) or not issubclass(kind, nn.Linear):
        return kind in (nn.Linear, Conv1D)
    try:
        with torch.device("cpu"):  # a loader may have set another one
            layer: Any = kind(6, 4, bias=False, dtype=torch.float32)
            x = torch.linspace(-1, 1, 6)[None]
            return {*layer.state_dict()} == {"weight"} and agree(nn.functional.linear(x, layer.weight), layer(x))
    except Exception:  # it is made of something else
        return False


@torch.inference_mode()
def _computes_rows(embedding: Any) -> bool:
    """Whether a module returns rows of its table, times its factor if it has one: tried with some rows."""
    if embedding.weight.is_meta:
        return type(embedding) is nn.Embedding or hasattr(embedding, "embed_scale")
    factor = getattr(embedding, "embed_scale", None)
    rows = embedding.weight[:4]
    expected = rows if factor is None else rows * torch.as_tensor(factor).to(rows.dtype)
    return torch.equal(embedding(torch.arange(len(rows), device=rows.device)), expected)


# --- speed -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def compare_speed(model: Any) -> None:
    """Say in the log how fast small layers of a model are beside plain ones of its dtype, which are made for it."""
    layers: list[GroupedLinear] = []
    num_weights = 0
    for layer in model.modules():
        if isinstance(layer, GroupedLinear):
            num_weights += layer.in_features * layer.out_features
            if num_weights <= TIMED_WEIGHTS:
                layers.append(layer)
    if not layers:
        return
    plain = [partial(nn.functional.linear, weight=layer.widened().to(model.dtype)) for layer in layers]
    gains = []
    for num_rows in TIMED_ROWS:
        inputs = [torch.randn(num_rows, layer.in_features, device="cpu").to(model.dtype) for layer in layers]
        gains.append(_seconds(plain, inputs) / _seconds(layers, inputs))
    is_slower = max(gains) < 1
    logger.log(
        logging.WARNING if is_slower else logging.INFO,
        "small weights are %.2f times as fast as plain ones for %d row and %.2f times for %d rows%s",
        *(number for pair in zip(gains, TIMED_ROWS, strict=True) for number in pair),
        ": they are only smaller here, unless other work disturbed the timing" if is_slower else "",
    )


def _seconds(ways: Sequence[Callable[[torch.Tensor], torch.Tensor]], inputs: Sequence[torch.Tensor]) -> float:
    """The best of three runs behind a first one, fewer if they take long."""
    best, started = float("inf"), time.perf_counter()
    for number in range(4):
        begun = time.perf_counter()
        for way, x in zip(ways, inputs, strict=True):
            way(x)
        if number:
            best = min(best, time.perf_counter() - begun)
            if time.perf_counter() - started > 0.2:  # s
                break
    return best
