# SPDX-License-Identifier: Apache-2.0
"""Streamed deltas over `/generate_stream` and gRPC streams."""

import itertools
import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, deserialize_bytes_tensor

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.chain import build_chain
from tests.support.client import generate, generate_stream, infer, open_stream
from tests.support.doors import pack
from tests.support.slow_model import DECOUPLED, SLOW_MODEL, STEP_S
from tests.support.standard import StandardServer

FAILING_MODEL = """
import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    def is_complete(self, text):
        if len(text) > 12 and "x" in text:
            raise RuntimeError("in the middle")
        return False
"""
FOLDERS = ("deltas", "two_rows")
ON_DEMAND = ("always", "failing", "bytes")
ROUND = "🙂你é x"
"""What `bytes` writes behind `x`, round and round, a token for each byte."""
PROMPT, OTHER_PROMPT = "The canary sings", "Where does the river go"
NUM_TOKENS = 30
LONG_TOKENS = 230


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path], standard: StandardServer
) -> Iterator[TritonServer]:
    """`two_rows` writes at most two texts at a time, 10 tokens/s each; `failing` raises in the middle of some texts."""
    root = tmp_path_factory.mktemp("repository")
    plain = build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None)
    known = build_chain(tmp_path_factory.mktemp("bytes"), ROUND)
    for name in (*FOLDERS, *ON_DEMAND):
        folder = make_folder(
            root,
            name,
            config=DECOUPLED,
            huggingface_model=known if name in ("bytes", "failing") else plain,
            stream=name == "always",
            max_num_seqs=2 if name == "two_rows" else 32,
            max_output_length=NUM_TOKENS,
        )
        if name == "two_rows":
            (folder / "1" / "model.py").write_text(SLOW_MODEL)
        if name == "failing":
            (folder / "1" / "model.py").write_text(FAILING_MODEL)
    standard.serve("plain")
    with standard.beside(root, ON_DEMAND) as running:
        for name in FOLDERS:
            assert running.is_model_ready(name), running.log_tail()
        yield running


@pytest.fixture(autouse=True)
def _unharmed(server: TritonServer) -> Iterator[None]:
    """After every test the same prompt has the same text, and the server lives."""
    before = write(server, "deltas", PROMPT, max_new_tokens=4)
    yield
    assert write(server, "deltas", PROMPT, max_new_tokens=4) == before
    assert server.is_live()


def write(server: TritonServer, model: str, text: str, **fields: object) -> str:
    """The text at once, without the prompt."""
    reply = generate(server, model, text, **({"exclude_input_in_output": True, "stream": False} | fields))
    assert reply.status == 200, reply.body
    return str(reply.json()["text_output"])


def streamed(server: TritonServer, model: str, text: str, **fields: object) -> str:
    return generate_stream(server, model, text, stream=True, **fields).text()


# --- a client of gRPC streams ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    request_id: str
    texts: list[str]
    outputs: dict[str, list[Any]]
    is_final: bool
    arrival_s: float


