# SPDX-License-Identifier: Apache-2.0
"""A folder with the files of /proc and control groups that limit a process."""

from pathlib import Path

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


class Machine:
    """A process file system and control groups in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.groups = folder / "groups"
        (self.proc / "self").mkdir(parents=True)
        self.groups.mkdir()

    def set_available(self, mib: int) -> None:
        lines = ["MemTotal:       24684092 kB", "MemFree:            1000 kB", f"MemAvailable:   {mib * 1024} kB"]
        (self.proc / "meminfo").write_text("\n".join([*lines, "Buffers:   1 kB\n"]))

    def set_group(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines), errors="surrogateescape")

    def mount_v2(self, root: str = "/") -> None:
        self._mount(f"{root} {self.groups} rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate")

    def mount_v1(self, root: str = "/", controllers: str = "memory") -> None:
        others = "cpu,cpuacct" if controllers == "memory" else "memory"
        self._mount(f"/ {self.groups}/others rw - cgroup cgroup rw,{others}")
        self._mount(f"{root} {self.groups} rw,relatime - cgroup cgroup rw,{controllers}")

    def _mount(self, words: str) -> None:
        with (self.proc / "self" / "mountinfo").open("a") as file:
            file.write(f"24 1 0:22 / /sys rw,nosuid shared:2 - sysfs sysfs rw\n32 31 0:29 {words}\n")

    def v2(self, path: str, limit: int | None, used: int, *, inactive_file: int = 0, high: int | None = None) -> None:
        self.write(
            path,
            {
                "memory.max": "max" if limit is None else limit * MIB,
                "memory.high": "max" if high is None else high * MIB,
                "memory.current": used * MIB,
                "memory.stat": f"anon 5\nfile 9\ninactive_file {inactive_file * MIB}\nactive_file 12345678",
            },
        )

    def v1(self, path: str, limit: int | None, used: int, *, inactive_file: int = 0) -> None:
        self.write(
            path,
            {
                "memory.limit_in_bytes": UNLIMITED_V1 if limit is None else limit * MIB,
                "memory.usage_in_bytes": used * MIB,
                "memory.stat": f"cache 9\ninactive_file 77777777\ntotal_inactive_file {inactive_file * MIB}",
            },
        )

    def write(self, path: str, files: dict[str, object]) -> None:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")
