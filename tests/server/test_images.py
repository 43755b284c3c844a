# SPDX-License-Identifier: Apache-2.0
"""Models that read images behind a real Triton: tensors of bytes, JSON, and the gateway."""

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http

from hf_triton.tasks.registry import task_class
from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.client import post
from tests.support.gateway import GatewayThread
from tests.support.images import IMAGES, LABELS, bytes_tensor, encoded, made_image, save_image_checkpoint
from tests.support.paths import ROOT
from tests.support.tasks import Served

pytestmark = pytest.mark.full

TOLERANCE = 1e-5
FILES = [encoded(image, kind) for image, kind in zip(IMAGES, ("PNG", "JPEG", "WEBP"), strict=True)]
URIS = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in FILES]
PARTS = [{"type": "image_url", "image_url": {"url": uri}} for uri in URIS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "vit": save_image_checkpoint(root / "vit", "vit"),
        "clip": save_image_checkpoint(root / "clip", "clip", has_texts=True),
    }


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name, checkpoint in checkpoints.items():
        make_folder(repository, name, huggingface_model=checkpoint, max_image_pixels=100_000)
    with TritonServer(repository) as started:
        yield started


@pytest.fixture(scope="module")
def gateway(server: TritonServer) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as started:
        yield started


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, Any]:
    """What the tasks give without a server."""
    classifier = task_class("image-classification")
    embedder = task_class("embeddings", "image")
    assert classifier
    assert embedder
    images = {"image": bytes_tensor(FILES)}
    vectors = Served(checkpoints["clip"], embedder)
    return {
        "vit": Served(checkpoints["vit"], classifier).ask(images, ["label", "score", "all_scores"]),
        "images": vectors.ask(images)["embedding"],
        "text": vectors.ask({"text": bytes_tensor(["a cat"])})["embedding"],
    }


@pytest.mark.parametrize("client", [tritonclient.http, tritonclient.grpc])
def test_raw_bytes_are_read(server: TritonServer, expected: dict[str, Any], client: Any) -> None:
    url = server.grpc_url if client is tritonclient.grpc else server.http_url.removeprefix("http://")
    tensor = client.InferInput("image", [len(FILES)], "BYTES")
    tensor.set_data_from_numpy(bytes_tensor(FILES))
    triton = client.InferenceServerClient(url)
    try:
        answer = triton.infer("vit", [tensor])
        assert np.array_equal(answer.as_numpy("label"), expected["vit"]["label"])
        assert np.allclose(answer.as_numpy("score"), expected["vit"]["score"], atol=TOLERANCE)
        vectors = triton.infer("clip", [tensor]).as_numpy("embedding")
        assert np.allclose(vectors, expected["images"], atol=TOLERANCE * 10)
    finally:
        triton.close()


def test_json_carries_base64(server: TritonServer, expected: dict[str, Any]) -> None:
    answer = post(server, "/v2/models/vit/generate", {"image": URIS[0], "top_k": 2}).json()
    assert answer["label"][0] == expected["vit"]["label"][0, 0].decode()
    assert len(answer["score"]) == 2
    plain = [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [URIS[0].partition(",")[2]]}]
    answer = post(server, "/v2/models/clip/infer", {"inputs": plain}).json()
    assert answer["outputs"][0]["data"] == pytest.approx(expected["images"][0].tolist(), abs=TOLERANCE * 10)


def test_a_wrong_image_is_refused_and_harms_nobody(server: TritonServer) -> None:
    image = base64.b64encode(encoded(made_image(400, 400))).decode()
    answer = post(server, "/v2/models/vit/generate", {"image": image})
    assert answer.status == 400
    assert answer.error.startswith("invalid_input: image has 400 x 400 pixels, more than the 100000")
    assert post(server, "/v2/models/vit/generate", {"image": URIS[0]}).json()["label"]


def test_a_wrong_row_is_named(server: TritonServer) -> None:
    tensor = [{"name": "image", "datatype": "BYTES", "shape": [2], "data": [URIS[0], "a cat"]}]
    answer = httpx.post(f"{server.http_url}/v2/models/vit/infer", json={"inputs": tensor})
    assert (answer.status_code, answer.json()["error"][-7:]) == (400, "(row 1)")


