# SPDX-License-Identifier: Apache-2.0
"""Servers that forward headers as request parameters, over HTTP, gRPC, streams and the gateway."""

import json
import queue
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.chat import build_chat_checkpoint
from tests.support.client import Reply, generate, generate_stream, infer
from tests.support.gateway import GatewayThread
from tests.support.paths import ROOT
from tests.support.standard import StandardServer

pytestmark = pytest.mark.full

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = {"Traceparent": TRACEPARENT, "X-Tenant": "blue", "priority": "u=1, i", "Seed": "7", "stop": "a"}
"""Three of them have a parameter's name."""
TEXT = "The canary sings"
INPUT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [TEXT]}


def flags(pattern: str) -> list[str]:
    return [f"--http-header-forward-pattern={pattern}", "--grpc-header-forward-pattern", pattern]


@pytest.fixture(scope="module")
def repository(make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` with a door, and `wrong`, whose setting is no pattern."""
    root = tmp_path_factory.mktemp("headers")
    checkpoint = build_chat_checkpoint(root / "checkpoint")
    make_folder(root / "repository", "tiny", huggingface_model=checkpoint, max_output_length=8)
    make_folder(root / "repository", "wrong", huggingface_model=checkpoint, forwarded_headers="(")
    shutil.copytree(ROOT / "stream_door", root / "repository" / "tiny_stream")
    return root / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, arguments=flags(".*")) as running:
        for name in ("tiny", "tiny_stream"):
            assert running.is_model_ready(name), running.log_tail()
        yield running


def infer_with(server: TritonServer, headers: dict[str, str], model: str = "tiny", **parameters: Any) -> Reply:
    """POST /infer; urllib would write the headers' names in capitals."""
    body = {"inputs": [INPUT], "parameters": parameters}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(f"{server.http_url}/v2/models/{model}/infer", json=body, headers=headers)
    return Reply(answer.status_code, answer.text)


def grpc_infer(server: TritonServer, model: str, headers: dict[str, str], **parameters: Any) -> str:
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([TEXT.encode()], dtype=np.object_))
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, [tensor], headers=headers, parameters=parameters)
    return str(result.as_numpy("text_output")[0].decode())


def grpc_stream(server: TritonServer, model: str, headers: dict[str, str], **parameters: Any) -> str:
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([TEXT.encode()], dtype=np.object_))
    responses: queue.Queue[Any] = queue.Queue()
    text = ""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)), headers=headers)
        client.async_stream_infer(model, [tensor], parameters=parameters, enable_empty_final_response=True)
        while True:
            result, error = responses.get(timeout=60)
            if error is not None:
                raise error
            if result.as_numpy("text_output") is not None:
                text += result.as_numpy("text_output")[0].decode()
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    return text


def test_headers_change_no_answer(server: TritonServer) -> None:
    plain = infer(server, "tiny", [TEXT], parameters={"max_tokens": 5})
    assert plain.status == 200, plain.body
    assert infer_with(server, HEADERS, max_tokens=5).body == plain.body
    text = json.loads(plain.body)["outputs"][0]["data"][0]
    names = {name.lower(): value for name, value in HEADERS.items() if name.lower() not in ("stop", "seed", "priority")}
    assert grpc_infer(server, "tiny", names, max_tokens=5) == text
    assert grpc_stream(server, "tiny_stream", names, max_tokens=5, exclude_input_in_output=False) == text
    assert generate(server, "tiny", TEXT, max_tokens=5).json()["text_output"] == text
    streamed = generate_stream(server, "tiny_stream", TEXT, max_tokens=5)
    assert streamed.text()


def test_repeated_headers_are_passed_over(server: TritonServer) -> None:
    body = json.dumps({"inputs": [INPUT]})
    headers = [("content-type", "application/json"), ("x-twice", "1"), ("X-Twice", "2"), ("x-twice", "3")]
    with httpx.Client(trust_env=False) as client:
        answer = client.post(f"{server.http_url}/v2/models/tiny/infer", content=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("wrong", [{"max_new_token": 5}, {"stop_sting": "x"}, {"tempreture": "0.5"}, {"no_such": True}])
def test_an_unknown_parameter_is_still_refused(server: TritonServer, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    reply = infer_with(server, HEADERS, **wrong)
    assert (reply.status, f"unknown_parameter: there is no parameter '{name}'" in reply.error) == (400, True), (
        reply.body
    )
    with pytest.raises(InferenceServerException, match=f"there is no parameter '{name}'"):
        grpc_infer(server, "tiny", {"x-tenant": "blue"}, **wrong)
    assert "did you mean" in reply.error or name == "no_such"


def test_the_gateway_beside_it(server: TritonServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    with (
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as gateway,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        answer = client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        streamed = client.post(f"{gateway.url}/v1/chat/completions", json=body | {"stream": True}, headers=HEADERS)
    assert "data: [DONE]" in streamed.text


def test_a_pattern_that_finds_a_parameter_alone_sets_it(repository: Path) -> None:
    """Triton does not say which are headers; the documents advise against such patterns."""
    arguments = ["--model-control-mode=explicit", "--load-model=tiny", *flags("^(seed|stop_strings)$")]
    with TritonServer(repository, arguments=arguments) as server:
        refused = infer_with(server, {"seed": "7"})
        assert (refused.status, "seed must be an integer" in refused.error) == (400, True), refused.body
        assert "given twice" in infer_with(server, {"seed": "7"}, seed=7).error
        assert infer_with(server, {"stop_strings": "T"}).body == infer_with(server, {}, stop_strings="T").body


def test_without_a_pattern_no_name_is_passed_over(
    standard: StandardServer, make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    make_folder(tmp_path, "named", huggingface_model=standard.checkpoint, forwarded_headers="^x-tenant$")
    with standard.beside(tmp_path):
        server = standard.serve("plain")
        refused = infer_with(server, {}, model="plain", **{"X-Tenant": "blue"})
        assert "unknown_parameter: there is no parameter 'X-Tenant'" in refused.error
        assert infer_with(server, {}, model="named", **{"X-Tenant": "blue"}).status == 200
        assert infer_with(server, {}, model="plain", traceparent=TRACEPARENT).status == 200


def test_a_wrong_pattern_fails_the_load(server: TritonServer) -> None:
    (model,) = (model for model in server.models() if model.name == "wrong")
    assert "forwarded_headers must be a regular expression, got '('" in model.reason
