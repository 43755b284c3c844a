# SPDX-License-Identifier: Apache-2.0
"""The `docker build` and `docker run` lines of the README, with a loopback Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_triton.server import free_ports
from hf_triton.testing import LoopbackHub, build_tiny_checkpoint
from tests.support.paths import ROOT

pytestmark = [pytest.mark.container, pytest.mark.timeout(600)]

FALCON, LLAMA = "tiiuae/falcon-7b", "meta-llama/Llama-2-7b-hf"
PROMPT = "I am going é 中"

BUILD = "docker build -t triton_transformer_server ."
RUN = (
    "docker run --gpus all -it --rm --net=host --shm-size=1G --ulimit memlock=-1 --ulimit stack=67108864"
    " -v ${PWD}/model_repository:/opt/tritonserver/model_repository"
    " triton_transformer_server tritonserver --model-repository=model_repository"
)
OWN_COMMAND = RUN.removesuffix(" tritonserver --model-repository=model_repository")
GATEWAY = "docker run --rm --net=host triton_transformer_server hf-triton openai"
MOUNT_CACHE = "-v ${HOME}/.cache/huggingface:/root/.cache/huggingface"
MOUNT_ONE = (
    "-v ${HOME}/.cache/huggingface/hub/models--tiiuae--falcon-7b:/root/.cache/huggingface/hub/models--tiiuae--falcon-7b"
)

KILL_GATEWAY = """
import os, pathlib
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if b"hf_triton_cli\\0openai" in (process / "cmdline").read_bytes():
        os.kill(int(process.name), 9)
"""

CONFINED = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with LoopbackHub() as hub:
        # A long context and no end-of-text token, for a completion that takes seconds.
        falcon = build_tiny_checkpoint(folder / "falcon", "falcon", max_position_embeddings=4096, eos_token_id=None)
        hub.add(FALCON, falcon)
        hub.add(LLAMA, build_tiny_checkpoint(folder / "llama", "llama"), gated=True)
        yield hub


@pytest.fixture(autouse=True)
def _forget_requests(hub: LoopbackHub) -> None:
    hub.requests.clear()


def copy_model(name: str, folder: Path, *, is_writable: bool = True) -> Path:
    """`cp -r NAME model_repository/`, writable for the container's user or for its owner alone."""
    model = folder / "model_repository" / name
    shutil.copytree(ROOT / name, model, ignore=shutil.ignore_patterns("__pycache__", "hf_cache"))
    model.chmod(0o777 if is_writable else 0o755)
    for parent in (model.parent, folder):
        parent.chmod(0o755)
    return model


def to_hub(hub: LoopbackHub, **variables: str) -> list[str]:
    """Options that make a container use the loopback Hub, and set further variables."""
    pairs = hub.environment() | variables
    return [word for name, value in pairs.items() for word in ("-e", f"{name}={value}")]


def downloads(hub: LoopbackHub) -> list[str]:
    return [request.path for request in hub.requests if request.method == "GET" and "/api/" not in request.path]


def test_readme_shows_these_lines() -> None:
    readme = re.sub(r"\s*\\\n\s*", " ", (ROOT / "README.md").read_text())
    for line in (BUILD, RUN, MOUNT_CACHE):
        assert line in readme


def test_tutorial(start: Start, hub: LoopbackHub, tmp_path: Path) -> None:
    model = copy_model("falcon7b", tmp_path)

    container = start(RUN, tmp_path, *to_hub(hub))
    container.wait_until_ready()
    output = container.generate("falcon7b", PROMPT)
    assert output.startswith(PROMPT)
    assert len(output) > len(PROMPT)
    assert downloads(hub), "the first start must download"
    assert (model / "hf_cache").is_dir()
    assert container.stop() == 0

    hub.requests.clear()
    again = start(RUN, tmp_path, *to_hub(hub))
    again.wait_until_ready()
    assert again.generate("falcon7b", PROMPT) == output
    assert downloads(hub) == [], "the second start uses the mounted folder"
    assert again.stop() == 0