def test_the_gateway_embeds_images_and_texts_in_one_list(gateway: GatewayThread, expected: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="-")
    items: Any = [PARTS[0], "a cat", PARTS[2], {"type": "text", "text": "a cat"}]
    answer = client.embeddings.create(model="clip", input=items, encoding_format="float")
    wanted = [expected["images"][0], expected["text"][0], expected["images"][2], expected["text"][0]]
    for each, vector in zip(answer.data, wanted, strict=True):
        assert np.allclose(each.embedding, vector, atol=TOLERANCE * 10)
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 4 + 5 + 4 + 5
    client.close()


@pytest.mark.parametrize("content", ["a cat", ["a cat"], [{"type": "text", "text": "a cat"}], [PARTS[0]]])
def test_messages_stand_for_one_input(gateway: GatewayThread, expected: dict[str, Any], content: Any) -> None:
    body = {"model": "clip", "messages": [{"role": "user", "content": content}]}
    [answer] = httpx.post(f"{gateway.url}/v1/embeddings", json=body).json()["data"]
    wanted = expected["images"][0] if content == [PARTS[0]] else expected["text"][0]
    assert np.allclose(answer["embedding"], wanted, atol=TOLERANCE * 10)


@pytest.mark.parametrize("images", [URIS, PARTS])
def test_the_gateway_classifies_images(gateway: GatewayThread, expected: dict[str, Any], images: list[Any]) -> None:
    body = {"model": "vit", "input": images, "top_k": 4}
    data = httpx.post(f"{gateway.url}/v1/classify", json=body).json()["data"]
    assert [each["label"].encode() for each in data] == expected["vit"]["label"].ravel().tolist()
    assert np.allclose([each["probs"] for each in data], expected["vit"]["all_scores"], atol=TOLERANCE)
    assert {each["label"] for each in data[0]["labels"]} == set(LABELS.values())


@pytest.mark.parametrize(
    ("path", "fields", "code", "sentence"),
    [
        (
            "embeddings",
            {"input": [{"type": "image_url"}]},
            "missing_required_parameter",
            "input[0].image_url is required",
        ),
        ("embeddings", {"input": [{"type": "text", "text": ""}]}, "invalid_parameter", None),
        ("embeddings", {}, "missing_required_parameter", "input is required"),
        ("embeddings", {"messages": []}, "invalid_parameter", None),
        (
            "embeddings",
            {"messages": [{"role": "user", "content": [PARTS[0], PARTS[1]]}]},
            "invalid_parameter",
            "messages stands in place of input, and is one message whose content is one text or one part",
        ),
        (
            "classify",
            {"model": "vit", "input": "a cat"},
            "wrong_task",
            "the model 'vit' is for image-classification, not for text-classification: POST /v1/classify with images",
        ),
        (
            "classify",
            {"model": "clip", "input": URIS[0]},
            "wrong_task",
            "the model 'clip' is for embeddings, not for image-classification: POST /v1/embeddings",
        ),
    ],
)
def test_wrong_parts_get_a_sentence(
    gateway: GatewayThread, path: str, fields: dict[str, Any], code: str, sentence: str | None
) -> None:
    answer = httpx.post(f"{gateway.url}/v1/{path}", json={"model": "clip", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    assert sentence in (None, error["message"])


def test_no_image_reaches_a_log(server: TritonServer, gateway: GatewayThread) -> None:
    httpx.post(
        f"{gateway.url}/v1/embeddings",
        json={"model": "clip", "input": [PARTS[0], {"type": "image_url", "image_url": URIS[0][:60]}]},
    )
    assert URIS[0][30:60] not in server.log_tail(10_000)


def documented(marker: str) -> dict[str, Any]:
    """The JSON of a request in docs/encoders.md."""
    text = (ROOT / "docs" / "encoders.md").read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if marker in line and "curl" in line]
    body: dict[str, Any] = json.loads(re.findall(r"-d '(\{.*\})'", line)[0])
    return body


@pytest.mark.parametrize(
    ("name", "marker", "output"), [("vit", "/v1/classify -H", "label"), ("clip", '"image_url"', "embedding")]
)
def test_documented_requests_are_answered(gateway: GatewayThread, name: str, marker: str, output: str) -> None:
    path = "classify" if name == "vit" else "embeddings"
    answer = httpx.post(f"{gateway.url}/v1/{path}", json={**documented(marker), "model": name})
    assert answer.json()["data"][0][output]
