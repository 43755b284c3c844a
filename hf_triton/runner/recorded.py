# SPDX-License-Identifier: Apache-2.0
"""A forward's calls of torch, without the modules between them, which take most of a small model's step on a CPU.

Two forwards of different numbers of tokens are recorded. They become one function of the same calls in the same order;
a whole number that grows with the tokens is a multiple of theirs. What cannot be called again so, because it reads
numbers or keeps a state, fails here or in the trial of `ModelRunner.record`, and the model runs as it is. Functions
that look at the step themselves, or compute by a kernel, are one call: they begin with `handle_torch_function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

SIZES: Final = 2, 3
"""Tokens of the recorded forwards."""
NUM_ARGUMENTS: Final = 3
"""Of every forward, beside ids and positions: cache, `use_cache` and the mask. Rows of logits or images are more."""
METADATA: Final = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point"}
    | {"is_inference", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"}
)
"""Functions whose results do not depend on a tensor's numbers."""
SHAPED_BY_NUMBERS: Final = frozenset(
    {"argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"}
)
"""Functions whose results have a shape that depends on a tensor's numbers."""

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]
"""A function, its arguments and its result."""


class NotRecordableError(RuntimeError):
    """The forward is more than its calls of torch."""


class _CallRecorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of every one of its functions."""
        if torch.is_autocast_enabled("cpu"):
            raise NotRecordableError("autocast changes what its functions compute")
        if func.__name__ in SHAPED_BY_NUMBERS or _is_shaped_by_numbers(func, args, kwargs or {}):
            raise NotRecordableError(f"a tensor's numbers decide how many {func.__name__} gives")
        output = func(*args, **(kwargs or {}))
        first = output[0] if isinstance(output, tuple | list) and output else output
        if first is None or isinstance(first, torch.Tensor):
            self.calls.append((func, args, kwargs or {}, output))
        elif func.__name__ not in METADATA:
            raise NotRecordableError(f"{func.__name__} reads a tensor's numbers")
        return output


def _is_shaped_by_numbers(func: Any, args: Any, options: dict[str, Any]) -> bool:
    """Whether the numbers of these arguments decide the shape of what others leave to the arguments' shapes."""
    if func.__name__ == "where":
        return len(args) + len(options) == 1
    if func.__name__ == "repeat_interleave":
        return len(args) + len(options) == 1 or any(map(_holds_tensor, (*args[1:], *options.values())))
    if func is not torch.Tensor.__getitem__:
        return False
    places = args[1] if isinstance(args[1], tuple | list) else args[1:]
    cuts = [bound for each in places if isinstance(each, slice) for bound in (each.start, each.stop, each.step)]
    are_masks = (isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in places)
    return any(map(_holds_tensor, cuts)) or any(are_masks)


class Logits(NamedTuple):
    """The output of a forward, as far as a step needs it."""

    logits: torch.Tensor


