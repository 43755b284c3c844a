# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's four clients and the gRPC stream give the output of transformers.

Every client is closed before the server stops: an open HTTP connection holds its exit for 30 s.
"""

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from tritonclient.utils import InferenceServerException

from hf_triton.testing import TritonServer
from tests.support.reference import Reference, load_reference
from tests.support.standard import StandardServer

TIMEOUT_S = 60.0
TEXTS = ["I am going", "你好 🙂", "nul\0byte", "", " the sea "]
NUM_TOKENS = 6
PARAMETERS = {"max_new_tokens": NUM_TOKENS, "repetition_penalty": 1.5, "exclude_input_in_output": False}
BAD = {"max_new_tokens": 0}


@pytest.fixture(scope="module")
def checkpoint(standard: StandardServer) -> Path:
    return standard.checkpoint


@pytest.fixture(scope="module")
def server(standard: StandardServer) -> TritonServer:
    return standard.serve("plain", "batched")


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[str]:
    reference: Reference = load_reference(checkpoint)
    return [reference.text(text, NUM_TOKENS, repetition_penalty=1.5) for text in TEXTS]


def inputs_of(module: Any, texts: list[str], model: str = "plain") -> list[Any]:
    shape = [len(texts)] if model == "plain" else [len(texts), 1]
    tensor = module.InferInput("text_input", shape, "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object).reshape(shape))
    return [tensor]


def texts_of(result: Any) -> list[str]:
    return [element.decode() for element in result.as_numpy("text_output").ravel()]


def http_url(server: TritonServer) -> str:
    return f"{server.host}:{server.http_port}"


COUNTS = ["num_input_tokens", "num_output_tokens", "finish_reason"]


@pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
def test_requested_outputs_are_filled(server: TritonServer, checkpoint: Path, module: Any) -> None:
    num_prompt = len(load_reference(checkpoint).tokenizer(TEXTS[0]).input_ids)
    url = http_url(server) if module is httpclient else server.grpc_url
    with module.InferenceServerClient(url) as client:

        def ask(*names: str, **parameters: Any) -> Any:
            outputs = [module.InferRequestedOutput(name) for name in names] or None
            inputs = inputs_of(module, TEXTS[:1])
            return client.infer("plain", inputs, outputs=outputs, parameters={"max_new_tokens": 3, **parameters})

        found = ask(*COUNTS)
        counts = [found.as_numpy(name).ravel().tolist() for name in COUNTS]
        assert counts == [[num_prompt], [3], [b"length"]]
        assert found.as_numpy("text_output") is None
        assert ask(*COUNTS, return_num_output_tokens=False).as_numpy("num_output_tokens") is None
        assert len(json.loads(ask("logprobs").as_numpy("logprobs").item())) == 3
        assert [ask().as_numpy(name) for name in COUNTS] == [None] * 3
        assert [ask("text_output").as_numpy(name) for name in COUNTS] == [None] * 3
        with pytest.raises(InferenceServerException, match="prompt_logprobs is filled by the parameter of that name"):
            ask("text_output", "prompt_logprobs")
        assert ask("prompt_logprobs", prompt_logprobs=0).as_numpy("prompt_logprobs").size == 1


def ask_http(server: TritonServer, texts: list[str], parameters: dict[str, Any], model: str) -> list[str]:
    with httpclient.InferenceServerClient(http_url(server), network_timeout=TIMEOUT_S) as client:
        return texts_of(client.infer(model, inputs_of(httpclient, texts, model), parameters=parameters))


def ask_http_async(server: TritonServer, texts: list[str], parameters: dict[str, Any], model: str) -> list[str]:
    with httpclient.InferenceServerClient(http_url(server), network_timeout=TIMEOUT_S) as client:
        pending = client.async_infer(model, inputs_of(httpclient, texts, model), parameters=parameters)
        return texts_of(pending.get_result())


def ask_http_aio(server: TritonServer, texts: list[str], parameters: dict[str, Any], model: str) -> list[str]:
    async def ask() -> list[str]:
        async with httpaio.InferenceServerClient(http_url(server)) as client:
            return texts_of(await client.infer(model, inputs_of(httpaio, texts, model), parameters=parameters))

    return asyncio.run(ask())


def ask_grpc(server: TritonServer, texts: list[str], parameters: dict[str, Any], model: str) -> list[str]:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return texts_of(client.infer(model, inputs_of(grpcclient, texts, model), parameters=parameters))


def take(answers: "queue.Queue[tuple[Any, Any]]") -> list[str]:
    result, error = answers.get(timeout=TIMEOUT_S)
    if error is not None:
        raise error
    return texts_of(result)


def ask_grpc_async(server: TritonServer, texts: list[str], parameters: dict[str, Any], model: str) -> list[str]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.async_infer(
            model,
            inputs_of(grpcclient, texts, model),
            lambda result, error: answers.put((result, error)),
            parameters=parameters,
        )
        return take(answers)


def ask_grpc_stream(server: TritonServer, texts: list[str], parameters: dict[str, Any], model: str) -> list[str]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, inputs_of(grpcclient, texts, model), parameters=parameters)
        client.stop_stream()
        assert answers.qsize() == 1, "one answer"
        return take(answers)


def ask_grpc_aio(server: TritonServer, texts: list[str], parameters: dict[str, Any], model: str) -> list[str]:
    async def ask() -> list[str]:
        async with grpcaio.InferenceServerClient(server.grpc_url) as client:
            return texts_of(await client.infer(model, inputs_of(grpcaio, texts, model), parameters=parameters))

    return asyncio.run(ask())


def ask_grpc_aio_stream(server: TritonServer, texts: list[str], parameters: dict[str, Any], model: str) -> list[str]:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs_of(grpcaio, texts, model), "parameters": parameters}

    async def ask() -> list[str]:
        async with grpcaio.InferenceServerClient(server.grpc_url) as client:
            answers = [each async for each in client.stream_infer(requests())]
        ((result, error),) = answers
        if error is not None:
            raise error
        return texts_of(result)

    return asyncio.run(ask())


CLIENTS: dict[str, Callable[..., list[str]]] = {
    "http": ask_http,
    "http, async": ask_http_async,
    "http.aio": ask_http_aio,
    "grpc": ask_grpc,
    "grpc, async": ask_grpc_async,
    "grpc, stream": ask_grpc_stream,
    "grpc.aio": ask_grpc_aio,
    "grpc.aio, stream": ask_grpc_aio_stream,
}


@pytest.mark.parametrize("model", ["plain", "batched"])
@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_gets_the_output_of_transformers(
    client: str, model: str, server: TritonServer, wanted: list[str]
) -> None:
    assert CLIENTS[client](server, TEXTS, PARAMETERS, model) == wanted


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_gets_a_refusal_in_words(client: str, server: TritonServer) -> None:
    with pytest.raises(InferenceServerException, match="max_new_tokens must be an integer >= 1"):
        CLIENTS[client](server, TEXTS, BAD, "plain")


@pytest.mark.parametrize("model", ["plain", "batched"])
def test_one_grpc_client_from_many_threads(model: str, server: TritonServer, wanted: list[str]) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client, ThreadPoolExecutor(8) as pool:

        def ask(text: str) -> list[str]:
            return texts_of(client.infer(model, inputs_of(grpcclient, [text], model), parameters=PARAMETERS))

        assert list(pool.map(ask, TEXTS * 6)) == [[text] for text in wanted * 6]


@pytest.mark.parametrize("module", [httpaio, grpcaio], ids=["http.aio", "grpc.aio"])
def test_many_at_once_in_one_event_loop(module: Any, server: TritonServer, wanted: list[str]) -> None:
    async def ask_all() -> list[list[str]]:
        url = http_url(server) if module is httpaio else server.grpc_url
        async with module.InferenceServerClient(url) as client:
            calls = [client.infer("plain", inputs_of(module, [text]), parameters=PARAMETERS) for text in TEXTS * 6]
            return [texts_of(result) for result in await asyncio.gather(*calls)]

    assert asyncio.run(ask_all()) == [[text] for text in wanted * 6]


@pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "json"])
def test_http_tensors_in_both_forms(is_binary: bool, server: TritonServer, wanted: list[str]) -> None:
    tensor = httpclient.InferInput("text_input", [len(TEXTS)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=object), binary_data=is_binary)
    output = httpclient.InferRequestedOutput("text_output", binary_data=is_binary)
    with httpclient.InferenceServerClient(http_url(server), network_timeout=TIMEOUT_S) as client:
        result = client.infer("plain", [tensor], outputs=[output], parameters=PARAMETERS)
    found = [each if isinstance(each, str) else each.decode() for each in result.as_numpy("text_output").ravel()]
    assert found == wanted
