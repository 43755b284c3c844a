# SPDX-License-Identifier: Apache-2.0
"""Where the limits of this process stand that its control groups set: a container's memory and cores, cgroups(7)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

PROC: Final = Path("/proc")
"""The process file system, see proc(5)."""


def group_folders(controller: str, proc: Path = PROC) -> Iterator[tuple[bool, Path]]:
    """The process's own group and every one above it that is to be seen: whether of version 2, and its folder.

    Args:
        controller: What limits, as version 1 calls it: `memory`, `cpu`.
        proc: The process file system.
    """
    paths = _paths(controller, proc)
    for is_v2, root, mount in _mounts(controller, proc):
        path = paths.get(is_v2, root)
        # In a container the path may be one of the host's, and the mount the container's own group.
        is_inside = path.is_relative_to(root) and ".." not in path.parts
        folder = mount / path.relative_to(root) if is_inside else mount
        for group in (folder, *folder.parents):
            yield is_v2, group
            if group == mount:
                break


def number(file: Path) -> int | None:
    """A file's number; None where it cannot be read or says something else, such as "max"."""
    content = text(file).strip()
    return int(content) if content.isdecimal() else None


def text(file: Path) -> str:
    """A file's text, whose bytes may be those of any file name; empty where it cannot be read."""
    try:
        return os.fsdecode(file.read_bytes())
    except OSError:
        return ""


def _paths(controller: str, proc: Path) -> dict[bool, PurePosixPath]:
    """The path of the process's group in version 2 (True), and in the controller's hierarchy of version 1 (False)."""
    paths = {}
    for line in text(proc / "self" / "cgroup").split("\n"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" or controller in controllers.split(","):
            paths[hierarchy == "0"] = PurePosixPath(path)
    return paths


def _mounts(controller: str, proc: Path) -> Iterator[tuple[bool, PurePosixPath, Path]]:
    """Where groups are mounted: whether version 2, the group at the mount's root, the mount's folder."""
    for line in text(proc / "self" / "mountinfo").split("\n"):  # a name may hold any other line break
        fields, _, rest = line.partition(" - ")
        words = rest.split(" ")
        kind, options = words[0], words[-1]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            root, mount = fields.split(" ")[3:5]
            yield kind == "cgroup2", PurePosixPath(root), Path(mount)