class Recorder:
    """Stands in place of a model, and records its forwards of a row of `SIZES` tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forwards: list[tuple[tuple[torch.Tensor, ...], list[_Call], torch.Tensor]] = []

    def __call__(self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, **arguments: Any) -> Any:
        """Run the model; its calls keep their tensors, so that none has the identity of another."""
        with _CallRecorder() as recorder:
            output = self._model(input_ids=input_ids, position_ids=position_ids, **arguments)
        self._forwards.append(((input_ids, position_ids), recorder.calls, output.logits))
        return output

    def recorded(self, most: int) -> RecordedForward:
        """The calls of both forwards as one, for up to `most` tokens.

        Raises:
            NotRecordableError: They differ in more than the number of tokens.
        """
        (inputs, calls, logits), (same_inputs, same_calls, same_logits) = self._forwards
        source = _Source()
        source.target(inputs, same_inputs)
        if len(calls) != len(same_calls):
            raise NotRecordableError(f"{len(calls)} calls, or {len(same_calls)}")
        for (func, args, options, output), (same, same_args, same_options, same_output) in zip(
            calls, same_calls, strict=True
        ):
            if func != same or options.keys() != same_options.keys():
                raise NotRecordableError(f"{func.__name__}, or {same.__name__}")
            given = [source.value(*pair) for pair in zip(args, same_args, strict=True)]
            given += [f"{name}={source.value(value, same_options[name])}" for name, value in options.items()]
            call = f"{source.constant(func)}({', '.join(given)})"
            source.lines.append(f"{source.target(output, same_output)} = {call}")
        source.lines.append(f"return {source.value(logits, same_logits)}")
        return RecordedForward(self._model, source.compiled(), most)


class RecordedForward:
    """Stands in place of a model, for rows of a few tokens whose logits are all wanted."""

    def __init__(self, model: Any, compute: Callable[..., torch.Tensor], most: int) -> None:
        self._model, self._compute, self._most = model, compute, most
        self._forward, self._hook = model.forward, RemovableHandle.next_id

    def stands_for(self, model: Any) -> bool:
        """Whether it computes what a model does: its forward is the same, and no hook has come to any module."""
        is_same = model is self._model and model.forward == self._forward
        return is_same and self._hook == RemovableHandle.next_id

    def __call__(self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, **arguments: Any) -> Any:
        is_plain = len(arguments) == NUM_ARGUMENTS and position_ids.ndim == input_ids.ndim
        if not is_plain or input_ids.shape[-1] > self._most:
            return self._model(input_ids=input_ids, position_ids=position_ids, **arguments)
        return Logits(self._compute(input_ids, position_ids))


class _Source:
    """Python source of the calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._constants: dict[str, Any] = {}
        self._names: tuple[dict[int, str], dict[int, str]] = ({}, {})  # of either recording's tensors, by identity
        self._last: dict[str, int] = {}  # the line that needs a tensor last

    def constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def target(self, one: Any, other: Any) -> str:
        """What a result is assigned to."""
        if isinstance(one, tuple | list):
            return f"[{', '.join(self.target(*pair) for pair in zip(one, other, strict=True))}]"
        name = f"t{len(self._last)}"
        self._last[name] = len(self.lines)
        for names, tensor in zip(self._names, (one, other), strict=True):
            if isinstance(tensor, torch.Tensor):
                names[id(tensor)] = name
        if isinstance(one, torch.Tensor):
            for size, other_size in zip(one.shape, other.shape, strict=True):
                if size != other_size and size * SIZES[1] != other_size * SIZES[0]:
                    raise NotRecordableError(f"tensors of shapes {[*one.shape]} and {[*other.shape]}")
        return name

    def value(self, one: Any, other: Any) -> str:
        """An argument."""
        if isinstance(one, torch.Tensor):
            names = [names.get(id(tensor)) for names, tensor in zip(self._names, (one, other), strict=True)]
            if names[0] != names[1] or (names[0] is None and one is not other):
                raise NotRecordableError("a tensor that no call has made")
            if names[0] is None:
                return self.constant(one)
            self._last[names[0]] = len(self.lines)
            return names[0]
        if not any(map(_holds_tensor, (one, other))) and (one is other or one == other):
            return self.constant(one)
        if isinstance(one, tuple | list):
            parts = [f"{self.value(*pair)}, " for pair in zip(one, other, strict=True)]
            return f"[{''.join(parts)}]" if isinstance(one, list) else f"({''.join(parts)})"
        if isinstance(one, dict):
            parts = [f"{self.constant(key)}: {self.value(value, other[key])}, " for key, value in one.items()]
            return f"{{{''.join(parts)}}}"
        if isinstance(one, slice):
            bounds = ((getattr(each, name) for each in (one, other)) for name in ("start", "stop", "step"))
            return f"slice({', '.join(self.value(*pair) for pair in bounds)})"
        if type(one) is type(other) is int and one * SIZES[1] == other * SIZES[0] and one % SIZES[0] == 0:
            return f"{one // SIZES[0]} * n"
        raise NotRecordableError(f"arguments {one!r} and {other!r}")

    def compiled(self) -> Callable[..., torch.Tensor]:
        """A function of token ids and positions, which lets go of each tensor after its last use."""
        lines = ["def forward(t0, t1):", "n = t0.shape[-1]"]
        for number, line in enumerate(self.lines):
            lines.append(line)
            if done := [name for name, last in self._last.items() if last == number < len(self.lines) - 1]:
                lines.append(f"del {', '.join(done)}")
        exec("\n    ".join(lines), self._constants)
        compiled: Callable[..., torch.Tensor] = self._constants["forward"]
        return compiled


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any(map(_holds_tensor, value)))
