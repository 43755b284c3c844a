# SPDX-License-Identifier: Apache-2.0
"""Features of Triton around a model: shared memory, compression, warm-up, versions, ensembles, model control."""

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import generate, infer, post
from tests.support.reference import load_reference

pytestmark = pytest.mark.full

NUM_TOKENS = 6
TEXTS = ["Hello there", "Der Zug fährt 🙂"]
NUM_WARM_UPS = 3

WARM_UP = f"""
model_warmup [{{
  name: "first" batch_size: 1 count: {NUM_WARM_UPS}
  inputs {{ key: "text_input" value {{ data_type: TYPE_STRING dims: [ 1 ] input_data_file: "prompt" }} }}
}}]
"""
ENSEMBLE = """
platform: "ensemble"
input [ {{ name: "question" data_type: TYPE_STRING dims: [ -1 ] }} ]
output [
  {{ name: "answer" data_type: TYPE_STRING dims: [ -1 ] }},
  {{ name: "why" data_type: TYPE_STRING dims: [ -1 ] }}
]
model_transaction_policy {{ decoupled: {decoupled} }}
ensemble_scheduling {{ step [ {{
  model_name: "{model}" model_version: -1
  input_map {{ key: "text_input" value: "question" }}
  output_map {{ key: "text_output" value: "answer" }}
  output_map {{ key: "finish_reason" value: "why" }}
}} ] }}
"""
CALLER = """import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    \"\"\"Asks one model for an answer, and another for a stream of the same.\"\"\"

    def execute(self, requests):
        return [self.ask(pb_utils.get_input_tensor_by_name(request, "text_input")) for request in requests]

    def ask(self, question):
        def to(model):
            return pb_utils.InferenceRequest(
                model_name=model,
                inputs=[question],
                requested_output_names=["text_output", "finish_reason"],
                parameters={"sampling_parameters": json.dumps({"repetition_penalty": 1.5})},
            )

        def text(response, name):
            return pb_utils.get_output_tensor_by_name(response, name).as_numpy()[0].decode()

        one = to("plain").exec()
        if one.has_error():
            return pb_utils.InferenceResponse(error=one.error())
        parts = [part for part in to("stream").exec(decoupled=True) if part.output_tensors()]
        found = [text(one, "text_output"), text(one, "finish_reason"), "".join(text(p, "text_output") for p in parts)]
        return pb_utils.InferenceResponse([pb_utils.Tensor("found", np.array([json.dumps(found)], dtype=object))])
"""
CALLER_CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "found" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None)


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("repository")
    settings = {"huggingface_model": checkpoint, "exclude_input_in_output": True, "max_output_length": NUM_TOKENS}
    make_folder(root, "plain", **settings)
    make_folder(root, "stream", config="model_transaction_policy { decoupled: true }", **settings)
    warm = make_folder(root, "warm", config=WARM_UP, **settings)
    (warm / "warmup").mkdir()
    (warm / "warmup" / "prompt").write_bytes(serialize_byte_tensor(np.array([b"Hello"], dtype=object)).item())
    versions = make_folder(root, "versions", config="version_policy { all { } }", **settings)
    shutil.copytree(versions / "1", versions / "3")
    for name, model, decoupled in (("ensemble", "plain", "false"), ("ensemble_stream", "stream", "true")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(ENSEMBLE.format(model=model, decoupled=decoupled))
    (root / "caller" / "1").mkdir(parents=True)
    (root / "caller" / "config.pbtxt").write_text(CALLER_CONFIG)
    (root / "caller" / "1" / "model.py").write_text(CALLER)
    with TritonServer(root, ready_timeout_s=280) as running:
        for folder in root.iterdir():
            assert running.is_model_ready(folder.name), running.log_tail()
        yield running


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[str]:
    reference = load_reference(checkpoint)
    return [reference.text(text, NUM_TOKENS, repetition_penalty=1.5).removeprefix(text) for text in TEXTS]


PARAMETERS = {"repetition_penalty": 1.5}


def client_of(module: Any, server: TritonServer) -> Any:
    url = server.grpc_url if module is grpcclient else f"{server.host}:{server.http_port}"
    return module.InferenceServerClient(url)


def prompts(module: Any) -> Any:
    tensor = module.InferInput("text_input", [len(TEXTS)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=object))
    return tensor


@pytest.fixture
def region(server: TritonServer, request: pytest.FixtureRequest) -> Iterator[Callable[[Any, str, int], Any]]:
    """Make a region of system shared memory, and tell the server about it: `region(client, name, num_bytes)`."""
    made = []

    def make(client: Any, name: str, num_bytes: int) -> Any:
        key = f"/{name}_{server.http_port}"
        handle = shared_memory.create_shared_memory_region(name, key, num_bytes)
        made.append((client, name, handle))
        client.register_system_shared_memory(name, key, num_bytes)
        return handle

    yield make
    with client_of(httpclient, server) as client:
        for _, name, handle in made:
            client.unregister_system_shared_memory(name)
            shared_memory.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
@pytest.mark.parametrize("num_bytes", [256, 8], ids=["fits", "too small"])
def test_shared_memory(
    server: TritonServer, wanted: list[str], region: Callable[[Any, str, int], Any], module: Any, num_bytes: int
) -> None:
    data = serialize_byte_tensor(np.array([text.encode() for text in TEXTS], dtype=object))
    num_given = len(data.item())
    with client_of(module, server) as client:
        shared_memory.set_shared_memory_region(region(client, "given", num_given), [data])
        found = region(client, "found", num_bytes)
        tensor = module.InferInput("text_input", [len(TEXTS)], "BYTES")
        tensor.set_shared_memory("given", num_given)
        output = module.InferRequestedOutput("text_output")
        output.set_shared_memory("found", num_bytes)

        def ask() -> list[str]:
            client.infer("plain", [tensor], outputs=[output], parameters=PARAMETERS)
            texts = shared_memory.get_contents_as_numpy(found, np.object_, [len(TEXTS)])
            return [text.decode() for text in texts]

        if num_bytes == 256:
            assert ask() == wanted
        else:
            with pytest.raises(InferenceServerException, match="text_output"):
                ask()
    assert generate(server, "plain", TEXTS[0], **PARAMETERS).json()["text_output"] == wanted[0]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
def test_compression(server: TritonServer, wanted: list[str], module: Any, algorithm: str) -> None:
    both_ways = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    how = both_ways if module is httpclient else {"compression_algorithm": algorithm}
    with client_of(module, server) as client:
        found = client.infer("plain", [prompts(module)], parameters=PARAMETERS, **how).as_numpy("text_output")
    assert [text.decode() for text in found] == wanted


def test_classification_of_string_outputs_ends_triton(
    checkpoint: Path, make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """It divides by the size of a text. Where this begins to fail, README can leave its warning out."""
    make_folder(tmp_path, "plain", huggingface_model=checkpoint)
    body = {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]}],
        "outputs": [{"name": "text_output", "parameters": {"classification": 1}}],
    }
    with TritonServer(tmp_path) as server:
        unknown = post(server, "/v2/models/plain/generate", {"text_input": "Hello", "classification": 1})
        assert (unknown.status, unknown.error.split(":")[0]) == (400, "unknown_parameter")
        with pytest.raises((RemoteDisconnected, ConnectionResetError)):
            post(server, "/v2/models/plain/infer", body)


