# SPDX-License-Identifier: Apache-2.0
"""Limits that control groups set for this process: a container's memory and cores, cgroups(7)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

PROC: Final = Path("/proc")
"""The process file system, see proc(5)."""


def core_quota(proc: Path = PROC) -> float:
    """Cores whose time the control groups allow this process: a whole number, 1 at least, or infinity."""
    quota = min(_quotas(proc), default=math.inf)
    return quota if math.isinf(quota) else max(1, int(quota))


def _quotas(proc: Path) -> Iterator[float]:
    for is_v2, group in group_folders("cpu", proc):
        if is_v2:
            limits = re.match(r"(\d+) (0*[1-9]\d*)$", read_text(group / "cpu.max"))
            if limits:
                yield int(limits[1]) / int(limits[2])
        else:
            limit, period = read_number(group / "cpu.cfs_quota_us"), read_number(group / "cpu.cfs_period_us")
            if limit is not None and period:
                yield limit / period


def group_folders(controller: str, proc: Path = PROC) -> Iterator[tuple[bool, Path]]:
    """The process's groups (`memory`, `cpu`), its own and visible parents: whether of version 2, and the folder."""
    paths = _paths(controller, proc)
    for is_v2, root, mount in _mounts(controller, proc):
        path = paths.get(is_v2, root)
        # In a container the path may be the host's, and the mount the container's own group.
        is_inside = path.is_relative_to(root) and ".." not in path.parts
        folder = mount / path.relative_to(root) if is_inside else mount
        for group in (folder, *folder.parents):
            yield is_v2, group
            if group == mount:
                break


def read_number(file: Path) -> int | None:
    """A file's number; None if it cannot be read or holds something else, such as "max"."""
    content = read_text(file).strip()
    return int(content) if content.isdecimal() else None


def read_text(file: Path) -> str:
    """A file's content, which may hold the bytes of any file name; empty if it cannot be read."""
    try:
        return os.fsdecode(file.read_bytes())
    except OSError:
        return ""


def _paths(controller: str, proc: Path) -> dict[bool, PurePosixPath]:
    """The path of the process's group in version 2 (True), and in the controller's hierarchy of version 1 (False)."""
    paths = {}
    for line in read_text(proc / "self" / "cgroup").split("\n"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" or controller in controllers.split(","):
            paths[hierarchy == "0"] = PurePosixPath(path)
    return paths


def _mounts(controller: str, proc: Path) -> Iterator[tuple[bool, PurePosixPath, Path]]:
    """The mounts of control groups: whether version 2, the group at the mount's root, the mount's folder."""
    for line in read_text(proc / "self" / "mountinfo").split("\n"):  # a name may hold any other line break
        fields, _, rest = line.partition(" - ")
        words = rest.split(" ")
        kind, options = words[0], words[-1]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            root, mount = fields.split(" ")[3:5]
            yield kind == "cgroup2", PurePosixPath(root), Path(mount)
