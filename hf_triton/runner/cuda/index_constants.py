# SPDX-License-Identifier: Apache-2.0
"""Index lists in a model's forward, kept on the device.

`x[..., [-1], :]`, as Falcon has it, copies the list to the device at each call, and the host waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class IndexConstants(TorchFunctionMode):
    """While it is entered, a list of numbers among a CUDA tensor's indices becomes a tensor, the same at each call."""

    def __init__(self) -> None:
        super().__init__()
        self._constants: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}

    @property
    def is_used(self) -> bool:
        """Whether a list was among the indices."""
        return bool(self._constants)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every one of its functions."""
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if tensor.is_cuda and any(map(_is_constant, parts)):
                device = tensor.device
                args = tensor, tuple(self._on_device(part, device) if _is_constant(part) else part for part in parts)
        return func(*args, **(kwargs or {}))

    def _on_device(self, numbers: list[int], device: torch.device) -> torch.Tensor:
        key = device, tuple(numbers)
        if key not in self._constants:
            self._constants[key] = torch.tensor(numbers, device=device)
        return self._constants[key]


class KeptIndexConstants:
    """`IndexConstants`, but for models whose first forward has no such list: it costs each torch call a microsecond."""

    def __init__(self) -> None:
        self._mode: IndexConstants | None = IndexConstants()

    def __enter__(self) -> None:
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(error_type, error, traceback)  # type: ignore[no-untyped-call]
            if not self._mode.is_used and error is None:
                self._mode = None


def _is_constant(index: object) -> bool:
    return isinstance(index, list) and bool(index) and all(type(number) is int for number in index)
