# SPDX-License-Identifier: Apache-2.0
"""Models that the gateway loads when they are asked for, on a Triton that starts with none."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hf_triton.server import free_ports
from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread, num_running, wait_until
from tests.support.paths import ROOT
from tests.support.serving import COMMAND, running
from tests.support.slow_model import slow_model

pytestmark = pytest.mark.full

EXPLICIT = ["--model-control-mode=explicit"]
NAMES = ("one", "two", "three")
STREAM_DOOR = ROOT / "stream_door"
QUICK_CONFIG = """
backend: "python"
input [{ name: "text" data_type: TYPE_STRING dims: [ -1 ] }]
output [
  { name: "embedding" data_type: TYPE_FP32 dims: [ -1, -1 ] },
  { name: "num_input_tokens" data_type: TYPE_INT32 dims: [ -1 ] }
]
"""
QUICK_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

OUTPUTS = {"embedding": np.full((1, 2), NUMBER, np.float32), "num_input_tokens": np.ones(1, np.int32)}


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.Tensor(name, array) for name, array in OUTPUTS.items()]
        return [pb_utils.InferenceResponse(tensors) for _ in requests]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Path:
    """Three models with different weights, two with stream doors; `broken`, whose checkpoint is missing."""
    root = tmp_path_factory.mktemp("on_demand")
    folders = root / "repository"
    for seed, name in enumerate(NAMES):
        checkpoint = build_tiny_checkpoint(root / name, "llama", eos_token_id=None, seed=seed)
        make_folder(folders, name, huggingface_model=checkpoint, max_output_length=64)
    (folders / "one" / "1" / "model.py").write_text(slow_model(0.02))
    for name in ("one", "two"):
        shutil.copytree(STREAM_DOOR, folders / f"{name}_stream")
    make_folder(folders, "broken", huggingface_model=root / "nowhere")
    return folders


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that are loaded in a moment and answer with their numbers."""
    root = tmp_path_factory.mktemp("quick")
    for number, name in enumerate(NAMES, start=1):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(QUICK_CONFIG)
        (root / name / "1" / "model.py").write_text(QUICK_MODEL.replace("NUMBER", str(number)))
    return root


@pytest.fixture(scope="module")
def quick_server(quick: Path) -> Iterator[TritonServer]:
    with TritonServer(quick, arguments=EXPLICIT) as running:
        yield running


@pytest.fixture
def server(quick_server: TritonServer) -> TritonServer:
    for name in NAMES:
        unload(quick_server, name)
    return quick_server


@contextmanager
def served(repository: Path, ports: tuple[int, int, int] | None = None) -> Iterator[TritonServer]:
    with TritonServer(repository, arguments=EXPLICIT, ports=ports) as server:
        yield server


@contextmanager
def on_demand(server: TritonServer, **fields: Any) -> Iterator[GatewayThread]:
    metrics = f"127.0.0.1:{server.metrics_port}"
    config = GatewayConfig(triton=server.grpc_url, port=0, on_demand=True, triton_metrics=metrics, **fields)
    with GatewayThread(config) as gateway:
        yield gateway


@contextmanager
def connected(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: openai.OpenAI, model: str, num_tokens: int = 4) -> str:
    answer = client.completions.create(model=model, prompt="Today", max_tokens=num_tokens, temperature=0)
    return answer.choices[0].text


def stream(client: openai.OpenAI, model: str, num_tokens: int = 4) -> Iterator[str]:
    answer = client.completions.create(model=model, prompt="Today", max_tokens=num_tokens, temperature=0, stream=True)
    for part in answer:
        yield part.choices[0].text


def embed(gateway: GatewayThread, model: str, timeout: httpx.Timeout | float = 120) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/embeddings", json={"model": model, "input": "Today"}, timeout=timeout)


def number_of(answer: httpx.Response) -> float:
    """Which of the quick models has answered, from 1."""
    return float(answer.json()["data"][0]["embedding"][0])


def unload(server: TritonServer, model: str) -> None:
    httpx.post(f"{server.http_url}/v2/repository/models/{model}/unload", json={}, timeout=120)


def loaded(client: openai.OpenAI) -> set[str]:
    return {model.id for model in client.models.list() if model.model_dump()["loaded"]}


