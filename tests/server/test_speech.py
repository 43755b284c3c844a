# SPDX-License-Identifier: Apache-2.0
"""Speech recognition behind a real server: Triton's JSON and binary tensors, and the gateway by the openai client."""

import base64
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.client import get, post
from tests.support.gateway import GatewayThread
from tests.support.paths import ROOT
from tests.support.speech import Served, encode, save_whisper, sound

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:std"),
]  # of one token, in transformers' timestamps of words
SHORT, LONG = sound(1.3, 1), sound(7.9, 5)
WAV = encode(SHORT)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same checkpoint without a server."""
    served = Served(save_whisper(tmp_path_factory.mktemp("whisper")))
    yield served
    served.service.close()


@pytest.fixture(scope="module")
def server(
    served: Served, make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    checkpoint = served.checkpoint.folder
    make_folder(repository, "whisper", huggingface_model=checkpoint, max_audio_seconds=60)
    make_folder(repository, "batching", huggingface_model=checkpoint, config="max_batch_size: 4")
    make_folder(repository, "writer", huggingface_model=build_tiny_checkpoint(repository.with_name("writer")))
    with TritonServer(repository) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: TritonServer) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton=server.grpc_url, port=0, max_body_bytes=4 << 20)) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def test_base64_by_json(server: TritonServer, served: Served) -> None:
    body = {"audio": base64.b64encode(WAV).decode(), "language": "de", "return_timestamps": True, "temperature": 0}
    answer = post(server, "/v2/models/whisper/generate", body)
    assert answer.status == 200, answer.body
    [expected] = served.json(WAV, language="de", return_timestamps=True)
    assert answer.json()["text"] == expected["text"]
    assert json.loads(answer.json()["output"]) == expected


@pytest.mark.parametrize(("model", "shape"), [("whisper", [2]), ("batching", [2, 1])])
def test_files_as_tensors(server: TritonServer, served: Served, model: str, shape: list[int]) -> None:
    files = [WAV, encode(LONG, format="FLAC")]
    tensor = tritonclient.grpc.InferInput("audio", shape, "BYTES")
    tensor.set_data_from_numpy(np.array(files, dtype=np.object_).reshape(shape))
    client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
    try:
        answer = client.infer(model, [tensor], parameters={"task": "translate"})
        assert answer.as_numpy("text").shape == tuple(shape)
        texts = [text.decode() for text in answer.as_numpy("text").ravel()]
    finally:
        client.close()
    assert texts == [each["text"] for each in served.json(*files, task="translate")]


def test_wrong_requests_to_triton(server: TritonServer) -> None:
    for body, sentence in (
        ({}, "invalid_input: audio is missing: automatic-speech-recognition needs audio, the audio"),
        ({"audio": "nonsense"}, "invalid_input: audio is not WAV, FLAC, OGG, MP3 or AIFF, nor base64 of it"),
        ({"text_input": "a"}, "unknown_parameter: text_input"),
    ):
        answer = post(server, "/v2/models/whisper/generate", body)
        assert answer.status == 400
        assert sentence in answer.error


def test_documented_requests(server: TritonServer, gateway: GatewayThread, tmp_path: Path) -> None:
    (tmp_path / "speech.wav").write_bytes(WAV)
    lines = [
        line
        for name in ("speech.md", "openai.md")
        for line in (ROOT / "docs" / name).read_text().splitlines()
        if "speech.wav" in line
    ]
    assert len(lines) == 4
    for line in lines:
        line = line.replace("localhost:9000", gateway.url).replace("localhost:8000", server.http_url)
        line = line.replace("whisper-tiny", "whisper").replace("curl ", "curl --silent --fail ")
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout


def test_transcriptions(client: openai.OpenAI, served: Served, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(WAV)
    [expected] = served.json(WAV, language="de", prompt="boats", temperature=0.0)
    with (tmp_path / "a.wav").open("rb") as file:
        answer = client.audio.transcriptions.create(
            model="whisper", file=file, language="de", prompt="boats", temperature=0.0
        )
    assert answer.text == expected["text"]
    assert answer.usage is not None
    assert answer.usage.seconds == 2  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:deprecated")  # the client's own way to say so
def test_long_audio_and_translations(client: openai.OpenAI, served: Served) -> None:
    data = encode(LONG, format="OGG")
    file = ("a.ogg", data)
    assert client.audio.transcriptions.create(model="whisper", file=file).text == served.json(data)[0]["text"]
    [expected] = served.json(data, task="translate", return_timestamps=True)
    answer: Any = client.audio.translations.create(model="whisper", file=file, response_format="verbose_json")
    assert (answer.text, answer.language, answer.task) == (expected["text"], "english", "translate")
    assert [each.text for each in answer.segments] == [each["text"] for each in expected["chunks"]]


def test_verbose_json(client: openai.OpenAI, served: Served) -> None:
    [expected] = served.json(WAV, return_timestamps="word")
    answer: Any = client.audio.transcriptions.create(
        model="whisper",
        file=("a.wav", WAV),
        response_format="verbose_json",
        timestamp_granularities=["segment", "word"],
    )
    assert (answer.text, answer.language, answer.duration) == (expected["text"], "en", pytest.approx(1.3))
    assert [[each.start, each.end, each.text] for each in answer.segments] == [
        [*each["timestamp"], each["text"]] for each in expected["chunks"]
    ]
    assert [[each.start, each.end, each.word] for each in answer.words] == [
        [*each["timestamp"], each["text"]] for each in expected["words"]
    ]
    words: Any = client.audio.transcriptions.create(
        model="whisper", file=("a.wav", WAV), response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert words.segments is None
    assert words.words == answer.words


def test_text_and_subtitles(client: openai.OpenAI, served: Served) -> None:
    [expected] = served.json(WAV, return_timestamps=True)

    def ask(form: Any) -> str:
        return str(client.audio.transcriptions.create(model="whisper", file=("a.wav", WAV), response_format=form))

    assert ask("text").strip() == served.json(WAV)[0]["text"]
    start_s, end_s = expected["chunks"][0]["timestamp"]
    srt, vtt = ask("srt"), ask("vtt")
    assert srt.startswith(f"1\n00:00:0{start_s:.3f} --> 00:00:0{end_s:.3f}\n".replace(".", ","))
    assert vtt.startswith(f"WEBVTT\n\n00:00:0{start_s:.3f} --> 00:00:0{end_s:.3f}\n")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(expected["chunks"])


def test_a_stream_is_the_whole_text(client: openai.OpenAI, served: Served) -> None:
    events = list(client.audio.transcriptions.create(model="whisper", file=("a.wav", WAV), stream=True))
    text = served.json(WAV)[0]["text"]
    assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[-1].text == text  # type: ignore[union-attr]


def test_wrong_bodies(gateway: GatewayThread) -> None:
    for path in ("transcriptions", "translations"):
        for content_type, body, status in (
            ("application/json", b"{}", 415),
            ("multipart/form-data", b"", 400),
            ("multipart/form-data; boundary=a", b"nonsense", 400),
            ("multipart/form-data; boundary=a", b"--a\r\nContent-Disposition: form-data; name=", 400),
        ):
            answer = httpx.post(
                f"{gateway.url}/v1/audio/{path}", content=body, headers={"content-type": content_type}, timeout=60
            )
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")


def test_a_chat_to_a_model_of_speech_names_its_endpoint(gateway: GatewayThread) -> None:
    body = {"model": "whisper", "messages": [{"role": "user", "content": "a"}]}
    error = httpx.post(f"{gateway.url}/v1/chat/completions", json=body).json()["error"]
    assert "POST /v1/audio/transcriptions" in error["message"]


def test_models_and_metrics(gateway: GatewayThread, server: TritonServer) -> None:
    [model] = [each for each in httpx.get(f"{gateway.url}/v1/models").json()["data"] if each["id"] == "whisper"]
    assert (model["task"], model["max_model_len"]) == ("automatic-speech-recognition", 64)
    with httpx.Client() as plain:
        lines = plain.get(server.metrics_url).text.splitlines()
    counted = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if 'model="whisper"' in line}
    assert counted['hf_triton_requests_total{model="whisper",outcome="ok",version="1"}'] > 0
    assert get(server, "/v2/health/ready").status == 200