class GrpcStream:
    """Requests and responses over one stream of tritonclient."""

    def __init__(self, server: TritonServer, wants_empty_final: bool = False) -> None:
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._answers: queue.Queue[tuple[Any, InferenceServerException | None, float]] = queue.Queue()
        self._wants_empty_final = wants_empty_final

    def __enter__(self) -> "GrpcStream":
        self._client.start_stream(lambda result, error: self._answers.put((result, error, time.monotonic())))
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def ask(self, model: str, *texts: str, request_id: str = "", **parameters: object) -> None:
        tensor = grpcclient.InferInput("text_input", [len(texts)], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
        self._client.async_stream_infer(
            model,
            [tensor],
            request_id=request_id,
            parameters={"stream": True, **parameters},
            enable_empty_final_response=self._wants_empty_final,
        )

    def take(self) -> Response:
        result, error, arrival_s = self._answers.get(timeout=60)
        if error is not None:
            raise error
        message = result.get_response()
        outputs = {output.name: result.as_numpy(output.name).ravel().tolist() for output in message.outputs}
        texts = [element.decode() for element in outputs.get("text_output", [])]
        return Response(message.id, texts, outputs, message.parameters["triton_final_response"].bool_param, arrival_s)

    def take_all(self) -> list[Response]:
        """Up to the next final response."""
        responses = [self.take()]
        while not responses[-1].is_final:
            responses.append(self.take())
        return responses

    def is_silent(self, seconds: float = 0.3) -> bool:
        """Whether nothing more comes."""
        time.sleep(seconds)
        return self._answers.empty()


def joined(responses: list[Response]) -> list[str]:
    return ["".join(pieces) for pieces in zip(*[each.texts for each in responses], strict=True)]


# --- pieces ----------------------------------------------------------------------------------------------------------


def test_deltas_arrive_during_generation_over_http(server: TritonServer) -> None:
    found = generate_stream(server, "two_rows", PROMPT, stream=True)
    assert found.content_type.startswith("text/event-stream")
    assert len(found.events) > NUM_TOKENS / 3
    assert found.events[-1].arrival_s - found.events[0].arrival_s > NUM_TOKENS * STEP_S / 2
    assert found.text() == write(server, "deltas", PROMPT)
    assert all(data["model_name"] == "two_rows" for data in found.data)


def test_deltas_arrive_during_generation_over_grpc(server: TritonServer) -> None:
    with GrpcStream(server) as stream:
        stream.ask("two_rows", PROMPT)
        responses = stream.take_all()
        assert stream.is_silent()
    assert len(responses) > NUM_TOKENS / 3
    assert responses[-1].arrival_s - responses[0].arrival_s > NUM_TOKENS * STEP_S / 2
    assert joined(responses) == [write(server, "deltas", PROMPT)]


@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0, "seed": 3}, {"max_new_tokens": 1}], ids=str)
@pytest.mark.parametrize("prompt", [PROMPT, "", "🙂 你好", " the sea "])
def test_deltas_join_to_the_whole_output(server: TritonServer, prompt: str, parameters: dict[str, Any]) -> None:
    whole = write(server, "deltas", prompt, **parameters)
    assert streamed(server, "deltas", prompt, **parameters) == whole
    with GrpcStream(server) as stream:
        stream.ask("deltas", prompt, **parameters)
        assert joined(stream.take_all()) == [whole]


@pytest.mark.full
def test_deltas_of_a_folder_of_tensors_join_to_the_whole_output(server: TritonServer, standard: StandardServer) -> None:
    standard.serve("typed_stream")
    for asked in ({}, {"temperature": 1.0, "seed": 3}, {"max_new_tokens": 1}):
        whole = write(server, "deltas", "🙂 你好", **asked)
        assert streamed(server, "typed_stream", "🙂 你好", **({"max_new_tokens": NUM_TOKENS} | asked)) == whole


def test_prompt_comes_first_if_it_is_included(server: TritonServer) -> None:
    prompt = "你好, " + PROMPT
    found = generate_stream(server, "deltas", prompt, stream=True, exclude_input_in_output=False)
    assert found.data[0]["text_output"].startswith(prompt)
    assert found.text() == write(server, "deltas", prompt, exclude_input_in_output=False)
    assert streamed(server, "deltas", prompt) == found.text().removeprefix(prompt)


def test_several_prompts_and_sequences_stream_together(server: TritonServer) -> None:
    prompts, drawn = [PROMPT, OTHER_PROMPT, "x"], {"temperature": 1.0, "seed": 5, "num_return_sequences": 2}
    reply = generate(server, "deltas", prompts, exclude_input_in_output=True, **drawn)
    with GrpcStream(server) as stream:
        stream.ask("deltas", *prompts, **drawn)
        responses = stream.take_all()
    assert all(len(response.texts) == 6 for response in responses)
    assert joined(responses) == reply.json()["text_output"]
    found = generate_stream(server, "deltas", prompts, stream=True, **drawn)
    texts = ["".join(pieces) for pieces in zip(*[data["text_output"] for data in found.data], strict=True)]
    assert texts == joined(responses)


# --- one response ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"stream": False}], ids=str)
def test_without_a_word_the_answer_is_one(server: TritonServer, fields: dict[str, object]) -> None:
    whole = PROMPT + write(server, "deltas", PROMPT)
    assert generate(server, "deltas", PROMPT, **fields).json()["text_output"] == whole
    found = generate_stream(server, "deltas", PROMPT, **fields)
    assert [data["text_output"] for data in found.data] == [whole]
    with GrpcStream(server) as stream:
        stream.ask("deltas", PROMPT, **({"stream": False} | fields))
        assert joined(stream.take_all()) == [whole]
        assert stream.is_silent()


