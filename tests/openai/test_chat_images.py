# SPDX-License-Identifier: Apache-2.0
"""Images in the gateway's conversations: what a model's process gets of them, and what one that takes none answers."""

import base64
import itertools
import json
import re
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import numpy as np
import openai
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.errors import ERROR_FORM_VERSION, RequestError
from hf_triton.protocol.chat_request import Chat, parse_chat
from hf_triton.protocol.declared_ports import missing_ports
from hf_triton.protocol.image_files import ImageParts
from hf_triton.protocol.model_info import MODEL_INFO, ModelInfo
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.requests import parse_request
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http import hints
from hf_triton_gateway.http.bodies import MAX_JSON_BYTES
from tests.support.commands import in_process
from tests.support.gateway import GatewayThread
from tests.support.paths import ROOT

PNG = b"\x89PNG\r\n\x1a\n"
CAT, DOG, JPEG = PNG + b"cat", PNG + b"dog", b"\xff\xd8\xffdog"
MODEL = "qwen3-vl-2b-instruct"
SEEN = {"type": "image"}


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def uri(file: bytes) -> str:
    return f"data:image/png;base64,{encoded(file)}"


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def image_url(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(file), "detail": "low"}}


def input_image(file: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": uri(file), "detail": "auto"}


def block(file: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(file)}, **fields}


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A Triton of a model that takes images: it reads each chat as a model's process does, and says how many it has."""

    def __init__(self) -> None:
        self.chats: list[Chat] = []

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name=MODEL, state="READY")
        return answer

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = service_pb2.ModelConfigResponse()
        answer.config.backend = "python"
        answer.config.model_transaction_policy.decoupled = True
        for name in ("text_input", "messages"):
            answer.config.input.add(name=name, optional=True)
        for name in ("text_output", "message", "finish_reason", "num_input_tokens", "num_output_tokens", "output"):
            answer.config.output.add(name=name)
        return answer

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for request in requests:
            answer = service_pb2.ModelStreamInferResponse()
            try:
                outputs = self._answer(request)
            except RequestError as error:
                answer.error_message = f"{error.code}: {error.to_json()}"
                outputs = {}
            for name, value in outputs.items():
                content = struct.pack("<I", value) if isinstance(value, int) else value.encode()
                head = b"" if isinstance(value, int) else struct.pack("<I", len(content))
                datatype = "UINT32" if isinstance(value, int) else "BYTES"
                answer.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
                answer.infer_response.raw_output_contents.append(head + content)
            yield answer

    def _answer(self, request: Any) -> dict[str, Any]:
        if request.parameters[MODEL_INFO].bool_param:
            told = {"task": "text-generation", "model": "acme/eyes", "context_length": 64, "engine": "continuous"}
            sizes = {"memory_bytes": 1, "max_prompts": 8, "max_waiting_prompts": 8, "error_form": ERROR_FORM_VERSION}
            return {"output": ModelInfo(dtype="float32", device="cpu", images="continuous", **told, **sizes).to_json()}
        [messages] = request.raw_input_contents
        chat = parse_chat(messages[4:].decode(), {}, 2000, ImageParts(8, 8_000_000, ()))
        self.chats.append(chat)
        message = json.dumps({"role": "assistant", "content": f"{len(chat.images)} images"})
        counts = {"num_input_tokens": 7, "num_output_tokens": 2}
        return {"text_output": "", "message": message, "finish_reason": "stop", **counts}


@pytest.fixture(scope="module")
def seeing() -> Iterator[tuple[Triton, GatewayThread]]:
    servicer, server = Triton(), grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with GatewayThread(GatewayConfig(triton=f"127.0.0.1:{port}", port=0)) as gateway:
        yield servicer, gateway
    server.stop(None)


@pytest.fixture
def eyes(seeing: tuple[Triton, GatewayThread]) -> tuple[list[Chat], str]:
    """The chats that the model gets from now on, and the gateway's address."""
    seeing[0].chats.clear()
    return seeing[0].chats, seeing[1].url


