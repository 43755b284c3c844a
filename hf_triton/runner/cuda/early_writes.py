# SPDX-License-Identifier: Apache-2.0
"""Keys and values that the kernel which rotates keys writes to their blocks, before the cache's `update` gets them.

A trial finds the layers whose `update` gets the very key that a rotation has returned, to which nothing was written and
behind which no module was called, and a value that is a view of one module's output. That module then tells the cache
of its output, and the next rotation writes key and value to the blocks. The rotated key is returned as ever. `update`
passes over its write if it gets these two tensors, else it writes over them: their slots are the step's own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import DynamicCache

from hf_triton.runner.calling import cache_name
from hf_triton.runner.cuda.fused_operations import rotary
from hf_triton.runner.paged_cache import PagedCache, PagedLayer, is_same
from hf_triton.runner.seen_calls import see_calls
from hf_triton.runner.step_attention import cache_of_thread


@dataclass(frozen=True)
class ValueHook:
    """Tells the thread's cache the value that a module has computed; a forward hook."""

    layer: int
    first: int
    """The column of the module's output where the value begins."""
    num_heads: int
    size: int

    def __call__(self, module: Any, arguments: Any, output: torch.Tensor) -> None:
        cache = cache_of_thread()
        if isinstance(cache, PagedCache) and output.ndim == 3:  # adapters flatten a layer's input
            cache.coming_value = self.layer, self.value_of(output)

    def value_of(self, output: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, tokens, size]`, a view."""
        columns = output[..., self.first : self.first + self.num_heads * self.size]
        return columns.view(*output.shape[:2], self.num_heads, self.size).transpose(1, 2)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary`, which also writes key and value to the blocks of the layer whose value has been told."""
    cache = cache_of_thread()
    if not isinstance(cache, PagedCache) or cache.coming_value is None:
        return rotary(query, key, cos, sin)
    (number, value), cache.coming_value = cache.coming_value, None
    layer = cache.layers[number] if number < len(cache.layers) else None
    if not isinstance(layer, PagedLayer) or not layer.takes_early(key, value):
        return rotary(query, key, cos, sin)
    assert layer.blocks is not None
    places = cache.step.device_step(key.device).places()
    rotated = rotary(query, key, cos, sin, value, layer.blocks.keys, layer.blocks.values, *places)
    layer.early = rotated[1], value
    return rotated


class _Trial(TorchFunctionMode):
    """Keeps the key of the last rotation, until a module is called."""

    key: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.hf_triton.rotary:
            self.key = output[1]
        return output

    def forget(self, *_: Any) -> None:
        self.key = None


@torch.no_grad()
def write_early(model: Any) -> int:
    """Have rotations of a model write to blocks where a trial allows it; in how many layers."""
    trial, values = _Trial(), []
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    own = cache.update

    def update(key: torch.Tensor, value: torch.Tensor, layer: int, *arguments: Any, **options: Any) -> Any:
        if key is trial.key and key._version == value._version == 0 and value.ndim == 4:
            values.append((layer, value))
        return own(key, value, layer, *arguments, **options)

    cache.update = update  # type: ignore[method-assign, assignment]
    hooks = [module.register_forward_pre_hook(trial.forget) for module in model.modules()]
    try:
        with trial:
            calls = see_calls(model, **{cache_name(model): cache})
    finally:
        for hook in hooks:
            hook.remove()
    num_calls = Counter(id(call.module) for call in calls)
    num_updates = Counter(layer for layer, _ in values)
    count = 0
    for layer, value in values:
        tellers = ((call.module, told) for call in calls if (told := _hook_for(call.output, layer, value)))
        module, told = next(tellers, (None, None))  # inner modules end first
        if module is not None and num_calls[id(module)] == num_updates[layer] == 1:
            module.register_forward_hook(told)
            count += 1
    return count


def _hook_for(output: Any, layer: int, value: torch.Tensor) -> ValueHook | None:
    """The hook of a module whose output the value of a layer is a view of; None: it is not."""
    if not isinstance(output, torch.Tensor) or output.ndim != 3 or output.dtype != value.dtype:
        return None
    first, left = divmod(value.data_ptr() - output.data_ptr(), output.element_size())
    num_heads, size = value.shape[1], value.shape[3]
    if left or not 0 <= first <= output.shape[2] - num_heads * size:
        return None
    hook = ValueHook(layer, first, num_heads, size)
    return hook if is_same(hook.value_of(output), value) else None