@pytest.mark.full
def test_the_folder_may_stream_by_default(server: TritonServer, standard: StandardServer) -> None:
    standard.serve("always")
    whole = write(server, "deltas", PROMPT)
    found = generate_stream(server, "always", PROMPT)
    assert len(found.events) > 1
    assert found.text() == whole
    assert generate(server, "always", PROMPT, stream=False).json()["text_output"] == PROMPT + whole
    assert [data["text_output"] for data in generate_stream(server, "always", PROMPT, stream=False).data] == [
        PROMPT + whole
    ]


def test_a_folder_that_is_not_decoupled_answers_with_one_event(server: TritonServer) -> None:
    whole = write(server, "deltas", PROMPT)
    for fields in ({}, {"stream": True}):
        found = generate_stream(server, "plain", PROMPT, max_new_tokens=NUM_TOKENS, **fields)
        assert [data["text_output"] for data in found.data] == [whole]
    assert infer(server, "plain", [PROMPT], parameters={"stream": True}).status == 200
    with GrpcStream(server) as stream:
        stream.ask("plain", PROMPT, max_new_tokens=NUM_TOKENS)
        assert joined(stream.take_all()) == [whole]


# --- the last response -----------------------------------------------------------------------------------------------

RETURNS = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_cumulative_logprob": True,
    "return_stop_string": True,
}
TOKENS = ("logprobs", "token_ids")


