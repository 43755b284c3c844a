# SPDX-License-Identifier: Apache-2.0
"""Tells peft which LoRA adapter a row, or a token, of a layer's input has. Knows no adapter's files.

In a mixed batch a layer of peft takes a name for each element of its input's first dimension. A packed forward is one
row of tokens of many sequences: hooks flatten the input of such a layer so that its first dimension is the tokens, and
give its output the input's shape again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

NO_ADAPTER: Final = "__base__"
"""peft's name for rows without an adapter."""


class _FlatNames(list[str]):
    """A name for each token of a flattened input; the hook behind the layer finds the input's shape here."""

    def __init__(self, names: Sequence[str], shape: torch.Size) -> None:
        super().__init__(names)
        self.shape = shape


class AdapterNames:
    """Gives layers of peft a forward's adapters, `plain` to rows and tokens without one. Not thread-safe."""

    def __init__(self, model: torch.nn.Module, plain: str) -> None:
        self._model = model
        self._plain = plain
        self._chosen: str | list[str] | dict[int, list[str]] = plain
        """One name for all; or a name for each row; or, by the number of tokens that a layer sees, for each token."""
        self._hooked = weakref.WeakSet[torch.nn.Module]()

    def hook(self, layer: torch.nn.Module) -> None:
        """Name the inputs of a layer of peft from now on."""
        if layer not in self._hooked:
            layer.register_forward_pre_hook(self._name_input, with_kwargs=True)
            layer.register_forward_hook(self._restore_shape, with_kwargs=True)
            self._hooked.add(layer)

    @contextmanager
    def of_rows(self, rows: Sequence[str | None]) -> Iterator[None]:
        """Name the adapter of each row of a forward. One alone is that of all rows, and none leaves them plain."""
        names = self._named(rows or [None])
        with self._choosing(names if len(set(names)) > 1 else names[0]):
            yield

    @contextmanager
    def of_tokens(self, *lists: Sequence[str | None]) -> Iterator[None]:
        """Name the adapter of each token of a forward, in lists as long as layers see. See `Adapters.choose_tokens`.

        Raises:
            ValueError: Two lists of one length differ.
        """
        by_length: dict[int, list[str]] = {}
        for names in map(self._named, lists):
            if by_length.setdefault(len(names), names) != names:
                raise ValueError(f"two lists of {len(names)} adapters differ, and layers tell them by their lengths")
        used = set[str]().union(*by_length.values())
        with self._choosing(used.pop() if len(used) == 1 else by_length):
            yield

    @contextmanager
    def _choosing(self, names: str | list[str] | dict[int, list[str]]) -> Iterator[None]:
        self._chosen = names
        try:
            yield
        finally:
            self._chosen = self._plain

    def _named(self, names: Sequence[str | None]) -> list[str]:
        return [self._plain if name is None else name for name in names]

    def _name_input(self, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Give a layer the names of its input, which is flattened where its first dimension is not that of names."""
        x, *others = arguments
        known = layer._get_available_adapters()  # some layers of peft refuse the name of an adapter without them
        names = [name if name in known else NO_ADAPTER for name in self._names_of(layer, x)]
        if len(set(names)) <= 1:
            names = (names[:1] or [NO_ADAPTER]) * len(x)
        elif len(names) != len(x):
            names = _FlatNames(names, _places(x))
            x = x.flatten(0, len(names.shape) - 1)
        return (x, *others), {**named, "adapter_names": names}

    def _names_of(self, layer: torch.nn.Module, x: torch.Tensor) -> Sequence[str]:
        """The names for a layer's input: one, or one for each row or token."""
        chosen = self._chosen
        if isinstance(chosen, str):
            return [chosen]
        if isinstance(chosen, dict):
            num_tokens = _places(x).numel()
            if num_tokens in chosen:
                return chosen[num_tokens]
        elif len(x) % len(chosen) == 0:  # gates of a mixture flatten rows of tokens: `[rows * tokens, size]`
            return [name for name in chosen for _ in range(len(x) // len(chosen))]
        name = next(name for name, module in self._model.named_modules() if module is layer)
        lengths = " or ".join(map(str, chosen if isinstance(chosen, dict) else [len(chosen)]))
        raise RuntimeError(f"no adapter names for the input {list(x.shape)} of {name}: there are {lengths}")

    def _restore_shape(self, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        names = named["adapter_names"]
        return output.unflatten(0, names.shape) if isinstance(names, _FlatNames) else output


def _places(x: torch.Tensor) -> torch.Size:
    """The dimensions of an input that count its tokens: all but the last, or all of token ids."""
    return x.shape[:-1] if x.is_floating_point() else x.shape
