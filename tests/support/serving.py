# SPDX-License-Identifier: Apache-2.0
"""`hf-triton` commands as processes: their output, the commands that they print, and the processes below them."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_triton.server import free_ports

COMMAND = Path(sys.executable).with_name("hf-triton")
PORTS = ("http", "grpc", "metrics", "openai")


class Serving:
    """A `hf-triton serve` process and what it has printed."""

    def __init__(
        self,
        *arguments: str,
        output: Path,
        command: Path = COMMAND,
        folder: Path | None = None,
        ports: list[int] | None = None,
        environment: Mapping[str, str] = os.environ,
        **variables: str,
    ) -> None:
        ports = ports or free_ports(len(PORTS))
        self.http_port, self.grpc_port, _, self.openai_port = ports
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [command, "serve", *port_options(ports), *arguments],
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=folder,
                env={**environment, **variables},
            )

    def wait_for(self, output: str, limit_s: float = 120.0) -> str:
        deadline = time.monotonic() + limit_s
        while output not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)
        return self.output()

    def output(self) -> str:
        return self._output.read_text()

    def descendants(self) -> list[int]:
        """All processes below this one, in any group or session."""
        return descendants(self.process.pid)


def descendants(pid: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid:
            children.append(int(stat.parent.name))
    return children + [descendant for child in children for descendant in descendants(child)]


@contextlib.contextmanager
def running(*arguments: str, output: Path, **options: Any) -> Iterator[Serving]:
    serving = Serving(*arguments, output=output, **options)
    try:
        yield serving
    finally:
        serving.process.terminate()
        serving.process.wait(timeout=60)


def port_options(ports: list[int]) -> list[str]:
    return [f"--{name}-port={port}" for name, port in zip(PORTS, ports, strict=True)]


def serve_until_exit(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "serve", *port_options(free_ports(len(PORTS))), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def wait_until_gone(pids: list[int], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def curl_lines(output: str) -> list[list[str]]:
    joined = re.sub(r"\\\n\s*", "", output)
    return [shlex.split(line) for line in joined.splitlines() if line.strip().startswith("curl ")]


def send(line: list[str]) -> str:
    return subprocess.run([*line, "--silent"], capture_output=True, text=True, check=True).stdout
