# SPDX-License-Identifier: Apache-2.0
"""Fixtures that build the image on a stand-in for NVIDIA's and run it as in the README, with podman or docker.

Without a container engine the tests are skipped, unless REQUIRE_CONTAINER=1 is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import secrets
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_triton.server import busy_ports, free_ports
from tests.support.paths import ROOT

HERE = Path(__file__).resolve().parent
IMAGE = "hf-triton-test"
READY_TIMEOUT_S = 90
STOP_TIMEOUT_S = 60
NO_ENGINE = 3


@dataclass(frozen=True)
class Engine:
    """podman or docker, with the environment variables that it needs on this machine."""

    name: str
    environment: dict[str, str]
    base_image: str

    def __call__(self, *arguments: str, timeout_s: float = 60) -> str:
        """Run a command of the engine and return its output."""
        command = [self.name, *arguments]
        environment = os.environ | self.environment
        result = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert result.returncode == 0, f"{shlex.join(command)} exited with {result.returncode}\n{tail(result.stderr)}"
        return result.stdout

    def build(self, tag: str, *, file: str = "Dockerfile", **arguments: str) -> str:
        """Build a Dockerfile of the repository on the stand-in and return the image's name."""
        [torch] = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        pairs = {
            "BASE_IMAGE": self.base_image,
            "TORCH": torch,
        } | arguments  # the build for processors, where it is there
        options = [word for name, value in pairs.items() for word in ("--build-arg", f"{name}={value}")]
        self("build", "--network=host", "--file", file, "--tag", tag, *options, ".", timeout_s=500)
        return tag


