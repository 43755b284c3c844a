# SPDX-License-Identifier: Apache-2.0
"""What models say they are: asked of Triton itself, and read by the gateway."""

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest
from tritonclient.grpc import model_config_pb2

from hf_triton.protocol.model_info import MODEL_INFO, ModelInfo
from hf_triton.protocol.sleep import SleepAnswer
from hf_triton.testing import TritonServer
from hf_triton_gateway.http import hints
from hf_triton_gateway.triton.calls import Calls
from hf_triton_gateway.triton.endpoint import Endpoint
from hf_triton_gateway.triton.model_infos import RETRY_S, ModelInfos, control_request
from hf_triton_gateway.triton.triton_messages import Folder
from hf_triton_gateway.triton.triton_models import TritonModels
from tests.support.gateway import GatewayThread, wait_until

MODELS = ("bare", "batching", "decoupled", "demo", "slow", "tiny")
HELLO = [{"role": "user", "content": "Hello!"}]


def num_requests(server: TritonServer, name: str) -> dict[str, float]:
    lines = httpx.get(server.metrics_url).text.splitlines()
    counted = (line for line in lines if line.startswith("hf_triton_requests_total{") and f'model="{name}"' in line)
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in counted}


def ask(server: TritonServer, name: str) -> ModelInfo:
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [""]}] if name == "batching" else []
    body = {"inputs": inputs, "parameters": {"model_info": True}}
    answer = httpx.post(f"{server.http_url}/v2/models/{name}/infer", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    [output] = answer.json()["outputs"]
    assert (output["name"], output["shape"]) == ("output", [1, 1] if name == "batching" else [1])
    return ModelInfo.from_json(output["data"][0])


@pytest.mark.parametrize("name", ["bare", "batching", "demo", "slow", "tiny"])
def test_a_model_says_what_it_is(triton: TritonServer, name: str) -> None:
    if name == "bare":  # it is decoupled, and Triton's /infer refuses those
        text = httpx.post(
            f"{triton.http_url}/v2/models/bare/generate_stream", json={"model_info": True}, timeout=60
        ).text
        info = ModelInfo.from_json(json.loads(text.removeprefix("data: "))["output"])
    else:
        info = ask(triton, name)
    assert (info.task, info.engine, info.device, info.dtype) == ("text-generation", "continuous", "cpu", "float32")
    assert info.memory_bytes > 10_000
    assert info.context_length == (512 if name == "demo" else 256)
    assert (info.template_variables is None) is (name == "bare")


def test_asking_is_no_request(triton: TritonServer) -> None:
    before = num_requests(triton, "tiny")
    for _ in range(5):
        ask(triton, "tiny")
    httpx.post(f"{triton.http_url}/v2/models/tiny/generate", json={"text_input": "a", "max_tokens": 1}, timeout=60)
    wait_until(lambda: sum(num_requests(triton, "tiny").values()) == sum(before.values()) + 1)


def test_a_model_sleeps_until_a_request_wakes_it(triton: TritonServer) -> None:
    def infer(**parameters: Any) -> Any:
        body = {"inputs": [], "parameters": parameters}
        answer = httpx.post(f"{triton.http_url}/v2/models/tiny/infer", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["outputs"][0]["data"][0]

    def generate() -> str:
        body = {"text_input": "one two", "max_tokens": 8, "temperature": 1.0, "seed": 5}
        answer = httpx.post(f"{triton.http_url}/v2/models/tiny/generate", json=body, timeout=60)
        return str(answer.json()["text_output"])

    def gauge() -> str:
        lines = httpx.get(triton.metrics_url).text.splitlines()
        [line] = [line for line in lines if line.startswith("hf_triton_sleeping{") and 'model="tiny"' in line]
        return line.rpartition(" ")[2]

    num_before = sum(num_requests(triton, "tiny").values())
    text = generate()
    wait_until(lambda: sum(num_requests(triton, "tiny").values()) > num_before)
    before = num_requests(triton, "tiny")
    answer = SleepAnswer.from_json(infer(sleep=True))
    assert answer.is_sleeping
    assert answer.seconds > 0
    assert SleepAnswer.from_json(infer(sleep=True)) == SleepAnswer(is_sleeping=True)
    assert json.loads(infer(tokenizer_request='{"text": "one"}'))
    assert ask(triton, "tiny").is_sleeping is True
    wait_until(lambda: gauge() == "1")
    assert httpx.get(f"{triton.http_url}/v2/models/tiny/ready").status_code == 200
    assert num_requests(triton, "tiny") == before, "none of these is one"
    assert generate() == text
    assert ask(triton, "tiny").is_sleeping is False
    wait_until(lambda: gauge() == "0")
    infer(sleep=True)
    assert SleepAnswer.from_json(infer(sleep=False)).is_sleeping is False
    assert generate() == text


def test_a_busy_model_answers(triton: TritonServer, gateway: GatewayThread) -> None:
    body = {"model": "slow", "prompt": ["a"] * 64, "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=60) as answer:
        assert next(answer.iter_lines())
        assert ask(triton, "slow").engine == "continuous"


def test_the_gateway_reads_it(triton: TritonServer) -> None:
    async def infos() -> dict[str, ModelInfo | None]:
        models = TritonModels(Endpoint(triton.grpc_url), 60.0)
        try:
            return {model.name: model.folder.info for model in await models.models()}
        finally:
            await models.close()

    told = asyncio.run(infos())
    assert tuple(told) == MODELS
    assert {info.context_length for info in told.values() if info is not None} == {256, 512}
    assert None not in told.values()


def test_nothing_runs_on_when_the_models_are_closed(triton: TritonServer) -> None:
    async def left_behind(listed_s: float) -> set[asyncio.Task[None]]:
        models = TritonModels(Endpoint(triton.grpc_url), 60.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(models.models(), listed_s)  # the list is shared: it is made on
        await models.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    for milliseconds in (0, 1, 3, 10, 30, 100):
        assert asyncio.run(left_behind(milliseconds / 1000)) == set()


@pytest.mark.parametrize(
    ("name", "streams"), [("tiny", False), ("demo", True), ("decoupled", True), ("batching", False)]
)
def test_a_variable_that_no_template_reads_is_a_hint(gateway: GatewayThread, name: str, streams: bool) -> None:
    fields = {"reasoning_effort": "low", "chat_template_kwargs": {"reflection": False}}
    body = {"model": name, "messages": HELLO, "max_tokens": 4, "stream": streams, **fields}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers[hints.HEADER] == "reasoning_effort, chat_template_kwargs.reflection"
    body = {"model": name, "input": "Hello!", "reasoning": {"effort": "low"}, "stream": streams}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=60)
    assert (answer.status_code, answer.headers[hints.HEADER]) == (200, "reasoning.effort")


def config(*inputs: dict[str, Any], backend: str = "python", max_batch_size: int = 0) -> Any:
    outputs = [{"name": name, "data_type": "TYPE_STRING", "dims": [-1]} for name in ("output", "num_input_tokens")]
    return model_config_pb2.ModelConfig(
        name="m", backend=backend, max_batch_size=max_batch_size, input=inputs, output=outputs
    )


TEXT: dict[str, Any] = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1], "optional": True}
SEED: dict[str, Any] = {"name": "seed", "data_type": "TYPE_INT64", "dims": [1]}


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        (config(TEXT), {}),
        (config(TEXT, max_batch_size=4), {"text_input": [1, 1]}),
        (config(TEXT, SEED), {"seed": [1]}),
        (config(TEXT, SEED, max_batch_size=4), {"seed": [1, 1]}),
    ],
    ids=["optional", "a batch", "required", "required in a batch"],
)
def test_what_triton_demands_is_sent(given: Any, shapes: dict[str, list[int]]) -> None:
    request = control_request("m", given, MODEL_INFO)
    assert {each.name: list(each.shape) for each in request.inputs} == shapes
    sizes = {"text_input": 4, "seed": 8}
    assert [len(content) for content in request.raw_input_contents] == [sizes[name] for name in shapes]


