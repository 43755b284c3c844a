# SPDX-License-Identifier: Apache-2.0
"""Shares a GPU's memory among the instances that the folders of a model repository place there.

Counts instances and reads no checkpoint: a GPU is shared equally, whatever the sizes of the models. Whether a folder is
loaded is not known either, so each counts; one whose config.pbtxt cannot be read counts as one instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hf_triton.hub.config_text import Fields, parse_config_text
from hf_triton.protocol.names import MODEL_SETTINGS
from hf_triton.runner.gpu_memory import WHOLE_GPU, GpuPart

CONFIG = "config.pbtxt"
FRACTION = "gpu_memory_fraction"
DOOR_SUFFIX = "_stream"
"""The end of a stream door's name, unless its setting `stream_of` says whose it is."""


@dataclass(frozen=True)
class _Group:
    """Instances of a folder that use GPUs."""

    count: int = 1
    gpus: frozenset[int] = frozenset()
    """None: each has so many, or all have them together."""

    def is_on(self, gpu: int) -> bool:
        return not self.gpus or gpu in self.gpus


@dataclass(frozen=True)
class _Folder:
    """A folder of the repository."""

    name: str
    groups: tuple[_Group, ...] = (_Group(),)
    fraction: float | None = None
    """Its setting `gpu_memory_fraction`, of each instance."""
    num_versions: int = 1
    """How many Triton loads at a time; each has all instances."""

    def num_instances(self, gpu: int) -> int:
        return self.num_versions * sum(group.count for group in self.groups if group.is_on(gpu))


def gpu_part(folder: Path, gpu: int | None, fraction: float | None) -> GpuPart:
    """The part of a GPU's memory that an instance of a model folder may take.

    Instances of folders that set `gpu_memory_fraction` have that; the others share the rest equally.

    Args:
        folder: In its model repository.
        gpu: The number of the GPU; None: all, of which the one with the most instances decides.
        fraction: The folder's setting `gpu_memory_fraction`.
    """
    if fraction is not None:
        return GpuPart(fraction, is_set=True, reason=f"{FRACTION} {fraction:g}")
    own, others = replace(_read(folder), fraction=None), list(_others(folder))  # Triton may load another config
    if gpu is None:
        named = {number for each in (own, *others) for group in each.groups for number in group.gpus} or {0}
        gpus = [number for number in sorted(named) if own.num_instances(number)] or sorted(named)
    else:
        gpus = [gpu]
    return min((_part_of(own, others, each) for each in gpus), key=lambda part: part.fraction)


def _part_of(own: _Folder, others: list[_Folder], gpu: int) -> GpuPart:
    counts = {folder: count for folder in others if (count := folder.num_instances(gpu))}
    counts[own] = max(1, own.num_instances(gpu))
    if sum(counts.values()) == 1:
        return WHOLE_GPU
    rest = 1 - sum(folder.fraction * count for folder, count in counts.items() if folder.fraction is not None)
    num_sharing = sum(count for folder, count in counts.items() if folder.fraction is None)
    words = ", ".join(
        f"{folder.name} {count}" + (f" of {FRACTION} {folder.fraction:g}" if folder.fraction is not None else "")
        for folder, count in sorted(counts.items(), key=lambda pair: pair[0].name)
    )
    return GpuPart(max(0.0, rest / num_sharing), reason=f"instances on this GPU: {words}")


def _others(own: Path) -> Iterator[_Folder]:
    """The other folders of a repository that Triton takes for models."""
    try:
        folders = sorted(path for path in own.parent.iterdir() if path.name != own.name)
    except OSError:
        return
    yield from (_read(folder) for folder in folders if _is_model(folder))


def _is_model(folder: Path) -> bool:
    """Whether it has a config.pbtxt or a version; a folder that cannot be looked into may have."""
    try:
        return any(path.name == CONFIG or path.name.isdecimal() for path in folder.iterdir())
    except PermissionError:
        return True
    except OSError:  # a file, a link to nothing, or a folder that has just been moved
        return False


def _read(folder: Path) -> _Folder:
    try:
        fields = parse_config_text((folder / CONFIG).read_text(errors="replace"))
        if fields.get("platform") == ["ensemble"]:
            return _Folder(folder.name, groups=())  # its steps are other folders' models
        parameters = _parameters(fields)
        if _is_stream_door(folder.name, fields, parameters):
            return _Folder(folder.name, groups=())
        groups: tuple[_Group, ...] = (_Group(),)
        if "instance_group" in fields:
            groups = tuple(map(_group, (each for each in fields["instance_group"] if each.get("kind") != ["KIND_CPU"])))
        return _Folder(folder.name, groups, _fraction(parameters), _num_versions(folder, fields))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return _Folder(folder.name)


def _group(fields: Fields) -> _Group:
    count = int(fields.get("count", ["1"])[-1])
    return _Group(max(1, count), frozenset(int(number) for number in fields.get("gpus", ())))


def _parameters(fields: Fields) -> dict[str, str]:
    return {each["key"][-1]: each["value"][-1]["string_value"][-1] for each in fields.get("parameters", ())}


def _fraction(parameters: dict[str, str]) -> float | None:
    """The setting; None if it is not given, or is one with which the folder cannot be loaded."""
    try:
        fraction = float(parameters.get(FRACTION, "0"))
    except ValueError:
        return None
    return fraction if 0 < fraction <= 1 else None


def _is_stream_door(name: str, fields: Fields, parameters: dict[str, str]) -> bool:
    """Whether a folder streams from another's engine: it has no weights, wherever its instance is."""
    policies = fields.get("model_transaction_policy", ())
    is_decoupled = any(policy.get("decoupled", [""])[-1] in ("true", "True", "t", "1") for policy in policies)
    is_named = "stream_of" in parameters or name.endswith(DOOR_SUFFIX)
    return is_decoupled and is_named and parameters.keys().isdisjoint(MODEL_SETTINGS)


def _num_versions(folder: Path, fields: Fields) -> int:
    """How many versions the `version_policy` loads, of those that are there; by default the latest."""
    policy = fields.get("version_policy", [{}])[-1]
    versions = {int(path.name) for path in folder.iterdir() if path.name.isdecimal()}
    if "specific" in policy:
        versions &= set(map(int, policy["specific"][-1].get("versions", ())))
    elif "all" not in policy:
        latest = policy.get("latest", [{}])[-1]
        return max(1, min(len(versions), int(latest.get("num_versions", ["1"])[-1])))
    return max(1, len(versions))