def test_models_are_loaded_when_asked_for_and_listed_before(repository: Path) -> None:
    with served(repository) as server, on_demand(server, max_loaded=1) as gateway, connected(gateway) as client:
        assert {model.id for model in client.models.list()} == {*NAMES, "broken"}
        assert loaded(client) == set()
        assert client.models.retrieve("two").model_dump()["loaded"] is False
        texts = {name: ask(client, name) for name in ("one", "three")}
        assert texts["one"] != texts["three"]
        assert loaded(client) == {"three"}
        assert "".join(stream(client, "one")) == texts["one"]
        assert {model.name for model in server.models() if model.state == "READY"} == {"one", "one_stream"}
        with pytest.raises(openai.BadRequestError, match="does not stream"):
            list(stream(client, "three"))
        with pytest.raises(openai.NotFoundError):
            ask(client, "none")
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="there is no folder") as failed:
                ask(client, "broken")
            assert failed.value.status_code == 503
            assert failed.value.code == "not_loaded"
        metrics = httpx.get(f"{gateway.url}/metrics").text
        assert 'hf_triton_openai_model_loads_total{model="broken",outcome="failed"} 1.0' in metrics
        assert 'hf_triton_openai_model_unloads_total{model="one"} 2.0' in metrics
        assert "hf_triton_openai_requests_waiting_for_load 0.0" in metrics


@pytest.mark.parametrize("max_loaded", [1, 2])
def test_mixed_load_with_swapping_loses_nothing(server: TritonServer, max_loaded: int) -> None:
    numbers = [(client + place * (1 + client % 2)) % len(NAMES) for client in range(4) for place in range(2)]
    with on_demand(server, max_loaded=max_loaded) as gateway, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: number_of(embed(gateway, NAMES[number])), numbers))
    assert answers == [number + 1 for number in numbers]


def test_streams_and_direct_requests_in_flight_are_not_cut_by_another_model(repository: Path) -> None:
    with served(repository) as server, on_demand(server, max_loaded=1) as gateway, connected(gateway) as client:
        whole = ask(client, "one", 60)
        direct = {"text_input": "Today", "max_new_tokens": 200, "stream": False}
        url, answers = f"{server.http_url}/v2/models/one/generate", list[httpx.Response]()
        request = threading.Thread(target=lambda: answers.append(httpx.post(url, json=direct, timeout=120)))
        request.start()
        wait_until(lambda: num_running(server) > 0)
        pieces = stream(client, "one", 60)
        text = next(pieces)
        others: list[str] = []
        other = threading.Thread(target=lambda: others.append(ask(client, "two")))
        other.start()
        text += "".join(pieces)
        assert others == []
        other.join(120)
        assert text == whole
        assert len(others) == 1
        assert [answer.status_code for answer in answers] == [200]
        request.join()


def test_idle_model_is_unloaded_and_its_process_ends(server: TritonServer) -> None:
    with on_demand(server, keep_alive="1s") as gateway, connected(gateway) as client:
        assert number_of(embed(gateway, "one")) == 1
        assert stub_pids(server)
        wait_until(lambda: loaded(client) == set(), timeout_s=60)
        wait_until(lambda: not stub_pids(server), timeout_s=60)
        assert number_of(embed(gateway, "one")) == 1


def test_unload_by_others_and_removed_folder(quick: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(quick, tmp_path / "repository")
    with served(copied) as server, on_demand(server) as gateway, connected(gateway) as client:
        assert number_of(embed(gateway, "two")) == 2
        unload(server, "two")
        assert number_of(embed(gateway, "two")) == 2
        shutil.rmtree(copied / "three")
        wait_until(lambda: "three" not in {model.id for model in client.models.list()})
        assert embed(gateway, "three").status_code == 404
        with on_demand(server, max_loaded=1) as second, connected(second) as another:  # finds `two` loaded
            assert loaded(another) == {"two"}
            assert number_of(embed(second, "two")) == 2


def test_a_request_that_names_no_model_loads_the_only_one(quick: Path, tmp_path: Path) -> None:
    shutil.copytree(quick / "two", tmp_path / "two")
    with served(tmp_path) as server, on_demand(server) as gateway:
        answer = httpx.post(f"{gateway.url}/embed", json={"inputs": "Today"}, timeout=120)
        assert answer.json() == [[2, 2]], answer.text


def test_folder_that_exists_is_never_404_whoever_unloads_it(server: TritonServer) -> None:
    with on_demand(server) as gateway:
        is_over = threading.Event()

        def unload_again() -> None:
            while not is_over.wait(0.05):
                unload(server, "two")

        other = threading.Thread(target=unload_again)
        other.start()
        try:
            answers = [embed(gateway, "two") for _ in range(4)]
        finally:
            is_over.set()
            other.join()
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert all("Retry-After" in answer.headers for answer in answers if answer.status_code == 503)
        assert embed(gateway, "two").status_code == 200
        assert embed(gateway, "four").status_code == 404


def test_killed_model_process_ends_triton_and_a_new_one_is_found(repository: Path) -> None:
    http, grpc, metrics = free_ports(3)
    with served(repository, (http, grpc, metrics)) as server:
        gateway_context = on_demand(server)
        with gateway_context as gateway, connected(gateway) as client:
            text = ask(client, "two")
            for pid in stub_pids(server):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not server.is_running())
            with pytest.raises(openai.InternalServerError, match="cannot be reached"):
                ask(client, "one")
            with served(repository, (http, grpc, metrics)):
                wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
                assert ask(client, "two") == text


