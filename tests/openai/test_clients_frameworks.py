# SPDX-License-Identifier: Apache-2.0
"""Clients with an environment of their own: the npm package, LangChain, LiteLLM, LlamaIndex, genai-perf."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from hf_triton.testing import TritonServer
from tests.support.clients import CLIENTS, has, run
from tests.support.gateway import GatewayThread

SCRIPTS = Path(__file__).parent / "clients"
SENTENCE = "the model 'nobody' does not exist"
PYTHONS = {"langchain": "frameworks", "llama_index": "frameworks", "litellm": "litellm"}
"""A client's script, and its environment."""
NUM_TOKENS = 8


def node(folder: Path) -> tuple[list[str], Path]:
    """The npm package's script, and the folder to run it in."""
    has(folder / "node_modules" / "openai" / "package.json")
    program = shutil.which("node")
    if program is None:
        assert not os.environ.get("REQUIRE_CLIENTS"), "node is missing"
        pytest.skip("node is not installed")
    return [program, str(SCRIPTS / "openai_chat.mjs")], folder


@pytest.fixture
def report(gateway: GatewayThread, tmp_path: Path) -> Callable[[str], Any]:
    """Run a client's script, and give what it found."""

    def run_script(client: str) -> Any:
        if client == "npm":
            command, folder = node(CLIENTS / "npm")
        else:
            python = has(CLIENTS / PYTHONS[client] / "bin" / "python")
            command, folder = [str(python), str(SCRIPTS / f"{client}_chat.py")], tmp_path
        local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network
        return json.loads(run([*command, gateway.url], folder, **local).splitlines()[-1])

    return run_script


@pytest.mark.parametrize("name", ["npm", *PYTHONS])
def test_client(report: Callable[[str], Any], name: str, openai_answer: str) -> None:
    found = report(name)
    assert found["chat"] == found["stream"] == found.get("helper", openai_answer) == openai_answer
    assert found.get("usage", NUM_TOKENS) == NUM_TOKENS
    assert found["structured"].keys() == {"yes"}
    assert found["tool"]["name"] == "look_up"
    assert isinstance(found["tool"]["arguments"]["yes"], bool)
    assert found["error"]["type"] == "NotFoundError"
    assert (found["error"]["status"], found["error"]["code"]) == (404, "model_not_found")
    assert SENTENCE in found["error"]["text"]


@pytest.fixture
def openai_answer(client: openai.OpenAI) -> str:
    """What OpenAI's Python client gets."""
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=NUM_TOKENS, temperature=0)
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_genai_perf(gateway: GatewayThread, triton: TritonServer, tmp_path: Path, kind: str, streams: bool) -> None:
    program = has(CLIENTS / "genai_perf" / "bin" / "genai-perf")
    analyzer = has(CLIENTS / "perf_analyzer" / "bin" / "perf_analyzer").parent
    command = (
        f"{program} profile -m demo --endpoint-type {kind} -u 127.0.0.1:{gateway.port} --request-count 6 "
        f"--tokenizer {Path(__file__).parents[2] / 'hf_triton' / 'demo'} --synthetic-input-tokens-mean 8 "
        f"--synthetic-input-tokens-stddev 0 --output-tokens-mean {NUM_TOKENS} --concurrency 2 "
        " --artifact-dir artifacts"
    )
    path = os.pathsep.join([str(program.parent), str(analyzer), os.environ["PATH"]])
    options = ["--streaming"] if streams else []
    run([*command.split(), *options], tmp_path, PATH=path, LD_LIBRARY_PATH=str(analyzer))
    [report] = tmp_path.glob("artifacts/*/profile_export_genai_perf.json")
    figures = json.loads(report.read_text())
    assert figures["request_count"]["avg"] == 6
    if streams:
        assert 0 < figures["time_to_first_token"]["avg"] < figures["request_latency"]["avg"]