def test_inside(start: Start, hub: LoopbackHub, tmp_path: Path, engine: Any, image: str) -> None:
    copy_model("falcon7b", tmp_path)
    container = start(RUN, tmp_path, *to_hub(hub))
    container.wait_until_ready()

    users = re.findall(r"^Uid:\t(\d+)", container.execute("sh", "-c", "cat /proc/[0-9]*/status"), re.MULTILINE)
    assert set(users) == {"1000"}, "no process may run as root"
    encodings = "import locale, sys; print(sys.getfilesystemencoding(), locale.getencoding(), sys.stdout.encoding)"
    assert container.execute("python3", "-c", encodings).lower().split() == ["utf-8"] * 3
    assert container.execute("pwd").strip() == "/opt/tritonserver"
    container.execute("sh", "-c", 'touch "$HOME/.cache/writable"')
    container.execute("pip", "check")
    packages = {package["name"] for package in json.loads(container.execute("pip", "list", "--format=json"))}
    assert packages.isdisjoint({"nvidia-pytriton", "pytest", "ruff"})
    if container.ports[0] == 8000:
        check = _healthcheck(json.loads(engine("image", "inspect", image))[0])
        assert check[0] == "CMD"
        container.execute(*check[1:])


def _healthcheck(image: dict[str, Any]) -> list[str]:
    check = image.get("Healthcheck") or image["Config"]["Healthcheck"]  # podman, docker
    return list(check["Test"])


def test_its_own_command_streams_and_speaks_openais_api(
    start: Start, hub: LoopbackHub, tmp_path: Path, image: str, gateway_image: str
) -> None:
    copy_model("falcon7b", tmp_path)
    container = start(OWN_COMMAND, tmp_path, *to_hub(hub))
    container.wait_until_ready()
    container.wait_for("Ctrl+C stops the server")
    assert [model["id"] for model in container.ask_gateway("/v1/models")["data"]] == ["falcon7b"]
    body = {"model": "falcon7b", "prompt": PROMPT, "max_tokens": 8}
    text = container.ask_gateway("/v1/completions", body)["choices"][0]["text"]
    assert container.generate("falcon7b", PROMPT, max_new_tokens=8) == PROMPT + text
    assert container.generate("falcon7b_stream", PROMPT, max_new_tokens=8, stream=False) == PROMPT + text
    users = re.findall(r"^Uid:\t(\d+)", container.execute("sh", "-c", "cat /proc/[0-9]*/status"), re.MULTILINE)
    assert set(users) == {"1000"}, "no process may run as root"

    http, grpc, _, _ = container.ports
    for each in (image, gateway_image):
        (port,) = free_ports(1)
        line = f"{GATEWAY} --triton 127.0.0.1:{grpc} --port {port}"
        alone = start(line, tmp_path, *CONFINED, ports=[http, grpc, 0, port], of=each)
        alone.wait_until_answers("/health")
        assert alone.ask_gateway("/v1/completions", body)["choices"][0]["text"] == text
        alone.execute("pip", "check")
        packages = {package["name"] for package in json.loads(alone.execute("pip", "list", "--format=json"))}
        assert ("torch" in packages) == (each == image)
        assert alone.stop() == 0

    with ThreadPoolExecutor() as client:
        response = client.submit(container.ask_gateway, "/v1/completions", body | {"max_tokens": 600})
        time.sleep(0.3)
        assert not response.done(), "the request must be in flight when the server stops"
        assert container.stop() == 0
        assert response.result(timeout=10)["usage"]["completion_tokens"] == 600


def test_its_own_command_ends_with_its_gateway_or_a_bad_model(start: Start, hub: LoopbackHub, tmp_path: Path) -> None:
    model = copy_model("falcon7b", tmp_path)
    container = start(OWN_COMMAND, tmp_path, *to_hub(hub))
    container.wait_for("Ctrl+C stops the server")
    container.execute("python3", "-c", KILL_GATEWAY)
    assert container.process.wait(timeout=60) == 1
    assert "gateway_failed: the OpenAI gateway exited by signal 9" in container.log

    with (model / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "nonsense" value { string_value: "1" } }')
    refused = start(OWN_COMMAND, tmp_path, *to_hub(hub))
    assert refused.process.wait(timeout=90) == 1
    assert "error: server_failed: " in refused.log


def test_an_image_with_a_model_needs_no_network(start: Start, engine: Any, image: str, tmp_path: Path) -> None:
    bundle = [
        sys.executable,
        "-m",
        "hf_triton_cli",
        "bundle",
        "demo",
        "--no-wheels",
        "-o",
        str(tmp_path / "models.tar"),
    ]
    subprocess.run(bundle, check=True)
    [recipe] = re.findall(r"^```dockerfile\n(.*?)^```", (ROOT / "docs" / "operations.md").read_text(), re.M | re.S)
    (tmp_path / "Dockerfile").write_text(recipe.replace("FROM triton_transformer_server", f"FROM {image}"))
    engine("build", "--tag", f"{image}-demo", str(tmp_path), timeout_s=300)
    line = "docker run --rm --net=none triton_transformer_server"
    container = start(line, tmp_path, ports=[8000, 8001, 8002, 9000], of=f"{image}-demo")
    container.wait_for("Ctrl+C stops the server")
    ask = ["curl", "-fsS", "localhost:8000/v2/models/demo/generate", "-d", '{"text_input": "How can you be"}']
    assert json.loads(container.execute(*ask))["text_output"].startswith("How can you be")
    assert container.stop() == 0


