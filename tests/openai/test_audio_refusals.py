# SPDX-License-Identifier: Apache-2.0
"""Refusals of forms with audio, and of inputs that are images, in the client's names."""

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hf_triton.protocol.request_options import PARAMETERS
from hf_triton.tasks.automatic_speech_recognition import SpeechOptions
from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.encoders.transcriptions import FILE, TranscriptionFields, TranslationFields
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread, has_field
from tests.support.images import IMAGES, encoded, save_image_checkpoint
from tests.support.speech import encode, save_whisper, sound

pytestmark = pytest.mark.full

MAX_SECONDS = 5
PATHS: dict[str, type[Any]] = {
    "/v1/audio/transcriptions": TranscriptionFields,
    "/v1/audio/translations": TranslationFields,
}
ENDPOINTS = pytest.mark.parametrize("path", PATHS)
WAV = encode(sound(1.3, 1))
VALUES = ("-7", "words", "[[]]", '{"type": "frobnicate"}', str(2**40), "", "x" * 70_000)
FILES: dict[str, bytes] = {
    "is empty: give a file of WAV, FLAC": b"",
    "is not WAV, FLAC, OGG, MP3 or AIFF, nor base64": b"words",
    "is MP4 or M4A, which is not read": b"\0\0\0\x20ftypM4A " + bytes(20),
    f"has 5.3 s, more than the {MAX_SECONDS} s": encode(sound(5.3)),
}
FORMS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"model": "whisper", "temperature": "-7"}, "temperature", "got -7"),
    ({"model": "whisper", "prompt": ["a", "b"]}, "prompt", "prompt is given 2 times"),
    ({"model": "whisper", "max_new_tokens": "9"}, "max_new_tokens", "there is no field 'max_new_tokens'"),
    ({"model": "whisper", "modalities": "audio"}, "modalities", "there is no field 'modalities'"),
    ({"model": "timeless", "response_format": "srt"}, "response_format", "response_format asks for timestamps"),
    ({"model": "nobody"}, "model", "the model 'nobody' does not exist"),
    ({"model": "writer"}, "model", "the model 'writer' is for text-generation"),
    ({"model": "whisper:tone"}, "model", "there is no adapter 'tone'"),
)
"""Forms of both endpoints, the field at fault, and words of the sentence."""
TIMES = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
OF_TRANSCRIPTIONS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"model": "english", "language": "de"}, "language", "language must be one of en"),
    ({"model": "english", **TIMES}, "timestamp_granularities", "timestamp_granularities asks for the times of words"),
    ({"model": "timeless", **TIMES}, "timestamp_granularities", "timestamp_granularities asks for timestamps"),
    ({"model": "whisper", "timestamp_granularities[]": "word"}, "timestamp_granularities", "is for response_format"),
    ({"model": "whisper", "stream": "true", "response_format": "vtt"}, "stream", "stream true sends the text alone"),
    ({"model": "whisper", "stream": "true", "language": "xx"}, "language", "language must be one of de, en, fr, zh"),
    ({"model": "whisper", "langauge": "de"}, "langauge", "did you mean 'language'?"),
)
URI = f"data:image/png;base64,{base64.b64encode(encoded(IMAGES[0], 'PNG')).decode()}"
IMAGE = {"type": "image_url", "image_url": URI}
BROKEN = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
ADDRESS = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
OF_IMAGES: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("embeddings", {"input": [BROKEN]}, "input", "input is not PNG, JPEG, WebP or GIF, nor base64 of it"),
    ("embeddings", {"input": ["a", IMAGE, BROKEN]}, "input", "nor base64 of it (row 2)"),
    ("embeddings", {"input": ["a", ADDRESS]}, "input[1].image_url", "input[1].image_url must be a data URI"),
    ("embeddings", {"input": ["a", {"type": "image"}]}, "input[1].type", "input[1].type must be `image_url`"),
    ("embeddings", {"input": [IMAGE], "dimensions": 9999}, "dimensions", "dimensions must be"),
    ("embeddings", {"messages": [{"content": [BROKEN]}]}, "messages[0].content", "messages[0].content is not PNG"),
    ("embeddings", {"messages": [{"content": ""}]}, "messages", "messages is empty"),
    ("classify", {"input": BROKEN["image_url"]}, "input", "input is not PNG, JPEG, WebP or GIF, nor base64 of it"),
    ("classify", {"input": [IMAGE, "words"]}, "input", "input holds texts and images"),
    ("classify", {"input": [{"type": "image_url", "image_url": {"url": 5}}]}, "input[0].image_url.url", "a string"),
    ("embeddings", {"input": [IMAGE], "prompt_name": "a"}, "prompt_name", "no input or parameter 'prompt_name'"),
)
"""Endpoints, bodies, the field at fault, and words of the sentence."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Iterator[GatewayThread]:
    """Whispers of several languages, of one, and without timestamps, models of images, and one that generates."""
    root = tmp_path_factory.mktemp("audio")
    repository = root / "repository"
    checkpoints = {
        "whisper": save_whisper(root / "whisper"),
        "english": save_whisper(root / "english", languages=(), without="alignment_heads"),
        "timeless": save_whisper(root / "timeless", without="no_timestamps_token_id"),
        "writer": build_tiny_checkpoint(root / "writer"),
        "classify": save_image_checkpoint(root / "classify", "vit"),
        "embeddings": save_image_checkpoint(root / "embeddings", "clip", has_texts=True),
    }
    for name, checkpoint in checkpoints.items():
        limit = {"max_audio_seconds": MAX_SECONDS} if name == "whisper" else {}
        make_folder(repository, name, huggingface_model=checkpoint, **limit)
    with (
        TritonServer(repository, ready_timeout_s=280) as server,
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0, max_body_bytes=4 << 20)) as running,
    ):
        yield running


def refused(gateway: GatewayThread, path: str, data: dict[str, Any], files: Any, *statuses: int) -> dict[str, Any]:
    answer = httpx.post(gateway.url + path, data=data, files=files, timeout=60)
    assert answer.status_code in (statuses or (400,)), (data, answer.text)
    error: dict[str, Any] = answer.json()["error"]
    assert "\\ufdd" not in answer.text
    return error


@ENDPOINTS
def test_no_refusal_names_a_field_that_the_form_lacks(gateway: GatewayThread, path: str) -> None:
    """Each field with values that are none, a field of another name, and one that is a file."""
    fields = {FILE, *PATHS[path].model_fields}
    unsent = {name for name in {*PARAMETERS, *SpeechOptions.model_fields} if "_" in name} - fields
    forms: list[tuple[dict[str, Any], Any]] = []
    for name in fields - {FILE}:
        forms += [({"model": "whisper", name: value}, [(FILE, ("a", WAV))]) for value in (*VALUES, ["a", "b"])]
        forms.append(({"model": "whisper"}, [(FILE, ("a", WAV)), (name, ("b", b"words"))]))
    forms += [({"model": "whisper"}, [(FILE, ("a", file))]) for file in FILES.values()]
    num_refused = 0
    for data, files in forms:
        answer = httpx.post(gateway.url + path, data=data, files=files, timeout=60)
        if answer.status_code < 400:
            continue
        num_refused += 1
        assert answer.status_code in (400, 404), (data, answer.text)
        error = answer.json()["error"]
        assert not set(re.findall(r"[a-z_]{2,}", error["message"])) & unsent, (data, error)
        assert error["param"] in fields, (data, error)
        assert error["param"] in error["message"], (data, error)
    assert num_refused > 20


@ENDPOINTS
@pytest.mark.parametrize("sentence", FILES)
def test_wrong_files(gateway: GatewayThread, path: str, sentence: str) -> None:
    error = refused(gateway, path, {"model": "whisper"}, {FILE: ("a.wav", FILES[sentence])})
    assert (error["message"].startswith(f"{FILE} {sentence}"), error["param"]) == (True, FILE), error


@pytest.mark.parametrize(
    ("path", "data", "param", "sentence"),
    [
        *((path, *form) for path in PATHS for form in FORMS),
        *(("/v1/audio/transcriptions", *form) for form in OF_TRANSCRIPTIONS),
        ("/v1/audio/translations", {"model": "english"}, "model", "does not translate: POST /v1/audio/transcriptions"),
        ("/v1/audio/translations", {"model": "whisper", "language": "de"}, "language", "no field 'language'"),
    ],
)
def test_wrong_forms(gateway: GatewayThread, path: str, data: dict[str, Any], param: str, sentence: str) -> None:
    error = refused(gateway, path, data, {FILE: ("a.wav", WAV)}, 400, 404)
    assert (sentence in error["message"], error["param"]) == (True, param), error


@ENDPOINTS
def test_a_file_that_is_missing_misnamed_or_one_too_many(gateway: GatewayThread, path: str) -> None:
    whisper, wav = {"model": "whisper"}, ("a.wav", WAV)
    for files, param, sentence in (
        ([(FILE, (None, "words"))], FILE, "file is required: send the audio as a file with a name"),
        ([("model", (None, "whisper"))], FILE, "file is required"),
        ([("files", wav)], "files", "there is no field 'files', did you mean 'file'?"),
        ([("audio", wav)], "audio", "file, "),
        ([(FILE, wav), (FILE, wav)], FILE, "file is given 2 times: give it once"),
        ([(FILE, wav), ("prompt", wav)], "prompt", "prompt is sent as a file: send it as a text"),
    ):
        error = refused(gateway, path, {} if "model" in dict(files) else whisper, files)
        assert (sentence in error["message"], error["param"]) == (True, param), error
    error = refused(gateway, path, whisper, {FILE: ("a.wav", bytes(5 << 20))}, 413)
    assert error["code"] == "request_too_large"


@ENDPOINTS
def test_hints_of_a_form_are_passed_over(gateway: GatewayThread, path: str) -> None:
    files: list[Any] = [(FILE, ("a.wav", WAV)), ("user", (None, "me")), ("user", (None, "you"))]
    answer = httpx.post(gateway.url + path, data={"model": "whisper"}, files=files, timeout=60)
    assert (answer.status_code, answer.headers["x-hf-triton-ignored"]) == (200, "user"), answer.text


@pytest.mark.parametrize(("name", "fields", "param", "sentence"), OF_IMAGES)
def test_wrong_images(gateway: GatewayThread, name: str, fields: dict[str, Any], param: str, sentence: str) -> None:
    answer = httpx.post(f"{gateway.url}/v1/{name}", json={"model": name, **fields}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, sentence in error["message"], error["param"]) == (400, True, param), error
    assert has_field(fields, error["param"]), error
