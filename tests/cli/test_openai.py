# SPDX-License-Identifier: Apache-2.0
"""The gateway on the command line: beside the server and alone, its options, and its end."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest

import hf_triton
from hf_triton.server import free_ports
from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_cli.commands import main
from hf_triton_cli.serving.gateway_options import ALONE, as_arguments, read_config
from hf_triton_cli.serving.openai import openai
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import wait_until
from tests.support.serving import COMMAND, Serving, curl_lines, running, send, serve_until_exit, wait_until_gone
from tests.support.slow_model import slow_model

DEMO = Path(hf_triton.__file__).parent / "demo"
LIMIT_S = 60.0
SLOW_TO_LOAD = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(10)

    def execute(self, requests):
        return []
"""


def status(url: str, body: object = None, key: str | None = None) -> int:
    """The HTTP status of an answer; 0 without one."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def gateway_pid(serving: Serving) -> int:
    [pid] = [
        pid for pid in serving.descendants() if b"hf_triton_cli\0openai\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


@pytest.mark.full
def test_a_dead_gateway_stops_the_server(tmp_path: Path) -> None:
    with running(output=tmp_path / "output") as serving:
        serving.wait_for("Ctrl+C stops the server")
        family = serving.descendants()
        os.kill(gateway_pid(serving), signal.SIGKILL)
        assert serving.process.wait(timeout=LIMIT_S) == 1
        assert "\nerror: gateway_failed: the OpenAI gateway exited by signal 9 (Killed)" in serving.output()
        wait_until_gone(family)


@pytest.mark.full
def test_a_gateway_that_dies_during_a_load_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "slow" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text('backend: "python"')
    (folder / "model.py").write_text(SLOW_TO_LOAD)
    with running(str(folder.parents[1]), output=tmp_path / "output") as serving:
        wait_until(lambda: status(f"http://127.0.0.1:{serving.openai_port}/health") == 503)
        os.kill(gateway_pid(serving), signal.SIGKILL)
        assert serving.process.wait(timeout=LIMIT_S) == 1
        assert "error: gateway_failed: the OpenAI gateway exited by signal 9 (Killed)" in serving.output()
        assert ": ready" not in serving.output()


def test_a_gateway_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    result = serve_until_exit(f"--api-key-file={keys}")
    assert result.returncode == 1
    assert "error: gateway_failed: the OpenAI gateway exited with status 2" in result.stderr
    assert "keys has no key" in result.stderr


@pytest.mark.full
def test_requests_in_flight_are_answered_at_the_end(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", "llama")
    folder = make_folder(tmp_path / "repository", "slow", huggingface_model=checkpoint)
    (folder / "1" / "model.py").write_text(slow_model(0.1))
    body = '{"model":"slow","prompt":"a","max_tokens":30,"ignore_eos":true}'
    with running(str(tmp_path / "repository"), output=tmp_path / "output") as serving:
        lines = curl_lines(serving.wait_for("Ctrl+C stops the server"))
        assert "/v1/completions" in lines[-1][1]  # it has no chat template
        command = [*lines[-1][:-1], body, "--silent"]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(1)
        os.kill(serving.process.pid, signal.SIGINT)
        assert json.loads(client.communicate(timeout=LIMIT_S)[0])["usage"]["completion_tokens"] == 30
        assert serving.process.wait(timeout=LIMIT_S) == 0
        assert serving.output().endswith("Stopped.\n")


@pytest.mark.full
def test_keys_are_asked_for_and_a_proxy_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
    options = (f"--api-key-file={tmp_path / 'keys'}", "--openai-workers=2")
    with running(*options, output=tmp_path / "output", **proxy) as serving:
        output = serving.wait_for("Ctrl+C stops the server")
        (line,) = (line for line in curl_lines(output) if "/v1/chat/completions" in line[1])
        assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in output
        models = f"http://127.0.0.1:{serving.openai_port}/v1/models"
        assert (status(models), status(models, key="secret")) == (401, 200)
        with_key = [word.replace("$OPENAI_API_KEY", "secret") for word in line]
        for _ in range(8):  # each worker answers some
            assert '"choices"' in send(with_key)
        assert "secret" not in serving.output()


@pytest.mark.full
def test_a_gateway_alone_waits_for_triton(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    make_folder(tmp_path / "repository", "mine", huggingface_model=DEMO)
    http, grpc, metrics, port = free_ports(4)
    gateway = subprocess.Popen([COMMAND, "openai", f"--triton=127.0.0.1:{grpc}", f"--port={port}", "--workers=2"])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: status(f"{url}/health") == 503)
        with ThreadPoolExecutor(8) as pool:  # each worker gets some, and is refused by Triton

            def ask(_: int) -> int:
                return status(f"{url}/v1/completions", {"model": "mine", "prompt": "a"})

            assert set(pool.map(ask, range(16))) == {503}
            with TritonServer(tmp_path / "repository", ports=(http, grpc, metrics)):
                assert set(pool.map(ask, range(16))) == {200}
                assert status(f"{url}/health") == 200
        wait_until(lambda: status(f"{url}/health") == 503)
    finally:
        gateway.send_signal(signal.SIGINT)
        assert gateway.wait(timeout=LIMIT_S) == 0


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_ends_a_gateway_and_its_workers(workers: int, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [COMMAND, "openai", "--triton=127.0.0.1:1", f"--port={port}", f"--workers={workers}"]
    gateway = subprocess.Popen(command)
    wait_until(lambda: status(f"http://127.0.0.1:{port}/health") == 503)
    gateway.terminate()
    assert gateway.wait(timeout=LIMIT_S) == 0
    assert status(f"http://127.0.0.1:{port}/health") == 0


@pytest.mark.full
def test_metrics_are_those_of_all_workers(tmp_path: Path) -> None:
    """Prometheus reaches any of them; what one that died had answered still counts, and what it had begun does not."""
    (port,) = free_ports(1)
    command = [COMMAND, "openai", "--triton=127.0.0.1:1", f"--port={port}", "--workers=2"]
    gateway = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)})
    url = f"http://127.0.0.1:{port}"

    def has(name: str, value: float) -> bool:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as answer:
                return f"hf_triton_openai_{name} {value}" in answer.read().decode().splitlines()
        except OSError:
            return False  # its worker is being killed

    try:
        wait_until(lambda: status(f"{url}/health") == 503)
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: status(f"{url}/version"), range(40))) == {200}
        counted = 'requests_total{endpoint="/version",status="200"}', 40.0
        wait_until(lambda: has(*counted))  # a request is counted behind its answer
        assert all(has(*counted) for _ in range(10))
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
            wait_until(lambda: has("requests_in_flight", 2.0))
            for file in tmp_path.glob("hf_triton_metrics_*/gauge_livesum_*.db"):
                os.kill(int(file.stem.rpartition("_")[2]), signal.SIGKILL)
            wait_until(lambda: has("requests_in_flight", 1.0))
        assert has(*counted)
    finally:
        gateway.terminate()
        assert gateway.wait(timeout=LIMIT_S) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_gateway_that_stops_answers_what_is_in_flight(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    folder = make_folder(tmp_path / "repository", "slow", huggingface_model=DEMO)
    (folder / "1" / "model.py").write_text(slow_model(0.5))
    options = [str(folder.parent), "--openai-shutdown-timeout-s=1"]
    with running(*options, output=tmp_path / "output") as serving, ThreadPoolExecutor() as pool:
        serving.wait_for("Ctrl+C stops the server")
        bodies = [{"model": "slow", "prompt": "The", "max_tokens": 60, "stream": stream} for stream in (False, True)]
        answers = [pool.submit(post, serving, body) for body in bodies]
        stream = answers[1].result()
        assert b'"text"' in stream.readline()
        serving.process.terminate()
        whole, rest = answers[0].result(), stream.read()
        assert (whole.status, json.load(whole)["error"]["code"]) == (503, "shutting_down")
        assert json.loads(rest.splitlines()[-2].removeprefix(b"data: "))["error"]["code"] == "shutting_down"


def post(serving: Serving, body: object) -> Any:
    """An answer whose headers have come."""
    url = f"http://127.0.0.1:{serving.openai_port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=LIMIT_S)
    except urllib.error.HTTPError as error:
        return error


REFUSALS = {
    "openai --triton=somewhere": "--triton must be HOST:PORT, got 'somewhere'",
    "openai --host=300.1.1.1": "--host must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all, got",
    "serve --host=nohost.invalid": "--host must be an address of this machine",
    "openai --port=70000": "--port must be an integer >= 0 and <= 65535, got '70000'",
    "openai --workers=0": "--workers must be an integer >= 1 and <= 2147483647, got '0'",
    "openai --timeout-s=never": "--timeout-s must be a number > 0",
    "openai --api-key-file=nowhere": "'--api-key-file': File 'nowhere' does not exist",
    "openai --keep-alive=10m": "--keep-alive needs --on-demand",
    "openai --max-loaded=2": "--max-loaded needs --on-demand",
    "openai --on-demand --max-loaded=0": "--max-loaded must be an integer >= 1 and <= 2147483647, got '0'",
    "openai --on-demand --keep-alive=soon": "--keep-alive must be a duration such as 30s, 10m or 1h, 0 (at once)",
    "openai --on-demand --keep-alive=1h:30": "or -1 (for ever), got '1h:30'",
    "openai --sleep": "--sleep needs --on-demand",
    "openai --on-demand --workers=2": "--on-demand needs one worker, got 2",
    "openai --allow-origin=chat.example.com": "--allow-origin must be * or an origin such as https://chat.example.com",
    "openai --allow-origin=https://a.example/": "--allow-origin must be * or an origin such as https://chat.example.com",
    "serve --no-openai --on-demand": "--on-demand needs the gateway: leave --no-openai out",
    "serve --no-openai --api-key-file=/dev/null": "--api-key-file needs the gateway",
    "serve --no-openai --allow-origin=*": "--allow-origin needs the gateway",
    "serve --no-openai --openai-workers=1": "--openai-workers needs the gateway",
    "serve -- --no-such-flag=1": "tritonserver: unrecognized option '--no-such-flag=1'; `",
    "serve --keep-alive=10m": "--keep-alive needs --on-demand",
    "serve --on-demand --openai-workers=2": "needs one worker, got 2",
    "openai --tritn=a:1": "no such option '--tritn'",
    "serve --model-control-mode=explicit": "'--model-control-mode'. Flags of tritonserver follow behind --",
    "serve --openai-port=0": "'--openai-port': 0 is not in the range 1<=x<=65535",
    "serve --openai-workers=many": "--openai-workers must be an integer >= 1 and <= 2147483647, got 'many'",
    "serve --api-key-file=nowhere": "'--api-key-file': File 'nowhere' does not exist",
}
"""By command, the sentence that it ends with."""


@pytest.mark.parametrize("command", REFUSALS)
def test_wrong_options_are_refused_in_one_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: wrong_usage: ")
    assert REFUSALS[command] in sentence


@pytest.mark.parametrize("command", ["serve --openai-port", "openai --port"])
def test_the_gateways_busy_port_is_named(command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run([COMMAND, *command.split(), str(port)], capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 2
    assert f"port {port} in use" in result.stderr


def test_options_and_config_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    changed = {
        "triton": "triton:1", "host": "0.0.0.0", "port": 1, "api_key_file": tmp_path / "keys",
        "allowed_origins": ("https://a.example", "https://b.example"), "timeout_s": 1.5, "workers": 2,
    }  # fmt: skip
    on_demand = {"on_demand": True, "keep_alive": "90s", "max_loaded": 2, "sleep": True, "triton_metrics": "a:8002"}
    for config in (GatewayConfig(), *map(GatewayConfig.model_validate, (changed, on_demand))):
        context: click.Context = openai.make_context("openai", as_arguments(config))
        assert read_config(ALONE, context.params) == config