def test_gated_model_needs_a_token(start: Start, hub: LoopbackHub, tmp_path: Path) -> None:
    copy_model("llama7b", tmp_path)

    for token in ({}, {"PRIVATE_REPO_TOKEN": hub.stranger_token}):
        refused = start(RUN, tmp_path, *to_hub(hub, **token))
        assert refused.process.wait(timeout=90) != 0
        sentence = next(line for line in refused.log.splitlines() if f"{LLAMA} is gated" in line)
        assert "HF_TOKEN" in sentence
        assert hub.stranger_token not in refused.log

    container = start(RUN, tmp_path, *to_hub(hub, PRIVATE_REPO_TOKEN=hub.access_token))
    container.wait_until_ready()
    assert container.generate("llama7b", PROMPT).startswith(PROMPT)
    assert container.stop() == 0
    assert hub.access_token not in container.log


def test_stop_lets_requests_finish(start: Start, hub: LoopbackHub, tmp_path: Path) -> None:
    copy_model("falcon7b", tmp_path)
    container = start(RUN, tmp_path, *to_hub(hub))
    container.wait_until_ready()
    with ThreadPoolExecutor() as client:
        response = client.submit(container.generate, "falcon7b", PROMPT, max_new_tokens=600)
        time.sleep(0.3)
        assert not response.done(), "the request must be in flight when the server stops"
        assert container.stop() == 0
        assert response.result(timeout=10).startswith(PROMPT)


def test_folder_of_another_user(start: Start, hub: LoopbackHub, tmp_path: Path) -> None:
    model = copy_model("falcon7b", tmp_path, is_writable=False)
    container = start(RUN, tmp_path, *to_hub(hub))
    container.wait_until_ready()
    assert container.generate("falcon7b", PROMPT).startswith(PROMPT)
    assert container.execute("ls", "/home/triton-server/.cache/huggingface/hub").strip()
    assert not (model / "hf_cache").exists()


def test_any_user_without_capabilities(start: Start, hub: LoopbackHub, tmp_path: Path) -> None:
    model = copy_model("falcon7b", tmp_path)
    container = start(OWN_COMMAND, tmp_path, *to_hub(hub), "--user", "4321:4321", *CONFINED)
    container.wait_until_ready()
    assert container.generate("falcon7b", PROMPT).startswith(PROMPT)
    assert container.execute("id", "-u").strip() == "4321"
    assert (model / "hf_cache").is_dir()


@pytest.mark.parametrize("option", [MOUNT_CACHE, MOUNT_ONE], ids=["everything", "one model"])
def test_mounted_cache(option: str, start: Start, hub: LoopbackHub, tmp_path: Path) -> None:
    copy_model("falcon7b", tmp_path, is_writable=False)
    cache = tmp_path / ".cache" / "huggingface"
    download = [sys.executable, "-c", f"import huggingface_hub as h; h.snapshot_download({FALCON!r})"]
    subprocess.run(download, env=os.environ | hub.environment() | {"HF_HOME": str(cache)}, check=True)
    hub.requests.clear()

    mount = option.replace("${HOME}", str(tmp_path)).split()
    container = start(RUN, tmp_path, *to_hub(hub), *mount)
    container.wait_until_ready()
    assert container.generate("falcon7b", PROMPT).startswith(PROMPT)
    assert downloads(hub) == []


def test_another_transformers(engine: Any, image: str) -> None:
    other = engine.build(f"{image}-transformers", TRANSFORMERS="transformers==5.22.0")
    show = "import importlib.metadata as m; print(*map(m.version, ('transformers', 'torch', 'numpy')))"
    versions = {tag: engine("run", "--rm", tag, "python3", "-c", show).split()[-3:] for tag in (image, other)}
    assert versions[other][0] == "5.22.0"
    assert versions[image][0] != "5.22.0"
    assert versions[image][1:] == versions[other][1:]
