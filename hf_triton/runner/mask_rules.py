# SPDX-License-Identifier: Apache-2.0
"""Keeps transformers' rule of a mask in place of the mask: which tokens a token attends to, and what it shows.

`mask_of_rule` stands in place of a mask and carries the rule unread through the model. Knows no step and no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

WHOLE: Final = (slice(None), slice(None), slice(0, None), slice(None))
"""Gemma 4 cuts the last 0 queries of a mask, which is all, if every token's logits are wanted."""
FAR: Final = 1 << 20
"""A position beyond every window: what is visible from there tells a rule's kind."""
NEAR: Final = FAR // 8
"""Windows up to this are found."""
MAX_RULES: Final = 256
"""Rules whose masks are remembered."""

MaskFunction = Callable[..., Any]
"""transformers' rule of a mask: whether a token sees another, given batch, head and both positions."""


class Window(NamedTuple):
    """What a token sees, by distance."""

    size: int
    """It sees tokens that are less than so many away, itself included; 0: all."""
    is_causal: bool
    """Whether it sees none after itself."""


class Rule(NamedTuple):
    """What a layer's tokens see."""

    function: MaskFunction
    window: Window | None
    """None: what it shows is not told by distance (Llama 4's chunks)."""

    def visible(
        self, positions: range, columns: range, device: torch.device, masks: dict[Any, torch.Tensor]
    ) -> torch.Tensor | None:
        """Tell which tokens `columns` of a sequence those at `positions` see, `[positions, columns]` bool; None: all.

        Positions decide whether it is all: looking at the mask would make the host wait for the device.
        """
        if self.window is not None and _sees_all(self.window, positions, columns):
            return None
        key = self.window or self.function, positions, columns, device
        if key not in masks:
            # Llama 4's rule has a tensor, on the device of the embedding.
            owner = next((each.device for each in _parts(self.function) if isinstance(each, torch.Tensor)), device)
            places = (torch.arange(each.start, each.stop, device=owner) for each in (positions, columns))
            mask = _evaluate(self.function, *places) if self.window is None else _within(self.window, *places)
            masks[key] = mask.to(device)
        return masks[key]


CAUSAL: Final = Rule(causal_mask_function, Window(0, is_causal=True))
BIDIRECTIONAL: Final = Rule(bidirectional_mask_function, Window(0, is_causal=False))


class MaskRule(torch.Tensor):
    """A tensor of one element in place of a mask, on the host.

    Moving it and taking all of it do nothing; any other change loses the rule.
    """

    rule: Rule

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of every function of such a tensor."""
        if func is torch.Tensor.to and isinstance(args[0], MaskRule):
            return args[0]
        if func is torch.Tensor.__getitem__ and args[1] == WHOLE:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_masks: dict[Any, MaskRule] = {}


def mask_of_rule(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> MaskRule:
    """Make a mask, as transformers calls it."""
    key = tuple(_parts(mask_function))
    if key in _masks:
        return _masks[key]
    has_tensor = any(isinstance(part, torch.Tensor) for part in key)
    with torch.device("cpu"):
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).as_subclass(MaskRule)
        # Looking at a rule's tensor would make the host wait for the device.
        mask.rule = Rule(mask_function, None if has_tensor else _find_window(mask_function))
    if not has_tensor:
        if len(_masks) >= MAX_RULES:  # some rule is another one at each forward
            _masks.clear()
        _masks[key] = mask
    return mask


def _parts(value: Any) -> Iterator[Any]:
    """A function's code and what it closes over: transformers makes the same functions at each forward."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _parts(each)
    elif hasattr(value, "__code__"):
        yield value.__code__
        if value.__closure__:
            yield from _parts([cell.cell_contents for cell in value.__closure__])
    else:
        yield value


def _find_window(function: MaskFunction) -> Window | None:
    """Find it by what a far token sees: the first one, those near it on both sides, and the same one token further."""
    columns = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(FAR - NEAR, FAR + NEAR + 1)])
    seen = _evaluate(function, torch.tensor([FAR]), columns)[0]
    is_causal = not seen[columns > FAR].any()
    for size in (0, FAR + 1 - int(columns[seen][0]) if seen.any() else 0):
        window = Window(size, is_causal)
        if torch.equal(seen, _within(window, torch.tensor([FAR]), columns)[0]):
            ends = torch.tensor([FAR + 1 - size, FAR + 2 - size])
            moves = not size or _evaluate(function, torch.tensor([FAR + 1]), ends)[0].tolist() == [False, True]
            return window if moves else None
    return None


def _evaluate(function: MaskFunction, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`[positions, columns]` bool."""
    zero = torch.zeros((1, 1), dtype=torch.int64, device=positions.device)
    seen: torch.Tensor = function(zero, zero, positions[:, None], columns[None])
    return seen.expand(len(positions), len(columns))


def _within(window: Window, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`[positions, columns]` bool."""
    distance = positions[:, None] - columns
    is_near = (distance if window.is_causal else distance.abs()) < (window.size or FAR * 2)
    return is_near & (distance >= 0) if window.is_causal else is_near


def _sees_all(window: Window, positions: range, columns: range) -> bool:
    size = window.size or math.inf
    ahead = 0 if window.is_causal else size - 1
    return columns[-1] - positions[0] <= ahead and positions[-1] - columns[0] < size