@pytest.fixture
def openai_client(eyes: tuple[list[Chat], str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{eyes[1]}/v1", api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


@pytest.fixture
def anthropic_client(eyes: tuple[list[Chat], str]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=eyes[1], api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


# --- a model that takes images ---------------------------------------------------------------------------------------

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_chat_completions(eyes: tuple[list[Chat], str], openai_client: Any) -> None:
    messages = [
        {"role": "user", "content": [image_url(CAT), text("and"), image_url(DOG)]},
        {"role": "assistant", "content": "A cat and a dog.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [text("Seen:"), image_url(CAT)]},
        {"role": "user", "content": [text("So?")]},
    ]
    made = openai_client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)
    assert made.parse().choices[0].message.content == "3 images"
    assert hints.HEADER not in made.headers
    with openai_client.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream:
        assert "".join(piece.choices[0].delta.content or "" for piece in stream) == "3 images"
    for chat in eyes[0]:
        assert chat.images == (CAT, DOG, CAT)
        contents = [message["content"] for message in chat.messages]
        assert contents == [[SEEN, text("and"), SEEN], "A cat and a dog.", [text("Seen:"), SEEN], "So?"]
    assert len(eyes[0]) == 2
    assert openai_client.models.retrieve(MODEL).images == "continuous"


def test_responses(eyes: tuple[list[Chat], str], openai_client: Any) -> None:
    chats, asked = eyes[0], text("What?", "input_text")
    first = openai_client.responses.create(model=MODEL, input=[{"role": "user", "content": [input_image(CAT), asked]}])
    assert first.output_text == "1 images"
    output = [input_image(DOG), text("a dog", "input_text")]
    items = [
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": output},
    ]
    second = openai_client.responses.create(model=MODEL, input=items, previous_response_id=first.id)
    third = openai_client.responses.create(model=MODEL, input="And?", previous_response_id=second.id)
    assert [response.output_text for response in (second, third)] == ["2 images", "2 images"]
    assert [chat.images for chat in chats] == [(CAT,), (CAT, DOG), (CAT, DOG)]
    contents = [message["content"] for message in chats[-1].messages]
    assert contents[0] == [SEEN, text("What?")]
    assert contents[2:] == [[SEEN, text("a dog")], "2 images", "And?"]
    [kept] = openai_client.responses.input_items.list(first.id).data
    assert kept.content[0].image_url == uri(CAT)


def test_messages(eyes: tuple[list[Chat], str], anthropic_client: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("Seen:"), block(DOG)]}
    messages = [
        {"role": "user", "content": [block(CAT, cache_control={"type": "ephemeral"}), text("What?")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [result, block(CAT)]},
    ]
    made = anthropic_client.messages.create(model=MODEL, max_tokens=5, messages=messages)
    assert made.content[0].text == "3 images"
    with anthropic_client.messages.stream(model=MODEL, max_tokens=5, messages=messages) as stream:
        assert stream.get_final_text() == "3 images"
    assert anthropic_client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == 7
    for chat in eyes[0]:
        assert chat.images == (CAT, DOG, CAT)
        contents = [message["content"] for message in chat.messages]
        assert contents == [[SEEN, text("What?")], "", [text("Seen:"), SEEN], [SEEN]]
    assert len(eyes[0]) == 3


def test_a_batch_file(eyes: tuple[list[Chat], str], tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": [image_url(CAT)]}]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    done = in_process("run-batch", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--url", f"{eyes[1]}/v1")
    assert done.exit_code == 0, done.output
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == "1 images"
    assert eyes[0][0].images == (CAT,)


def test_a_body_with_images_may_be_larger(eyes: tuple[list[Chat], str]) -> None:
    files = [PNG + bytes(3 << 20), PNG + bytes(2 << 20)]
    body = {"model": MODEL, "messages": [{"role": "user", "content": [*map(image_url, files)]}]}
    answer = httpx.post(f"{eyes[1]}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert eyes[0][0].images == tuple(files)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * MAX_JSON_BYTES}]}
    answer = httpx.post(f"{eyes[1]}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


ADDRESS = "https://example.org/cat.png"
FETCHED = "is an address, and nothing is fetched"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a chat's address": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [text("a"), {"type": "image_url", "image_url": ADDRESS}]}]},
        f"messages[0].content[1] {FETCHED}",
    ),
    "images beside a chat": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "image": "iVBO"},
        "there is no field 'image', did you mean 'messages'?",
    ),
    "a response's damaged image": (
        "responses",
        {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [input_image(b"cat")]}]},
        "input[1].content[0] is not PNG, JPEG, WebP or GIF",
    ),
    "a damaged image of a tool": (
        "responses",
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [input_image(b"cat")]}]},
        "input[0].output[0] is not PNG",
    ),
    "a message's file": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        "messages[0].content[0] must be like",
    ),
    "a message's image without one": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0].source is required",
    ),
    "a message's damaged image": (
        "messages",
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [block(b"cat")]}]},
        "messages[1].content[0] is not PNG",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_image_that_cannot_be_read(eyes: tuple[list[Chat], str], case: str) -> None:
    path, fields, sentence = REFUSED[case]
    limit = {"max_tokens": 5} if path == "messages" else {}
    answer = httpx.post(f"{eyes[1]}/v1/{path}", json={"model": MODEL, **limit, **fields}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(sentence)
    assert not eyes[0]


def test_what_a_tool_answered_is_never_refused_for_an_address(eyes: tuple[list[Chat], str]) -> None:
    output = [{"type": "input_image", "image_url": ADDRESS}, {"type": "input_file", "file_id": "f"}]
    item = {"type": "function_call_output", "call_id": "a", "output": output}
    answer = httpx.post(f"{eyes[1]}/v1/responses", json={"model": MODEL, "input": [item]}, timeout=60)
    assert answer.status_code == 200, answer.text
    notes = "[input_image: not shown, as nothing is fetched]\n[input_file: not shown, as this server does not read it]"
    assert eyes[0][0].messages[0]["content"] == notes


# --- docs/images.md --------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
LINES = re.findall(r"^echo .*", PAGE, re.MULTILINE)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cat.png").write_bytes(CAT)
    Path("dog.jpg").write_bytes(JPEG)


def test_the_examples_in_python_send_what_they_say(
    eyes: tuple[list[Chat], str], files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for block in blocks:
        names: dict[str, Any] = {}
        exec(compile(block.replace("http://localhost:9000", eyes[1]), "docs/images.md", "exec"), names)
        names["client"].close()
    assert [chat.images for chat in eyes[0]] == [(CAT, JPEG), (CAT,), (CAT,), (CAT,)]
    assert capsys.readouterr().out == "2 images\n1 images 1 images\n1 images\n"


def test_the_examples_in_the_shell_send_what_they_say(eyes: tuple[list[Chat], str], files: None) -> None:
    limits = Limits(1, 1000, 4, 1000)
    config: dict[str, Any] = {"input": [], "output": [], "max_batch_size": 0}
    declared = {port["name"] for port in missing_ports(config, parameters_as_inputs=False)[0]}
    for line in LINES:
        if "localhost:9000" in line:
            done = subprocess.run(
                ["bash", "-c", line.replace("localhost:9000", eyes[1])], capture_output=True, text=True
            )
            assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "1 images"
            continue
        assert "-H 'Content-Type: application/json'" in line
        made = subprocess.run(["bash", "-c", line.partition(" | ")[0]], capture_output=True, check=True).stdout
        given = json.loads(made)
        inputs = given.get("inputs") or [{"name": name, "data": given[name]} for name in ("text_input", "image")]
        assert {port["name"] for port in inputs} <= declared
        arrays = {port["name"]: np.array(port["data"], np.object_).reshape(-1) for port in inputs}
        arrays = {name: np.array([each.encode() for each in array], np.object_) for name, array in arrays.items()}
        asked = parse_request(arrays, given.get("parameters", {}), limits)
        [prompt] = asked.prompts
        assert (prompt.images if isinstance(prompt, Chat) else asked.images) == (CAT,)
    assert len(LINES) == 3


# --- a model that takes none -----------------------------------------------------------------------------------------

HUGE = PNG + bytes(itertools.islice(itertools.cycle(range(251)), 3_000_000))
ASKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [image_url(HUGE)]}]},
        "messages[0].content[0]",
    ),
    "responses": ("responses", {"input": [{"role": "user", "content": [input_image(HUGE)]}]}, "input[0].content[0]"),
    "messages": (
        "messages",
        {"messages": [{"role": "user", "content": [text("a"), block(HUGE)]}], "max_tokens": 2},
        "messages[0].content[1]",
    ),
    "count_tokens": (
        "messages/count_tokens",
        {"messages": [{"role": "user", "content": [block(HUGE)]}]},
        "messages[0].content[0]",
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_model_that_reads_text_alone_says_so(gateway: GatewayThread, case: str) -> None:
    path, fields, place = ASKED[case]
    answer = httpx.post(f"{gateway.url}/v1/{path}", json={"model": "tiny", **fields}, timeout=60)
    assert answer.status_code == 400, answer.text
    sentence = f"{place} is an image, and this model reads text alone: leave it out"
    assert answer.json()["error"]["message"] == sentence