def test_a_warm_up_is_answered_before_the_first_request(server: TritonServer) -> None:
    name = f'hf_triton_requests_total{{model="warm",outcome="ok",version="1"}} {NUM_WARM_UPS}'
    deadline_s = time.monotonic() + 30.0
    while True:
        with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if "hf_triton_requests_total{" in line]
        if name in lines:
            return
        assert time.monotonic() < deadline_s, lines
        time.sleep(0.2)


def test_versions_are_served_side_by_side(server: TritonServer, wanted: list[str]) -> None:
    for path, version in (("", "3"), ("/versions/1", "1"), ("/versions/3", "3")):
        reply = post(server, f"/v2/models/versions{path}/generate", {"text_input": TEXTS[0], **PARAMETERS}).json()
        assert (reply["text_output"], reply["model_version"]) == (wanted[0], version)


@pytest.mark.parametrize("name", ["ensemble", "ensemble_stream"])
def test_an_ensemble(server: TritonServer, wanted: list[str], name: str) -> None:
    reply = post(server, f"/v2/models/{name}/generate", {"question": TEXTS[0], **PARAMETERS}).json()
    assert (reply["answer"], reply["why"]) == (wanted[0], "length")


def test_a_python_model_that_calls_this_one(server: TritonServer, wanted: list[str]) -> None:
    reply = generate(server, "caller", TEXTS[0])
    assert json.loads(reply.json()["found"]) == [wanted[0], "length", wanted[0]]


def test_error_of_a_bls_request_reaches_the_caller(server: TritonServer) -> None:
    reply = post(server, "/v2/models/caller/generate", {"text_input": "x" * 100_000})
    assert reply.status == 400
    assert "context_exceeded: text_input row 0" in reply.error


def test_a_configuration_sent_with_load(checkpoint: Path, make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "plain", huggingface_model=checkpoint, max_output_length=2)

    def config(**settings: object) -> str:
        settings = {"huggingface_model": checkpoint, **settings}
        return json.dumps(
            {"backend": "python", "parameters": {key: {"string_value": str(value)} for key, value in settings.items()}}
        )

    def count(server: TritonServer, name: str = "plain") -> int:
        reply = infer(server, name, ["Hello"], parameters={"return_num_output_tokens": True}).json()
        [found] = [output["data"][0] for output in reply["outputs"] if output["name"] == "num_output_tokens"]
        return int(found)

    # Triton 24.10 counts a model that failed to load beside an older one as live, and waits for it when it stops.
    explicit = ["--model-control-mode=explicit", "--exit-timeout-secs=3"]
    with TritonServer(tmp_path, arguments=explicit) as running, client_of(httpclient, running) as client:
        client.load_model("plain")
        assert count(running) == 2
        client.load_model("plain", config=config(max_output_length=3))
        assert count(running) == 3
        with pytest.raises(InferenceServerException, match="max_output_lenght"):
            client.load_model("plain", config=config(max_output_lenght=4))
        assert count(running) == 3, "the model that was loaded is still served"
        code = (folder / "1" / "model.py").read_bytes()
        client.load_model("sent", config=config(max_output_length=4), files={"file:1/model.py": code})
        assert count(running, "sent") == 4