def test_serve_loads_on_demand(repository: Path, tmp_path: Path) -> None:
    options = ("--on-demand", "--keep-alive=1h", "--max-loaded=1")
    with running(str(repository), *options, output=tmp_path / "output") as serving:
        output = serving.wait_for("Ctrl+C stops the server")
        assert "Loaded when asked for: broken, one, three, two." in output
        url = f"http://127.0.0.1:{serving.openai_port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            assert loaded(client) == set()
            assert "".join(stream(client, "two")) == ask(client, "two")
            assert "".join(stream(client, "three")) == ask(client, "three")  # by the stream door that serve adds
            assert loaded(client) == {"three"}
            with pytest.raises(openai.InternalServerError, match="there is no folder"):
                ask(client, "broken")
        assert httpx.get(f"{url}/health").status_code == 200


def test_triton_that_loads_by_itself_is_refused(quick: Path) -> None:
    with TritonServer(quick) as server:
        with on_demand(server) as gateway:
            refused = embed(gateway, "two")
        command = [COMMAND, "openai", f"--triton={server.grpc_url}", f"--port={free_ports(1)[0]}", "--on-demand"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "start it with --model-control-mode=explicit" in refused.json()["error"]["message"]
    assert result.returncode == 1
    assert "--on-demand needs a Triton that loads models on request" in result.stderr


def stub_pids(server: TritonServer) -> list[int]:
    assert server.process is not None
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended
            continue
        fields = text.rpartition(")")[2].split()
        if int(fields[2]) == server.process.pid and re.search(r"\(triton_python_b", text) and fields[0] != "Z":
            pids.append(int(stat.parent.name))
    return pids


def load(server: TritonServer, model: str, **config: Any) -> None:
    body = {"parameters": {"config": json.dumps(config)}} if config else {}
    httpx.post(f"{server.http_url}/v2/repository/models/{model}/load", json=body, timeout=120).raise_for_status()


def test_what_others_have_loaded_and_unloaded_is_repaired(repository: Path) -> None:
    """A door that was not loaded with its model, or unloaded alone, is loaded; the model is not loaded again."""
    with served(repository) as server, on_demand(server) as gateway, connected(gateway) as client:
        load(server, "one")
        wait_until(lambda: loaded(client) == {"one"})
        text = ask(client, "one")
        for _ in range(2):
            assert "".join(stream(client, "one")) == text
            unload(server, "one_stream")
        assert "".join(stream(client, "one")) == text
        assert "model_loads_total{" not in httpx.get(f"{gateway.url}/metrics").text
        unload(server, "one")  # the door stays
        assert "".join(stream(client, "one")) == text
        assert ask(client, "one") == text


def test_a_model_that_others_load_with_another_config_answers_at_once(quick: Path) -> None:
    with TritonServer(quick, arguments=EXPLICIT) as server, on_demand(server) as gateway:
        assert embed(gateway, "one").status_code == 200
        for size, text, vector in ((4, [1], [-1]), (0, [-1], [-1, -1])):
            load(
                server,
                "one",
                backend="python",
                max_batch_size=size,
                input=[{"name": "text", "data_type": "TYPE_STRING", "dims": text}],
                output=[
                    {"name": "embedding", "data_type": "TYPE_FP32", "dims": vector},
                    {"name": "num_input_tokens", "data_type": "TYPE_INT32", "dims": text},
                ],
            )
            answer = embed(gateway, "one")
            assert answer.status_code == 200, answer.text
