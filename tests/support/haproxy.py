# SPDX-License-Identifier: Apache-2.0
"""HAProxy with a configuration of deploy/, before servers of a test."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_triton.server import free_ports
from tests.support.client import post
from tests.support.gateway import wait_until
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT, PATH, program

CONFIGS = ROOT / "deploy" / "haproxy"
needs_haproxy = pytest.mark.skipif(not shutil.which("haproxy", path=PATH), reason="haproxy is not installed")
BOUND = re.compile(r"^ *bind \S*:(\d+)", re.MULTILINE)
PORT = re.compile(r"(?<=[ }1]:)\d{4}\b")
SOCKET = "/tmp/haproxy.sock"


@dataclass(frozen=True)
class Front:
    http_url: str


@contextlib.contextmanager
def haproxy(
    name: str, folder: Path, servers: Mapping[int, int], changes: Mapping[str, str] | None = None
) -> Iterator[dict[int, int]]:
    """HAProxy with a configuration, changed, before servers in place of the ports that it names.

    Its log is the file `log` of `folder`, and its socket `haproxy.sock`.

    Yields:
        The ports that it listens on, by those of the file.
    """
    text = (CONFIGS / name).read_text(encoding="utf-8")
    for old, new in {**(changes or {}), **({SOCKET: str(folder / "haproxy.sock")} if SOCKET in text else {})}.items():
        assert old in text, old
        text = text.replace(old, new)
    numbers = [int(number) for number in BOUND.findall(text)]
    bound = dict(zip(numbers, free_ports(len(numbers)), strict=True))
    ports = {**bound, **servers}
    (folder / name).write_text(PORT.sub(lambda match: str(ports.get(int(match[0]), match[0])), text))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program("haproxy"), "-f", folder / name], stdout=log, stderr=log, env=ENVIRONMENT)
    try:
        wait_until(lambda: all(answers(Front(f"http://127.0.0.1:{bound[port]}")) for port in (8080, 8081)))
        yield bound
    finally:
        process.terminate()
        process.wait(30)


def answers(front: Front) -> bool:
    with contextlib.suppress(OSError):
        return post(front, "/nothing", {}).status > 0
    return False
