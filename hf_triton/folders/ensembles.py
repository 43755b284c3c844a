# SPDX-License-Identifier: Apache-2.0
"""Whether the models that an ensemble joins fit together, as far as their folders say. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_triton.errors import HfTritonError
from hf_triton.folders.doors import own_names
from hf_triton.folders.folders import as_json, load_folder_settings, parse_message
from hf_triton.folders.own_code import own_class
from hf_triton.hub.locate import Hub
from hf_triton.protocol.declared_ports import missing_ports
from hf_triton.protocol.task_declaration import missing_task_ports
from hf_triton.protocol.validation import suggest
from hf_triton.settings import ModelSettings
from hf_triton.tasks.registry import folder_task

ANY = -1
"""A dimension of any size."""


@dataclass(frozen=True)
class Port:
    """An input or output of a model, or of an ensemble."""

    place: str
    """The model that it is of, for messages."""
    data_type: str
    dims: list[int]
    is_batched: bool
    """Whether a batch dimension stands before `dims`."""
    is_optional: bool = False

    def fits(self, other: Port) -> bool:
        """Whether Triton passes tensors from one to the other: shapes fit without their batch dimensions, or with."""
        return _fit(self.dims, other.dims) or _fit(self._all_dims, other._all_dims)

    @property
    def _all_dims(self) -> list[int]:
        return [ANY, *self.dims] if self.is_batched else self.dims

    def __str__(self) -> str:
        return f"{self.place} ({self.data_type} {self._all_dims})"


Ports = Mapping[str, Port]


@dataclass(frozen=True)
class Known:
    """What is known of a model's ports."""

    inputs: Ports
    outputs: Ports
    is_complete: bool
    """Whether it has no others; other backends may add some at load."""


def misfits(folder: Path) -> Iterator[str]:
    """What does not fit in an ensemble, a sentence each; of models whose ports are not known, nothing is said.

    Raises:
        SettingsError: Triton cannot read the config.
    """
    message = parse_message(folder)
    inputs, outputs = _ports(as_json(message), "the ensemble")
    tensors: dict[str, Port | None] = dict(inputs)
    steps = [(step, _model_ports(folder.parent / step.model_name)) for step in message.ensemble_scheduling.step]
    for step, known in steps:
        for name, tensor in step.output_map.items():
            tensors[tensor] = known.outputs.get(name)
            if known.is_complete and name not in known.outputs:
                yield f"{step.model_name} has no output '{name}'{suggest(name, known.outputs)}"
    for step, known in steps:
        for name, tensor in step.input_map.items():
            if tensor not in tensors:
                yield f"nothing gives the tensor '{tensor}', which {step.model_name} takes as {name}"
            elif name in known.inputs:
                yield from _compare(tensor, tensors[tensor], known.inputs[name])
            elif known.is_complete:
                yield f"{step.model_name} has no input '{name}'{suggest(name, known.inputs)}"
        for name, port in known.inputs.items():
            if name not in step.input_map and not port.is_optional:
                yield f"nothing is mapped to the input '{name}' of {step.model_name}"
    for name, port in outputs.items():
        if name not in tensors:
            yield f"nothing gives the output '{name}'"
        else:
            yield from _compare(name, tensors[name], port)


def _compare(tensor: str, given: Port | None, taken: Port) -> Iterator[str]:
    if given is not None and (given.data_type != taken.data_type or not given.fits(taken)):
        yield f"the tensor '{tensor}' is {given}, and does not fit {taken}"


def _fit(one: list[int], other: list[int]) -> bool:
    return len(one) == len(other) and all(a == b or ANY in (a, b) for a, b in zip(one, other, strict=True))


def _model_ports(folder: Path) -> Known:
    """A model's inputs and outputs, as far as its folder says."""
    try:
        config = {"input": [], "output": [], "max_batch_size": 0, **as_json(parse_message(folder))}
        more = _completed(folder, config) if own_names(folder) is not None else None
    except (HfTritonError, ImportError):  # the folder's own check says what is wrong
        return Known({}, {}, is_complete=False)
    for side, ports in zip(("input", "output"), more or ((), ()), strict=True):
        config[side] = [*config[side], *ports]
    return Known(*_ports(config, folder.name), is_complete=more is not None)


def _completed(
    folder: Path, config: Mapping[str, Any]
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]] | None:
    """The inputs and outputs that a folder of this library gets at load; None: its task is not known yet."""
    own = own_class(folder)
    settings = load_folder_settings(config, own.settings_class).settings
    if not isinstance(settings, ModelSettings):
        return None
    if not (own.task_class or settings.task or Hub(folder, settings, os.environ).find_config_folder()):
        return None
    task = folder_task(own.task_class, settings, folder)
    if task is None:
        return missing_ports(config, settings.parameters_as_inputs)
    return missing_task_ports(task.declaration, config, settings.parameters_as_inputs)


def _ports(config: Mapping[str, Any], owner: str) -> tuple[Ports, Ports]:
    is_batched = config.get("max_batch_size", 0) > 0
    inputs, outputs = (
        {
            port["name"]: Port(
                f"{owner}'s {side} {port['name']}",
                port["data_type"],
                list(map(int, port["dims"])),
                is_batched,
                port.get("optional", False),
            )
            for port in config.get(side, [])
        }
        for side in ("input", "output")
    )
    return inputs, outputs
