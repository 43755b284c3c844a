# SPDX-License-Identifier: Apache-2.0
"""The calls of a model's modules in one forward: which tensor goes where is seen, not guessed from names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

NUM_TOKENS: Final = 3


@dataclass(frozen=True)
class Call:
    """One call of a module; its tensors are kept, so that none has the identity of another."""

    module: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    versions: tuple[int, ...]
    """How often each argument had been written to when the call began; -1: it is no tensor."""
    output: Any


@torch.no_grad()
def see_calls(model: Any, **options: Any) -> list[Call]:
    """All calls in a forward of a few tokens, with `options`, in the order of their ends; raises as the model."""
    calls: list[Call] = []
    begun: dict[int, list[tuple[int, ...]]] = {}

    def begin(module: Any, arguments: tuple[Any, ...]) -> None:
        begun.setdefault(id(module), []).append(tuple(map(_version, arguments)))

    def end(module: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        calls.append(Call(module, arguments, options, begun[id(module)].pop(), output))

    hooks = [module.register_forward_pre_hook(begin) for module in model.modules()]
    hooks += [module.register_forward_hook(end, with_kwargs=True) for module in model.modules()]
    try:
        numbers = torch.arange(NUM_TOKENS, device=model.get_input_embeddings().weight.device)
        model(input_ids=numbers[None] % model.get_input_embeddings().num_embeddings, **options)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _version(argument: Any) -> int:
    return argument._version if isinstance(argument, torch.Tensor) and not argument.is_inference() else -1