def test_folders_of_other_libraries_are_not_asked() -> None:
    assert control_request("m", config(TEXT, backend="vllm"), MODEL_INFO) is None
    alone = config(TEXT)
    del alone.output[:]
    assert control_request("m", alone, MODEL_INFO) is None


class Stub:
    """Triton, whose model says how often it was asked; it fails as often as it is told."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_asked = 0
        self._num_failures = num_failures

    async def ModelInfer(self, request: Any, **call: Any) -> Any:  # noqa: N802
        from tritonclient.grpc import service_pb2

        self.num_asked += 1
        if self.num_asked <= self._num_failures:
            return service_pb2.ModelInferResponse()
        info = ModelInfo("text-generation", "m", self.num_asked, "batch", "float32", "cpu", 1, 1, 1)
        text = info.to_json().encode()
        answer = service_pb2.ModelInferResponse(raw_output_contents=[len(text).to_bytes(4, "little") + text])
        answer.outputs.add(name="output", datatype="BYTES", shape=[1])
        return answer


def test_a_model_is_asked_once_for_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(stub: Stub) -> list[int | None]:
        infos, first, second = ModelInfos(Calls(stub), ()), config(TEXT), config(TEXT, max_batch_size=4)

        async def of(given: Any) -> int | None:
            info = await infos.of(Folder.from_config("m", given), given)
            return None if info is None else info.context_length

        told = [await of(first), await of(first), await of(second), await of(second)]
        infos.keep(["m"])
        told.append(await of(second))
        infos.keep([])
        told.append(await of(second))
        infos.forget("m")
        return [*told, await of(second)]

    assert asyncio.run(asked(Stub())) == [1, 1, 2, 2, 2, 3, 4]
    assert asyncio.run(asked(Stub(2))) == [None, None, None, None, None, 3, 4]
    monkeypatch.setattr("hf_triton_gateway.triton.model_infos.RETRY_S", -RETRY_S)
    assert asyncio.run(asked(Stub(1))) == [None, 2, 3, 3, 3, 4, 5]


def test_what_another_release_says_is_read() -> None:
    info = ModelInfo("embeddings", "a/b", 512, "torch", "float32", "cpu", 1, 1, 1, template_variables=("x",))
    assert ModelInfo.from_json(info.to_json()) == info
    assert ModelInfo.from_json(json.dumps({**json.loads(info.to_json()), "later": 1})) == info
    for text in ("[]", "{}", "x", '{"task": "embeddings"}'):
        with pytest.raises(ValueError, match=r"model_info|JSON|Expecting"):
            ModelInfo.from_json(text)
