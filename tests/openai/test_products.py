# SPDX-License-Identifier: Apache-2.0
"""A model's process without the gateway's packages, a gateway without the model's, and a folder without either."""

import shutil
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from hf_triton.extras import MODULES
from hf_triton.server import free_ports
from hf_triton.testing import TritonServer
from tests.support.gateway import add_demo, wait_until

HIDES = "import sys\n\nsys.modules.update(dict.fromkeys({names}))\n"
"""Makes modules unimportable, as if they were not installed."""
GATEWAY = "from hf_triton_cli.command import main\n\nmain()\n"
MODEL = "from hf_triton import TritonPythonModel as TritonPythonModel\n"
ALL = {name for names in MODULES.values() for name in names}


def hiding(extra: str, *others: str) -> str:
    return HIDES.format(names=sorted({*ALL, *others} - {*MODULES[extra]}))


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("products")
    add_demo(repository)
    for folder in ("demo", "demo_stream"):
        code = repository / folder / "1" / "model.py"
        code.write_text(hiding("model", "starlette") + code.read_text())
    shutil.copytree(repository / "demo", repository / "bare")
    (repository / "bare" / "1" / "model.py").write_text(HIDES.format(names=sorted(ALL)) + MODEL)
    with TritonServer(repository) as server:
        assert server.is_model_ready("demo"), server.log_tail()
        yield server


@pytest.fixture(scope="module")
def url(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    [port] = free_ports(1)
    code = hiding("gateway", "numba", "peft", "soundfile", "tokenizers") + GATEWAY
    command = [sys.executable, "-c", code, "openai", "--triton", triton.grpc_url, "--port", str(port)]
    log = tmp_path_factory.mktemp("gateway") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: process.poll() is not None or b"running on" in log.read_bytes())
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.full
def test_a_gateway_without_torch_answers_for_a_model_without_fastapi(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        assert [model["id"] for model in client.get("/v1/models").raise_for_status().json()["data"]] == ["demo"]
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}}
        for more in ({}, {"stream": True}, form):
            answer = client.post("/v1/chat/completions", json=body | more).raise_for_status()
            assert "content" in answer.text
        assert answer.json()["choices"][0]["message"]["content"] == '"yes"'
        assert client.get("/metrics").status_code == 200
        assert client.get("/docs").status_code == 200


@pytest.mark.full
def test_a_folder_says_what_a_bare_install_lacks(triton: TritonServer) -> None:
    [sentence] = [model.sentence for model in triton.models() if model.name == "bare"]
    assert sentence.startswith("client_missing: hf_triton.TritonPythonModel needs accelerate, ")
    assert sentence.endswith(" and others, not installed: `pip install 'hf-triton[model]'`")
