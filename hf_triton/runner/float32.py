# SPDX-License-Identifier: Apache-2.0
"""Forwards of a half-precision model in float32, a layer at a time, so that memory holds one layer more.

In half precision the rounding of a deep model is larger than many faults are; in float32 it is a thousandth of them.
Knows nothing of what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

HALF: Final = (torch.bfloat16, torch.float16)

_is_entered: ContextVar[bool] = ContextVar("in_float32", default=False)

Saved = list[tuple[dict[str, Any], str, torch.Tensor]]
"""Tensors to put back, with where they belong."""


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While it is entered, a model's forwards compute in float32; its parameters are the same tensors afterwards.

    The half-precision weights of a layer are cast when it begins and put back when it ends, whether or not it raises. A
    layer is a member of a `ModuleList`; what is outside of all of these is cast module by module. Quantised weights are
    dequantised, or keep their type if they cannot be, and are then given inputs of it. For one thread, while no
    other one runs the model.
    """
    layers = list(layers_of(model))
    inside = {id(module) for layer in layers for module in layer.modules()}
    units = [_Unit(layer, list(layer.modules())) for layer in layers]
    units += [_Unit(module, [module]) for module in model.modules() if id(module) not in inside]
    handles = [handle for unit in units if unit.has_half for handle in unit.hook()]
    handles += [handle for module in model.modules() for handle in _hook_opaque(module)]
    computing: list[tuple[Any, torch.dtype]]
    computing = [(vars(module), vars(module)["compute_dtype"]) for module in model.modules() if _computes_half(module)]
    eights = [(module, _forward_name(module)) for module in model.modules() if _is_fp8(module) or is_small(module)]
    forwards = [vars(module).get(name) for module, name in eights]
    entered = _is_entered.set(True)
    try:
        for attributes, _ in computing:  # of a layer of bitsandbytes
            attributes["compute_dtype"] = torch.float32
        for module, name in eights:
            vars(module)[name] = partial(_dequantised, module)
        with _full_precision():
            yield
    finally:
        _is_entered.reset(entered)
        for attributes, dtype in computing:
            attributes["compute_dtype"] = dtype
        for (module, name), forward in zip(eights, forwards, strict=True):
            vars(module).pop(name, None)
            if forward is not None:
                vars(module)[name] = forward
        for handle in handles:
            handle.remove()
        for unit in units:
            unit.restore_all()


def is_in_float32() -> bool:
    """Whether `in_float32` is entered here."""
    return _is_entered.get()


def largest_layer_bytes(model: nn.Module) -> int:
    """What `in_float32` takes at a time, in bytes."""
    layers = list(layers_of(model))
    inside = {id(module) for layer in layers for module in layer.modules()}
    units = [list(layer.modules()) for layer in layers]
    units += [[module] for module in model.modules() if id(module) not in inside and type(module) is not nn.Embedding]
    return max((4 * sum(own.numel() for _, _, own in _half_tensors(modules)) for modules in units), default=0)


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of modules that are in no other member."""
    members = [each for module in model.modules() if isinstance(module, nn.ModuleList) for each in module]
    inner = {id(module) for each in members for module in each.modules() if module is not each}
    yield from {id(each): each for each in members if id(each) not in inner}.values()


@dataclass
class _Unit:
    """Modules whose weights are cast together, while the first of them computes."""

    module: nn.Module
    modules: list[nn.Module]
    stacks: list[Saved] = field(default_factory=list)
    """Each forward that runs has one: a shared layer may be within itself."""

    @property
    def has_half(self) -> bool:
        return next(_half_tensors(self.modules), None) is not None

    def hook(self) -> Iterator[Any]:
        if type(self.module) is nn.Embedding:  # rows are cast behind it: a table is the largest weight of many models
            yield self.module.register_forward_hook(_cast_output)
            return
        yield self.module.register_forward_pre_hook(self._cast, with_kwargs=True)
        yield self.module.register_forward_hook(self._restore, always_call=True)

    def _cast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        saved: Saved = []
        self.stacks.append(saved)
        for owner, name, tensor in list(_half_tensors(self.modules)):
            saved.append((owner, name, tensor))
            owner[name] = _to_float32(tensor)
        return tuple(map(_up, args)), {name: _up(value) for name, value in kwargs.items()}

    def _restore(self, *_: Any) -> None:
        if self.stacks:
            for owner, name, tensor in self.stacks.pop():
                owner[name] = tensor

    def restore_all(self) -> None:
        while self.stacks:
            self._restore()


def _half_tensors(modules: list[nn.Module]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Half-precision parameters and buffers that can be cast, each with its dictionary and its name there."""
    for module in modules:
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None and tensor.dtype in HALF and not _is_opaque(tensor):
                    yield owner, name, tensor


def _is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class computes in its own way, and cannot be dequantised."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) or type(tensor).__name__ == "DTensor"
    return not is_plain and not _is_quantized(tensor)


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor of another package gives its weights (torchao)."""
    return type(tensor).__module__.partition(".")[0] != "torch" and callable(getattr(tensor, "dequantize", None))


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # weights split over processes cannot be made in that mode
        own: Any = tensor.detach()
        if _is_quantized(tensor):
            own = own.dequantize()
        elif own.is_mkldnn:
            own = own.to_dense()
        own = own.float()
        return nn.Parameter(own, requires_grad=False) if isinstance(tensor, nn.Parameter) else own


def _up(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


def _cast_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    return _up(output)


def _hook_opaque(module: nn.Module) -> Iterator[Any]:
    """Hooks of a module whose weights keep their type: its inputs are cast down to it, its output up again."""
    tensors = chain(module._parameters.values(), module._buffers.values())
    own = next((each for each in tensors if each is not None and each.dtype in HALF and _is_opaque(each)), None)
    if own is None:
        return
    dtype = own.dtype

    def down(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(map(down, args)), {name: down(value) for name, value in kwargs.items()}

    yield module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    yield module.register_forward_hook(_cast_output)


def is_small(module: nn.Module) -> bool:
    """Whether it is a linear layer of few bits, which gives its weights."""
    return hasattr(module, "widened") and hasattr(module, "in_features")


def _is_fp8(module: nn.Module) -> bool:
    """Whether it is a linear layer that rounds its input to 8 bits, which magnifies differences.

    Of compressed-tensors it has a scale for each output, or one for all; of transformers one for each block.
    """
    weight, names = module._parameters.get("weight"), {"weight_scale", "weight_scale_inv"}
    is_linear = isinstance(module, nn.Linear) and bool(names & module._parameters.keys())
    return is_linear and weight is not None and weight.dtype == torch.float8_e4m3fn


def _forward_name(module: nn.Module) -> str:
    """The attribute of a module's forward, inside accelerate's hooks (a model on several devices)."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _dequantised(module: Any, states: torch.Tensor) -> torch.Tensor:
    """A layer's product with its weights in float32."""
    bias = None if module.bias is None else module.bias.float()
    if is_small(module):
        return nn.functional.linear(states.float(), module.widened(), bias)
    blocks = module._parameters.get("weight_scale_inv")
    if blocks is None:
        scale = module.weight_scale.float().view(-1, 1)
    else:
        scale = blocks.float()
        for axis, size in enumerate(module.block_size or ()):  # the last block may be cut
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, module.weight.shape[axis])
    weight = module.weight.float() * scale
    return nn.functional.linear(states.float(), weight, bias)


def _computes_half(module: nn.Module) -> bool:
    return vars(module).get("compute_dtype") in HALF


@contextmanager
def _full_precision() -> Iterator[None]:
    """Turn off TF32, which keeps 10 bits."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution
