# SPDX-License-Identifier: Apache-2.0
"""deploy/ray on a real Ray: streams, autoscaling, and deaths of processes, with replicas of a slow model."""

import concurrent.futures
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from hf_triton.server import free_ports
from hf_triton.testing import build_tiny_checkpoint
from tests.support.clients import has
from tests.support.paths import ROOT
from tests.support.serving import descendants, wait_until_gone
from tests.support.slow_model import SLOW_MODEL, STEP_S

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

BIN = ROOT / ".venv" / "ray" / "bin"
CONFIG = ROOT / "deploy" / "ray" / "serve.yaml"
KEY = "sk-test"
LIMIT_S = 200.0
WHOLE = "length"
MAX_ONGOING_REQUESTS = 30


def ray_environment(**variables: str) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",  # else a token is written to the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the replicas have nothing to do at the end
        **variables,
    }


@pytest.fixture(scope="module", autouse=True)
def _needs_ray() -> None:
    has(BIN / "serve", "test-ray")


def wait_for(is_so: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    return value


# --- Arguments -------------------------------------------------------------------------------------------------------

REFUSED = {
    "model": ({}, "Field required"),
    "no model": ({"model": ""}, "at least 1 character"),
    "an unknown argument": ({"model": "demo", "replica": "2"}, "replica\n  Extra inputs are not permitted"),
    "no replicas": ({"model": "demo", "replicas": "0"}, "greater than 0"),
    "fewer at most than at least": (
        {"model": "demo", "replicas": "2", "max_replicas": "1"},
        "max_replicas (1) must be",
    ),
    "a negative number": ({"model": "demo", "gpus": "-1"}, "greater than or equal to 0"),
    "not a number": ({"model": "demo", "cpus": "many"}, "valid number"),
    "an open quotation": ({"model": "demo", "options": "'a"}, "No closing quotation"),
    "options that are none": ({"model": "demo", "options": 5}, "valid string"),
    "a port": ({"model": "demo", "options": "--openai-port=9000"}, "--openai-port=9000 is the replica's own"),
    "an address": ({"model": "demo", "options": "--host 0.0.0.0"}, "--host is the replica's own"),
}
TRY = """
import json, sys, yaml
from ray.serve.schema import ServeDeploySchema
from deploy.ray.serve import Args, app

def refusal(args):
    try:
        app(Args(**args))
    except Exception as error:
        return str(error)

config = ServeDeploySchema.model_validate(yaml.safe_load(open("deploy/ray/serve.yaml")))
refusals = {name: refusal(args) for name, args in json.load(sys.stdin).items()}
[accepted] = config.applications
print(json.dumps(refusals | {"the file": refusal(accepted.args)}))
"""


@pytest.fixture(scope="module")
def refusals() -> dict[str, str | None]:
    cases = json.dumps({name: args for name, (args, _) in REFUSED.items()})
    done = subprocess.run(
        [BIN / "python", "-c", TRY], input=cases, capture_output=True, text=True, cwd=ROOT, env=ray_environment()
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused(refusals: dict[str, str | None], name: str) -> None:
    assert REFUSED[name][1] in str(refusals[name])


def test_ray_takes_the_file(refusals: dict[str, str | None]) -> None:
    assert refusals["the file"] is None


# --- A Ray of these tests alone --------------------------------------------------------------------------------------


class Head:
    def __init__(self, process: subprocess.Popen[bytes], port: int, dashboard_port: int) -> None:
        self.process = process
        self.address = f"127.0.0.1:{port}"
        self.dashboard = f"http://127.0.0.1:{dashboard_port}"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    log = tmp_path_factory.mktemp("head") / "log"
    port, dashboard, clients, agent = free_ports(4)
    command = ["ray", "start", "--head", "--block", "--num-cpus=2", f"--port={port}", "--node-ip-address=127.0.0.1"]
    command += [f"--dashboard-port={dashboard}", f"--ray-client-server-port={clients}", "--disable-usage-stats"]
    command += [f"--dashboard-agent-listen-port={agent}", "--min-worker-port=0", "--max-worker-port=0"]
    with tempfile.TemporaryDirectory(prefix="ray") as scratch, log.open("wb") as file:  # the path of a socket is short
        command += [f"--temp-dir={scratch}", "--object-store-memory=100000000"]
        process = subprocess.Popen(
            command, cwd=scratch, env=ray_environment(), stdout=file, stderr=file, start_new_session=True
        )
        started = Head(process, port, dashboard)
        try:
            wait_for(lambda: process.poll() is not None or answers(f"{started.dashboard}/api/version"))
            assert process.poll() is None, log.read_text()
            yield started
        finally:
            pids = descendants(process.pid)
            process.terminate()
            process.wait(60)
            wait_until_gone(pids)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def words(pid: int) -> list[str]:
    """A process's command; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def is_server(pid: int) -> bool:
    return {"hf_triton_cli", "serve"} <= set(words(pid))


# --- `serve run` -----------------------------------------------------------------------------------------------------


def test_the_documented_application_answers_until_ctrl_c(head: Head, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "fleet.md").read_text().partition("## Ray")[2]
    [serve] = re.findall(r"^serve run .*", text, flags=re.M)
    [curl] = re.findall(r"^curl .*", text, flags=re.M)
    port, log = free_ports(1)[0], tmp_path / "log"
    environment = ray_environment(RAY_ADDRESS=head.address)
    subprocess.run([BIN / "serve", "start", f"--http-port={port}"], env=environment, check=True, timeout=120)
    with log.open("wb") as file:
        process = subprocess.Popen(
            shlex.split(serve), cwd=ROOT, env=environment, stdout=file, stderr=file, process_group=0
        )
        try:
            wait_for(lambda: process.poll() is not None or "is ready at" in log.read_text())
            command = shlex.split(curl.replace("8000", str(port)))
            answer = subprocess.run(command, env=environment, capture_output=True, timeout=60)
            assert answer.returncode == 0, log.read_text()
            assert json.loads(answer.stdout)["choices"][0]["text"]
            servers = [pid for pid in descendants(head.process.pid) if is_server(pid)]
            assert len(servers) == 2
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    wait_until_gone(servers)


# --- A cluster -------------------------------------------------------------------------------------------------------


class Cluster:
    """An application of a model that takes STEP_S a token."""

    def __init__(self, config: Path, head: Head, http_port: int) -> None:
        self.config = config
        self.process = head.process
        self.url = f"http://127.0.0.1:{http_port}"
        self._dashboard = head.dashboard
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    def deploy(self, *applications: dict[str, Any]) -> None:
        config = yaml.safe_load(CONFIG.read_text())
        config["http_options"] = {"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])}
        config["applications"] = [config["applications"][0] | each for each in applications]
        self.config.write_text(yaml.safe_dump(config))
        done = subprocess.run(
            [BIN / "serve", "deploy", "--address", self._dashboard, self.config],
            env=ray_environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr

    def application(self, name: str) -> dict[str, Any]:
        """What `serve status` shows."""
        response = httpx.get(f"{self._dashboard}/api/serve/applications/", trust_env=False, timeout=30)
        applications: dict[str, dict[str, Any]] = response.json()["applications"]
        return applications.get(name, {"status": "", "deployments": {}})

    def replicas(self) -> list[int]:
        """The process ids of the replicas that run."""
        deployments = self.application("slow")["deployments"].values()
        return [each["pid"] for one in deployments for each in one["replicas"] if each["state"] == "RUNNING"]

    def wait_for_replicas(self, *, without: int = 0, count: int = 2) -> list[int]:
        def running() -> list[int]:
            pids = self.replicas()
            return pids if len(pids) == count and without not in pids else []

        return list(wait_for(running))

    def stream(self, num_tokens: int, pieces: list[float] | None = None) -> str:
        """How a stream ended: WHOLE, or what went wrong; `pieces` takes the time of each."""
        pieces = [] if pieces is None else pieces
        end = None
        try:
            for piece in self.client.completions.create(
                model="slow", prompt="one", max_tokens=num_tokens, stream=True, extra_body={"ignore_eos": True}
            ):
                pieces.append(time.monotonic())
                end = piece.choices[0].finish_reason
        except (openai.APIError, httpx.HTTPError) as error:
            return f"{type(error).__name__} after {len(pieces)}"
        return str(end)

    def streams(self, count: int, num_tokens: int, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(self.stream, num_tokens) for _ in range(count)]
            meanwhile()
            return [future.result() for future in futures]


@pytest.fixture(scope="module")
def cluster(head: Head, tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Cluster:
    root = tmp_path_factory.mktemp("ray")
    checkpoint = build_tiny_checkpoint(root / "checkpoint", "llama", eos_token_id=None)
    folder = make_folder(root / "repository", "slow", huggingface_model=checkpoint, max_output_length=200)
    (folder / "1" / "model.py").write_text(SLOW_MODEL)
    (root / "keys").write_text(KEY)
    args = {"model": str(root / "repository"), "options": f"--api-key-file={root / 'keys'}"}
    args |= {"replicas": 1, "max_replicas": 2, "max_ongoing_requests": MAX_ONGOING_REQUESTS, "cpus": 1}
    started = Cluster(root / "serve.yaml", head, free_ports(1)[0])
    started.deploy({"name": "slow", "args": args})
    started.wait_for_replicas(count=1)
    return started


def test_a_stream_comes_as_it_is_made(cluster: Cluster) -> None:
    times: list[float] = []
    assert cluster.stream(20, times) == WHOLE
    assert times[-1] - times[0] > 10 * STEP_S


def test_a_key_is_asked_for(cluster: Cluster) -> None:
    wrong = cluster.client.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError, match="key"):
        wrong.models.list()
    assert [model.id for model in cluster.client.models.list()] == ["slow"]


def test_refusals_and_paths_pass_unchanged(cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        cluster.client.completions.create(model="slow", prompt="one", max_tokens=-1)
    headers = {"Authorization": f"Bearer {KEY}"}
    response = httpx.get(f"{cluster.url}/v1/models/a%2Fb?x=%20", headers=headers, trust_env=False)
    assert response.status_code == 404
    assert len(response.headers.get_list("date")) == 1


def test_a_disconnect_cancels_the_request(cluster: Cluster) -> None:
    [port] = filter(None, map(gateway_port, descendants(cluster.process.pid)))
    headers = {"Authorization": f"Bearer {KEY}"}

    def in_flight() -> int:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=headers, trust_env=False).text
        found = re.search(r"^hf_triton_openai_requests_in_flight(?:\{.*\})? (\d+)", text, flags=re.M)
        assert found is not None
        return int(found[1]) - 1  # this one

    body = {"model": "slow", "prompt": "one", "max_tokens": 200, "ignore_eos": True}
    with httpx.Client(base_url=cluster.url, headers=headers, trust_env=False, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            assert "text" in next(lines)
            assert in_flight() == 1
        wait_for(lambda: in_flight() == 0, 10)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=2)
        wait_for(lambda: in_flight() == 0, 10)


def gateway_port(pid: int) -> int:
    command = words(pid)
    ports = [int(word.removeprefix("--port=")) for word in command if word.startswith("--port=")]
    return ports[0] if {"hf_triton_cli", "openai"} <= set(command) else 0


def test_a_replica_is_added_while_requests_queue(cluster: Cluster) -> None:
    is_over = threading.Event()

    def load() -> list[str]:
        ends = []
        while not is_over.is_set():
            ends.append(cluster.stream(100))
        return ends

    num_clients = MAX_ONGOING_REQUESTS + 10
    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        futures = [pool.submit(load) for _ in range(num_clients)]
        try:
            cluster.wait_for_replicas(count=2)
        finally:
            is_over.set()
        assert {end for future in futures for end in future.result()} == {WHOLE}


def test_fifty_streams_at_once_are_whole(cluster: Cluster) -> None:
    cluster.wait_for_replicas()
    assert cluster.streams(50, 30) == [WHOLE] * 50


@pytest.mark.parametrize("victim", ["server", "replica"])
def test_what_is_killed_is_replaced_and_leaves_nothing(cluster: Cluster, victim: str) -> None:
    replica, _ = cluster.wait_for_replicas()
    below = descendants(replica)
    [server] = filter(is_server, below)

    def kill() -> None:
        time.sleep(20 * STEP_S)
        os.kill(server if victim == "server" else replica, signal.SIGKILL)

    ends = cluster.streams(12, 80, kill)
    broken = [end for end in ends if end != WHOLE]
    assert 0 < len(broken) < 12
    assert all("Error after" in end for end in broken), broken
    wait_until_gone([replica, *below])
    assert cluster.streams(4, 5) == [WHOLE] * 4  # by the other
    cluster.wait_for_replicas(without=replica)
    assert cluster.streams(8, 5) == [WHOLE] * 8


def test_a_model_that_does_not_load_says_why(cluster: Cluster) -> None:
    args = {"model": "/no/such/model", "cpus": 0}
    slow = yaml.safe_load(cluster.config.read_text())["applications"][0]
    cluster.deploy(slow, {"name": "broken", "route_prefix": "/broken", "args": args})
    broken = wait_for(lambda: _failed(cluster.application("broken")))
    assert "path_not_found: there is no folder '/no/such/model'" in json.dumps(broken)
    assert cluster.stream(5) == WHOLE


def _failed(application: dict[str, Any]) -> dict[str, Any] | None:
    return application if application["status"] == "DEPLOY_FAILED" else None


def test_a_replica_that_is_replaced_finishes_its_streams(cluster: Cluster) -> None:
    slow = yaml.safe_load(cluster.config.read_text())["applications"][0]
    slow["args"] |= {"max_ongoing_requests": MAX_ONGOING_REQUESTS + 1}
    former = cluster.replicas()
    assert cluster.streams(8, 200, lambda: cluster.deploy(slow)) == [WHOLE] * 8
    wait_until_gone(former, LIMIT_S)
