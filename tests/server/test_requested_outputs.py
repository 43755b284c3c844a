# SPDX-License-Identifier: Apache-2.0
"""A response has the outputs that its request names, and no other: every task, decoupled and not, and a stream door.

A tensor that was not asked for ends the model's process on Python 3.12, and the server with it.
"""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from hf_triton.testing import TritonServer, build_tiny_encoder
from tests.support.images import IMAGES, encoded, save_image_checkpoint
from tests.support.speech import encode, save_whisper, sound
from tests.support.standard import StandardServer
from tests.support.tasks import save_task_checkpoint

pytestmark = [pytest.mark.python312, pytest.mark.full]
TIMEOUT_S = 60.0
TEXT = {"text_input": b"The canary sings"}
INPUTS: dict[str, dict[str, bytes]] = {
    "plain": TEXT,
    "stream": TEXT,
    "plain_stream": TEXT,
    "embedder": TEXT,
    "reranker": {"query": b"a bird", "documents": b"The canary sings"},
    "words": TEXT,
    "whisper": {"audio": encode(sound(1.3, 1))},
    "vit": {"image": encoded(IMAGES[0], "PNG")},
}
"""Folders, and a request's inputs."""
DECOUPLED = ("stream", "plain_stream")
BY_PARAMETER = {"prompt_logprobs": 0}
"""What fills outputs that no name alone fills."""


@pytest.fixture(scope="module")
def server(
    standard: StandardServer, make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("root")
    checkpoints = {
        "embedder": build_tiny_encoder(root / "embedder"),
        "reranker": save_task_checkpoint(root / "reranker", "bert", "sequence", num_labels=1),
        "words": save_task_checkpoint(root / "words", "bert", "tokens", num_labels=3),
        "whisper": save_whisper(root / "whisper"),
        "vit": save_image_checkpoint(root / "vit", "vit"),
    }
    for name, checkpoint in checkpoints.items():
        task = {"task": "rerank"} if name == "reranker" else {}
        make_folder(root / "repository", name, huggingface_model=checkpoint, **task)
    standard.serve("plain", "stream", "plain_stream")
    with standard.beside(root / "repository") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(server.grpc_url) as connected:
        yield connected


@pytest.fixture(scope="module")
def http_client(server: TritonServer) -> Iterator[Any]:
    with httpclient.InferenceServerClient(f"{server.host}:{server.http_port}", network_timeout=TIMEOUT_S) as connected:
        yield connected


def request_of(module: Any, folder: str, names: list[str]) -> dict[str, Any]:
    tensors = []
    for name, value in INPUTS[folder].items():
        tensors.append(module.InferInput(name, [1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([value], object))
    parameters: dict[str, Any] = {name: value for name, value in BY_PARAMETER.items() if name in names}
    if folder == "plain_stream":
        parameters["stream"] = False  # which streams otherwise, and not every output
    outputs = [module.InferRequestedOutput(name) for name in names]
    return {"model_name": folder, "inputs": tensors, "outputs": outputs, "parameters": parameters}


def outputs_of(client: Any, folder: str) -> list[str]:
    return [output.name for output in client.get_model_metadata(folder).outputs]


def infer_stream(client: Any, **request: Any) -> list[Any]:
    """The responses to a request over ModelStreamInfer, to the one that says that it is the last."""
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: arrived.put((result, error)))
    try:
        client.async_stream_infer(**request, enable_empty_final_response=True)
        responses = []
        while not (responses and responses[-1].get_response().parameters["triton_final_response"].bool_param):
            result, error = arrived.get(timeout=TIMEOUT_S)
            assert error is None, f"{request['outputs'][0].name()}: {error.message()}"
            responses.append(result)
        return responses
    finally:
        client.stop_stream()


def filled(responses: list[Any]) -> set[str]:
    return {output.name for response in responses for output in response.get_response().outputs}


@pytest.mark.parametrize("folder", INPUTS)
def test_each_output_comes_alone(server: TritonServer, client: Any, folder: str) -> None:
    for name in outputs_of(client, folder):
        responses = infer_stream(client, **request_of(grpcclient, folder, [name]))
        assert filled(responses) == {name}, name
    assert server.is_model_ready(folder)


@pytest.mark.parametrize("folder", [name for name in INPUTS if name not in DECOUPLED])
def test_each_output_comes_alone_without_a_stream(
    server: TritonServer, client: Any, http_client: Any, folder: str
) -> None:
    names = outputs_of(client, folder)
    for asked in ([name] for name in names):
        assert filled([client.infer(**request_of(grpcclient, folder, asked))]) == set(asked)
        answer = http_client.infer(**request_of(httpclient, folder, asked)).get_response()
        assert {output["name"] for output in answer["outputs"]} == set(asked)
    assert server.is_model_ready(folder)


@pytest.mark.parametrize("folder", ["plain", "stream", "plain_stream"])
def test_deltas_without_the_text_are_sent(server: TritonServer, client: Any, folder: str) -> None:
    request = request_of(grpcclient, folder, ["finish_reason", "num_output_tokens"])
    request["parameters"] = {"stream": True, "max_new_tokens": 5}
    responses = infer_stream(client, **request)
    assert filled(responses) == {"finish_reason", "num_output_tokens"}
    assert server.is_model_ready(folder)


@pytest.mark.parametrize("folder", ["plain", "stream", "plain_stream"])
def test_other_answers_have_what_was_asked_alone(server: TritonServer, client: Any, folder: str) -> None:
    """The answer to a cancelling request fills the texts, and what the model is one output."""
    for parameters, asked in (({"cancel": True}, "finish_reason"), ({"model_info": True}, "text_output")):
        request = request_of(grpcclient, folder, [asked])
        request |= {"parameters": parameters, "request_id": "nothing has this id"}
        assert filled(infer_stream(client, **request)) == set()
    assert server.is_model_ready(folder)
