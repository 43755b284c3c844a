# SPDX-License-Identifier: Apache-2.0
"""HAProxy with a configuration of deploy/, before servers of a test."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.client import post
from tests.support.gateway import wait_until
from tests.support.paths import ROOT

CONFIGS = ROOT / "deploy" / "haproxy"
PROGRAMS = ROOT / ".venv" / "programs"  # of programs.sh
PATH = os.pathsep.join([str(PROGRAMS / "bin"), os.environ["PATH"]])
ENVIRONMENT = {**os.environ, "PATH": PATH, "LD_LIBRARY_PATH": str(PROGRAMS / "lib")}
HAPROXY = shutil.which("haproxy", path=PATH)
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
PORT = re.compile(r"(?<=[ }1]:)\d{4}\b")
SOCKET = "/tmp/haproxy.sock"


@dataclass(frozen=True)
class Front:
    """A port of HAProxy."""

    http_url: str


@contextlib.contextmanager
def haproxy(name: str, folder: Path, ports: Mapping[int, int]) -> Iterator[None]:
    """HAProxy with a configuration whose ports are replaced by others of this machine.

    Its log is the file `log` of `folder`, and its socket `haproxy.sock`.
    """
    assert HAPROXY is not None
    text = (CONFIGS / name).read_text(encoding="utf-8").replace(SOCKET, str(folder / "haproxy.sock"))
    (folder / name).write_text(PORT.sub(lambda match: str(ports.get(int(match[0]), match[0])), text))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([HAPROXY, "-f", folder / name], stdout=log, stderr=log, env=ENVIRONMENT)
    try:
        wait_until(lambda: all(answers(Front(f"http://127.0.0.1:{ports[port]}")) for port in (8080, 8081)))
        yield
    finally:
        process.terminate()
        process.wait(30)


def answers(front: Front) -> bool:
    with contextlib.suppress(OSError):
        return post(front, "/nothing", {}).status > 0
    return False
