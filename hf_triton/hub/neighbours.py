# SPDX-License-Identifier: Apache-2.0
"""Which part of a GPU's memory an instance may take, by the folders of its model repository that place instances there.

Counts instances and reads no checkpoint: a GPU is shared equally, whatever the sizes of the models. Whether a folder is
loaded is not known either, so each counts; one whose config.pbtxt cannot be read counts as one instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_triton.hub.config_text import Fields, parse_config_text
from hf_triton.runner.gpu_memory import WHOLE_GPU, GpuPart

CONFIG = "config.pbtxt"
FRACTION = "gpu_memory_fraction"


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

    def num_instances(self, gpu: int) -> int:
        """Of its instances, those on a GPU."""
        return sum(group.count for group in self.groups if group.is_on(gpu))


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
    own, others = _read(folder), list(_others(folder))
    named = {number for each in (own, *others) for group in each.groups for number in group.gpus}
    gpus = sorted(named) or [0] if gpu is None else [gpu]
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
        folders = sorted(path for path in own.parent.iterdir() if path.name != own.name and path.is_dir())
    except OSError:
        return
    yield from (_read(folder) for folder in folders if _is_model(folder))


def _is_model(folder: Path) -> bool:
    """Whether it has a config.pbtxt or a version; a folder that cannot be looked into may have."""
    try:
        return any(path.name == CONFIG or path.name.isdecimal() for path in folder.iterdir())
    except OSError:
        return True


def _read(folder: Path) -> _Folder:
    try:
        fields = parse_config_text((folder / CONFIG).read_text(errors="replace"))
        if fields.get("platform") == ["ensemble"]:
            return _Folder(folder.name, groups=())  # its steps are other folders' models
        if "instance_group" not in fields:
            return _Folder(folder.name, fraction=_fraction(fields))
        groups = (_group(group) for group in fields["instance_group"] if group.get("kind") != ["KIND_CPU"])
        return _Folder(folder.name, tuple(groups), _fraction(fields))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return _Folder(folder.name)


def _group(fields: Fields) -> _Group:
    count = int(fields.get("count", ["1"])[-1])
    return _Group(max(1, count), frozenset(int(number) for number in fields.get("gpus", ())))


def _fraction(fields: Fields) -> float | None:
    for parameter in fields.get("parameters", ()):
        if parameter["key"] == [FRACTION]:
            return float(parameter["value"][0]["string_value"][0])
    return None