class Container:
    """A container in the foreground, with its output in a file."""

    def __init__(self, engine: Engine, name: str, command: list[str], log: Path, ports: Sequence[int]) -> None:
        self.engine, self.name, self.ports = engine, name, list(ports)
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=os.environ | engine.environment, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def log(self) -> str:
        """The output of the container so far."""
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Wait until all models are ready; show the log if the server exits first."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the container exited with {self.process.returncode}\n{tail(self.log)}"
            # The log shows that this server responds, in case another one has the port.
            if "Started HTTPService" in self.log:
                with contextlib.suppress(OSError), urllib.request.urlopen(self._url("/v2/health/ready"), timeout=5):
                    return
            time.sleep(0.2)
        pytest.fail(f"not ready after {READY_TIMEOUT_S} s\n{tail(self.log)}")

    def wait_for(self, output: str) -> None:
        """Wait until the log holds a text."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while output not in self.log:
            assert self.process.poll() is None, f"the container exited with {self.process.returncode}\n{tail(self.log)}"
            assert time.monotonic() < deadline, tail(self.log)
            time.sleep(0.2)

    def wait_until_answers(self, path: str) -> None:
        """Wait until the gateway answers 200."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the container exited with {self.process.returncode}\n{tail(self.log)}"
            with contextlib.suppress(OSError), urllib.request.urlopen(self._gateway_url(path), timeout=5):
                return
            time.sleep(0.2)
        pytest.fail(f"no answer after {READY_TIMEOUT_S} s\n{tail(self.log)}")

    def ask_gateway(self, path: str, body: object = None) -> Any:
        """Send a request to the gateway and return its JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._gateway_url(path), data, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def generate(self, model: str, prompt: str, **parameters: Any) -> str:
        """Send a request to /generate and return its `text_output`."""
        body = json.dumps({"text_input": prompt, "parameters": parameters}).encode()
        request = urllib.request.Request(self._url(f"/v2/models/{model}/generate"), body)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return str(json.load(response)["text_output"])
        except urllib.error.HTTPError as error:
            pytest.fail(f"{model} answered {error.code}: {error.read().decode()}")

    def execute(self, *command: str) -> str:
        """Run a command in the container and return its output."""
        return self.engine("exec", self.name, *command)

    def stop(self) -> int:
        """Stop the container, like `docker stop`, and return its exit code."""
        self.engine("stop", "-t", str(STOP_TIMEOUT_S), self.name, timeout_s=STOP_TIMEOUT_S + 10)
        code = self.process.wait(timeout=10)
        if code:
            print(tail(self.log))  # which the test that fails of it shows
        return code

    def remove(self) -> None:
        """Kill the container if it is running."""
        if self.process.poll() is None:
            self.engine("kill", self.name)
            self.process.wait(timeout=30)

    def _gateway_url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[3]}{path}"

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[0]}{path}"


def tail(text: str, num_lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-num_lines:])


@pytest.fixture(scope="session")
def engine() -> Engine:
    result = subprocess.run([sys.executable, HERE / "stand_in_base.py"], capture_output=True, text=True, check=False)
    if result.returncode == NO_ENGINE and os.environ.get("REQUIRE_CONTAINER") != "1":
        pytest.skip(result.stderr.strip())
    if result.returncode != 0:
        pytest.fail(tail(result.stderr), pytrace=False)
    chosen = json.loads(result.stdout)
    return Engine(chosen["engine"], chosen["environment"], chosen["image"])


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    return engine.build(IMAGE)


@pytest.fixture(scope="session")
def gateway_image(engine: Engine) -> str:
    return engine.build(f"{IMAGE}-gateway", file="deploy/gateway/Dockerfile")


@pytest.fixture
def start(engine: Engine, image: str, refused: str, tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """Start a container with a `docker run` line of the README: `start(line, folder, "-e", "NAME=value")`."""
    with contextlib.ExitStack() as stack:

        def start(line: str, folder: Path, *options: str, ports: Sequence[int] = (), of: str = image) -> Container:
            name = f"{IMAGE}-{secrets.token_hex(4)}"
            ports, port_arguments = (ports, []) if ports else _choose_ports()
            run, arguments = _translate(line.replace(refused, ""), folder)
            if port_arguments and not arguments:
                arguments = _own_command(engine, image)
            if "tritonserver" in arguments:
                port_arguments = port_arguments[:3]
            command = [engine.name, *run, "--name", name, *options, *_limits(engine), of, *arguments, *port_arguments]
            container = Container(engine, name, command, tmp_path / f"{name}.log", ports)
            stack.callback(container.remove)
            return container

        yield start


def _choose_ports() -> tuple[Sequence[int], list[str]]:
    """The default ports, which the README's lines use, or free ones with their arguments; the gateway's is the last."""
    usual = (8000, 8001, 8002, 9000)
    if not busy_ports(usual):
        return usual, []
    ports = free_ports(4)
    names = ("--http-port", "--grpc-port", "--metrics-port", "--openai-port")
    return ports, [f"{name}={port}" for name, port in zip(names, ports, strict=True)]


def _own_command(engine: Engine, image: str) -> list[str]:
    return list(json.loads(engine("image", "inspect", image))[0]["Config"]["Cmd"])


def _translate(line: str, folder: Path) -> tuple[list[str], list[str]]:
    """The words of a `docker run` line before and after the image, without options for a GPU or a terminal."""
    line = re.sub(r" --gpus all| -it", "", line.replace("${PWD}", str(folder)))
    before, after = line.removeprefix("docker ").split(" triton_transformer_server", maxsplit=1)
    return shlex.split(before), shlex.split(after)


def _limits(engine: Engine) -> list[str]:
    """Limits for podman, whose defaults exceed those of a root user in a container."""
    if engine.name != "podman":
        return []
    files = min(20000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return ["--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=30000:30000"]


@pytest.fixture(scope="session")
def refused(engine: Engine, image: str) -> str:
    """An option of the README's line that this machine does not allow; locked memory matters for GPUs only."""
    option = "--ulimit memlock=-1"
    try:
        engine("run", "--rm", *option.split(), *_limits(engine), image, "true")
    except AssertionError:
        return option
    return ""
