# SPDX-License-Identifier: Apache-2.0
"""docs/existing-triton.md, command by command: a tritonserver started by hand, whose own Python is another one.

Two things stand in: `tritonserver` on PATH is the wheel's, arranged as in NVIDIA's image, with the stub for Python
3.10; and pip installs hf_triton alone, beside the packages that are here.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_triton.server import _prepare_process, find_tritonserver, free_ports
from hf_triton.testing import LoopbackHub, build_tiny_checkpoint
from tests.support.paths import ROOT
from tests.support.wheel import build_wheel, clean_environment, install_wheel

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "existing-triton.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.S | re.M) for line in block.splitlines()]
ENVIRONMENT = "hf_triton_env"
LIMIT_S = 90


def lines(*beginnings: str) -> list[str]:
    return [line for line in LINES if line.startswith(beginnings)]


class Site:
    """The folder in which the page's commands run, and the ports that they get."""

    def __init__(self, root: Path, hub: LoopbackHub) -> None:
        self.root = root
        self.ports = dict(zip(("8000", "8001", "8002", "9000"), free_ports(4), strict=True))
        home = {"HF_HOME": str(root / "home"), "PATH": f"{root}/bin:/usr/bin:/bin"}
        self.environment = clean_environment() | hub.environment() | home

    def translate(self, line: str) -> str:
        for usual, port in self.ports.items():
            line = line.replace(f"localhost:{usual}", f"localhost:{port}")
        return line

    def run(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", self.translate(line)], cwd=self.root, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, line: str, *options: str) -> subprocess.Popen[bytes]:
        words = [*shlex.split(self.translate(line)), *options]
        words[0] = str(self.root / words[0]) if "/" in words[0] else words[0]
        with (self.root / f"{Path(words[0]).name}.log").open("wb") as log:
            return subprocess.Popen(
                words, cwd=self.root, env=self.environment, stdout=log, stderr=log, preexec_fn=_prepare_process
            )

    def wait_for(self, url: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(self.translate(url), timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        logs = "\n".join(path.read_text()[-3000:] for path in self.root.glob("*.log"))
        pytest.fail(f"no answer from {url}\n{logs}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with the model loaded, and a gateway beside it."""
    root = tmp_path_factory.mktemp("existing")
    with LoopbackHub() as hub:
        hub.add("Qwen/Qwen3-0.6B", build_tiny_checkpoint(root / "checkpoint", "qwen3"))
        site = Site(root, hub)
        put_server_on_path(site)
        make_environment(site)
        for line in lines("ln ", "hf_triton_env/bin/hf-triton new", "echo "):
            if "python_backend_stubs" not in line:
                site.run(line)
        for line in lines("ln "):
            if "python_backend_stubs" in line:
                site.run(line.replace("3.11", version()))
        names = ("http", "grpc", "metrics")
        ports = [f"--{name}-port={port}" for name, port in zip(names, list(site.ports.values())[:3], strict=True)]
        [server], [gateway] = lines("tritonserver"), lines("hf_triton_env/bin/hf-triton openai")
        processes = [site.start(server, *ports), site.start(gateway, "--port", str(site.ports["9000"]))]
        try:
            site.wait_for("http://localhost:8000/v2/health/live")
            yield site
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in reversed(processes):
                process.wait(60)


def version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def put_server_on_path(site: Site) -> None:
    installation = find_tritonserver(site.root)
    backend = site.root / "backends" / "python"
    stub = backend / "triton_python_backend_stub"
    stub.unlink()
    stub.symlink_to(installation.binary.parents[1] / "python_backend_stubs" / "3.10" / stub.name)
    program = site.root / "bin" / "tritonserver"
    program.parent.mkdir()
    prefix = f"--backend-config=python,shm-region-prefix-name=existing_{os.getpid()}_"
    program.write_text(f'#!/bin/sh\nexec {installation.binary} --backend-directory={backend.parent} {prefix} "$@"\n')
    program.chmod(0o755)


def make_environment(site: Site) -> None:
    [create] = lines("python3 -m venv")
    site.run(create.replace("python3 -m venv", f"{sys.executable} -m venv --without-pip"))
    install, stubs = lines(f"{ENVIRONMENT}/bin/pip install")
    wheel = build_wheel(site.root / "wheel")
    assert f"'{wheel.name}[" in install
    install_wheel(site.root / ENVIRONMENT, wheel)
    assert "nvidia-pytriton==0.7.0" in stubs
    spec = find_spec("pytriton")
    assert spec is not None
    assert spec.origin is not None
    [packages] = (site.root / ENVIRONMENT).glob("lib/python*/site-packages")
    for name in ("pytriton", "nvidia_pytriton.libs"):
        (packages / name).symlink_to(Path(spec.origin).parents[1] / name)


def test_the_folder_can_be_checked(site: Site) -> None:
    [check] = lines("hf_triton_env/bin/hf-triton check")
    assert "qwen3" in site.run(check)


def test_the_server_loads_and_answers(site: Site) -> None:
    load, generate = lines("curl -X POST localhost:8000")
    site.run(load)
    assert json.loads(site.run(generate))["text_output"].startswith("How can you be")
    log = (site.root / "tritonserver.log").read_text()
    assert "successfully loaded 'qwen3'" in log


def test_the_gateway_answers(site: Site) -> None:
    [line] = lines("curl localhost:9000")
    site.wait_for("http://localhost:9000/health")
    answer = json.loads(site.run(line))
    assert answer["usage"]["completion_tokens"] == json.loads(shlex.split(line)[-1])["max_tokens"]


def test_every_command_of_the_page_has_run() -> None:
    run = lines("ln ", "echo ", "python3 -m venv", "tritonserver", f"{ENVIRONMENT}/bin/", "curl ")
    assert run == LINES