def test_extra_outputs_come_with_the_last_response_and_tokens_with_their_text(server: TritonServer) -> None:
    asked = {**RETURNS, **{f"return_{name}": True for name in TOKENS}}
    whole = generate(server, "deltas", PROMPT, **asked).json()
    found = generate_stream(server, "deltas", PROMPT, stream=True, **asked)
    told = [name.removeprefix("return_") for name in RETURNS]
    assert found.data[0]["num_input_tokens"] == whole["num_input_tokens"]
    for data in found.data[1:-1]:
        assert not any(name in data for name in told)
    for name in TOKENS:
        assert [each for data in found.data for each in json.loads(data[name])] == json.loads(whole[name])
        assert all(json.loads(data[name]) for data in found.data[:-1])
    assert {name: found.data[-1][name] for name in told} == {name: whole[name] for name in told}
    assert whole["finish_reason"] == "length"
    assert whole["num_output_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("wants_empty_final", [True, False])
def test_exactly_the_last_response_is_final(server: TritonServer, wants_empty_final: bool) -> None:
    wholes = [write(server, "deltas", PROMPT, max_new_tokens=count) for count in range(1, 21)]
    with GrpcStream(server, wants_empty_final) as stream:
        for count, whole in enumerate(wholes, start=1):
            stream.ask("deltas", PROMPT, request_id=str(count), max_new_tokens=count)
            responses = stream.take_all()
            assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
            assert {response.request_id for response in responses} == {str(count)}
            assert joined([response for response in responses if response.texts]) == [whole]
        assert stream.is_silent()


def test_requests_on_one_stream_are_interleaved_and_complete(server: TritonServer) -> None:
    prompts = [f"Story {number}:" for number in range(6)]
    wholes = [write(server, "deltas", prompt, max_new_tokens=8) for prompt in prompts]
    with GrpcStream(server, wants_empty_final=True) as stream:
        for number, prompt in enumerate(prompts):
            stream.ask("two_rows", prompt, request_id=str(number), max_new_tokens=8)
        responses: list[Response] = []
        while sum(response.is_final for response in responses) < len(prompts):
            responses.append(stream.take())
    by_id: dict[str, list[Response]] = defaultdict(list)
    for response in responses:
        by_id[response.request_id].append(response)
    assert [joined(by_id[str(number)]) for number in range(6)] == [[whole] for whole in wholes]
    changes = sum(first.request_id != second.request_id for first, second in itertools.pairwise(responses))
    assert changes > len(prompts), "two at a time, so their pieces alternate"


# --- errors ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "an impossible value": ({"max_new_tokens": 0}, "invalid_parameter: max_new_tokens must be an integer >= 1"),
    "texts that are thrown away": (
        {"best_of": 3, "temperature": 1.0},
        "invalid_parameter: best_of cannot be streamed: leave it out, or say stream false",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_comes_before_the_first_delta(server: TritonServer, case: str) -> None:
    fields, sentence = REFUSED[case]
    found = generate_stream(server, "deltas", PROMPT, **({"stream": True} | fields))
    assert found.status == 400
    [data] = found.data
    assert data["error"].startswith(sentence)
    with GrpcStream(server, wants_empty_final=True) as stream:
        stream.ask("deltas", PROMPT, **fields)
        with pytest.raises(InferenceServerException) as caught:
            stream.take()
        assert sentence in str(caught.value)
        stream.ask("deltas", PROMPT)  # the stream stays open
        assert joined(stream.take_all()) == [write(server, "deltas", PROMPT)]


@pytest.mark.full
def test_a_failure_in_the_middle_is_the_last_event(server: TritonServer, standard: StandardServer) -> None:
    standard.serve("failing", "bytes")
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(streamed, server, "bytes", "x")
        found = generate_stream(server, "failing", "x", stream=True)
        assert beside.result() == write(server, "bytes", "x")
    assert found.status == 200
    pieces, last = found.data[:-1], found.data[-1]
    assert len(pieces) > 1
    assert "".join(data["text_output"] for data in pieces) == write(server, "bytes", "x")[:13]
    assert last["error"].startswith("hook_failed: ")
    assert "in the middle" not in last["error"]


@pytest.mark.full
def test_failing_request_does_not_end_its_grpc_stream(server: TritonServer, standard: StandardServer) -> None:
    standard.serve("failing", "bytes")
    with GrpcStream(server, wants_empty_final=True) as stream:
        stream.ask("failing", "x", request_id="bad")
        texts = []
        with pytest.raises(InferenceServerException, match="hook_failed: "):
            texts.extend(each.texts[0] for each in iter(stream.take, None))
        assert "".join(texts) == write(server, "bytes", "x")[:13]
        stream.ask("bytes", "x")
        assert joined(stream.take_all()) == [write(server, "bytes", "x")]


# --- clients that go, or are slow ------------------------------------------------------------------------------------


def wait_for_a_row(server: TritonServer) -> float:
    """Seconds until the slow model has room for another text."""
    started = time.monotonic()
    assert generate(server, "two_rows", PROMPT, max_new_tokens=2).status == 200
    return time.monotonic() - started


def test_a_client_of_grpc_that_goes_frees_its_row(server: TritonServer) -> None:
    with GrpcStream(server) as stream:
        for _ in range(2):
            stream.ask("two_rows", PROMPT, max_new_tokens=LONG_TOKENS)
        stream.take()
    assert wait_for_a_row(server) < LONG_TOKENS * STEP_S / 2


@pytest.mark.full
def test_clients_that_do_not_read_delay_no_other_client(server: TritonServer) -> None:
    """Megabytes stay unread: more than flow control and the buffers of a connection hold."""
    prompts = ["x" * 240] * 128
    whole = "x" * 240 + write(server, "deltas", prompts[0], max_new_tokens=2)
    message = service_pb2.ModelInferRequest(
        model_name="deltas", raw_input_contents=[pack(*[prompt.encode() for prompt in prompts])]
    )
    message.inputs.add(name="text_input", datatype="BYTES", shape=[len(prompts)])
    message.parameters["stream"].bool_param = True
    message.parameters["exclude_input_in_output"].bool_param = False
    message.parameters["max_new_tokens"].int64_param = 2
    num_requests = 30
    is_done = threading.Event()

    def requests() -> Iterator[service_pb2.ModelInferRequest]:
        for number in range(num_requests):
            message.id = str(number)
            yield message
        is_done.wait(60)

    with grpc.insecure_channel(server.grpc_url) as channel:
        unread = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
        with open_stream(server, "deltas", prompts, stream=True, exclude_input_in_output=False):
            expected = write(server, "deltas", OTHER_PROMPT)
            for _ in range(5):
                assert streamed(server, "deltas", OTHER_PROMPT) == expected
        texts: dict[str, list[str]] = defaultdict(lambda: [""] * len(prompts))
        num_ended = 0
        while num_ended < num_requests:
            response = next(unread).infer_response
            num_ended += response.parameters["triton_final_response"].bool_param
            pieces = deserialize_bytes_tensor(response.raw_output_contents[0])
            texts[response.id] = [text + piece.decode() for text, piece in zip(texts[response.id], pieces, strict=True)]
        is_done.set()
    assert len(texts) == num_requests
    assert all(each == [whole] * len(prompts) for each in texts.values())


# --- what else is on -------------------------------------------------------------------------------------------------


def test_concurrent_streams_are_independent(server: TritonServer) -> None:
    prompts = [f"Story {number}:" for number in range(24)]
    wholes = [write(server, "deltas", prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: streamed(server, "deltas", prompt), prompts)) == wholes
