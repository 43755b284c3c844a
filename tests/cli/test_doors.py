# SPDX-License-Identifier: Apache-2.0
"""Stream doors that `hf-triton serve` adds: which folders get one, and that they stream beside /infer."""

import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_triton
from hf_triton.folders.doors import folders_without_door
from tests.support.paths import ROOT
from tests.support.serving import running

DEMO = Path(hf_triton.__file__).parent / "demo"
DECOUPLED = "model_transaction_policy { decoupled: true }"
BODY = '{"text_input":"How can you be","stream":true}'

OURS = {
    "shipped": "import hf_triton\nclass TritonPythonModel(hf_triton.TritonPythonModel): pass",
    "imported": "from hf_triton import TritonPythonModel as TritonPythonModel",
    "renamed": "import hf_triton as h\nclass Base(h.TritonPythonModel): pass\nclass TritonPythonModel(Base): pass",
    "from its module": "from hf_triton.model import TritonPythonModel as T\nclass TritonPythonModel(T): pass",
}
FOREIGN = {
    "a door": "import hf_triton\nclass TritonPythonModel(hf_triton.StreamDoor): pass",
    "another library": "class TritonPythonModel: pass",
    "a user of the library": "import hf_triton\nclass TritonPythonModel: errors = hf_triton.HfTritonError",
    "another class": "import hf_triton\nclass Other(hf_triton.TritonPythonModel): pass\nclass TritonPythonModel: pass",
    "a syntax error": "import hf_triton\nclass TritonPythonModel(hf_triton.TritonPythonModel) pass",
    "not UTF-8": "# \udcff",
}


def write_folder(repository: Path, name: str, model: str = OURS["shipped"], config: str = "") -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_bytes(model.encode(errors="surrogateescape"))
    (folder / "config.pbtxt").write_text(config)
    return folder


@pytest.mark.parametrize("model", OURS.values(), ids=OURS)
def test_models_of_this_library_get_a_door(tmp_path: Path, model: str) -> None:
    write_folder(tmp_path, "mine", model, 'backend: "python"  # decoupled: true')
    assert folders_without_door(tmp_path) == ["mine"]


@pytest.mark.parametrize("model", FOREIGN.values(), ids=FOREIGN)
def test_other_python_models_get_no_door(tmp_path: Path, model: str) -> None:
    write_folder(tmp_path, "theirs", model)
    assert folders_without_door(tmp_path) == []


@pytest.mark.parametrize(
    "config",
    ['backend: "vllm"', 'platform: "ensemble"', DECOUPLED, "model_transaction_policy: {\n  decoupled : True\n}"],
)
def test_other_backends_and_streaming_folders_get_no_door(tmp_path: Path, config: str) -> None:
    write_folder(tmp_path, "mine", config=config)
    assert folders_without_door(tmp_path) == []


def test_folders_with_a_door_get_no_second_one(tmp_path: Path) -> None:
    of = 'parameters: { key: "stream_of" value: { string_value: "b" } }'
    for name, config in {"a": "", "a_stream": DECOUPLED, "b": "", "tap": f"{DECOUPLED}\n{of}", "c": ""}.items():
        write_folder(tmp_path, name, config=config)
    assert folders_without_door(tmp_path) == ["c"]


def test_folders_of_encoders_get_no_door(tmp_path: Path) -> None:
    for name in ("bge", "reranker", "sentiment", "ner", "qa", "llama7b"):
        shutil.copytree(ROOT / name, tmp_path / name)
    assert folders_without_door(tmp_path) == ["llama7b"]


def test_the_newest_version_decides(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "mine", FOREIGN["another library"])
    (folder / "10").mkdir()
    (folder / "10" / "model.py").write_text(OURS["imported"])
    assert folders_without_door(tmp_path) == ["mine"]


def test_ready_folders_get_a_door_from_the_library_as_installed(tmp_path: Path) -> None:
    for name in ("falcon7b", "llama7b", "persimmon8b", "stream_door"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert folders_without_door(tmp_path) == ["falcon7b", "llama7b", "persimmon8b"]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def events(url: str) -> list[str]:
    command = ["curl", "--silent", "--no-buffer", url, "-d", BODY]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(event.removeprefix("data: "))["text_output"] for event in output.split("\n\n") if event]


def openai_chunks(port: int) -> list[str]:
    body = '{"model":"mine","prompt":"How can you be","stream":true}'
    url = f"http://127.0.0.1:{port}/v1/completions"
    command = ["curl", "--silent", "--no-buffer", url, "-H", "Content-Type: application/json", "-d", body]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    chunks = [event.removeprefix("data: ") for event in output.split("\n\n") if event]
    assert chunks.pop() == "[DONE]"
    return [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]


@pytest.mark.full
def test_one_folder_answers_infer_and_streams(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    repository = tmp_path / "repository"
    make_folder(repository, "mine", huggingface_model=DEMO)
    before = files_below(repository)
    with running(str(repository), output=tmp_path / "output") as serving:
        output = serving.wait_for("Ctrl+C stops the server")
        models = f"http://127.0.0.1:{serving.http_port}/v2/models"
        assert "\nmine: ready in " in output
        assert len(events(f"{models}/mine_stream/generate_stream")) > 1
        assert len(events(f"{models}/mine/generate_stream")) == 1
        assert len(openai_chunks(serving.openai_port)) > 2
        assert files_below(repository) == before
    assert files_below(repository) == before


@pytest.mark.full
def test_without_doors_and_gateway_neither_is_there(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    make_folder(tmp_path / "repository", "mine", huggingface_model=DEMO)
    with running(str(tmp_path / "repository"), "--no-doors", "--no-openai", output=tmp_path / "output") as serving:
        assert "/v1/" not in serving.wait_for("Ctrl+C stops the server")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", serving.openai_port))
        url = f"http://127.0.0.1:{serving.http_port}/v2/models/mine_stream/ready"
        status = subprocess.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url], capture_output=True)
        assert status.stdout != b"200"


@pytest.mark.full
def test_exit_on_error_names_the_folder_and_exits(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    make_folder(tmp_path / "repository", "mine", huggingface_model=DEMO)
    make_folder(tmp_path / "repository", "bad", huggingface_model="./nowhere")
    with running(str(tmp_path / "repository"), "--exit-on-error", output=tmp_path / "output") as serving:
        assert serving.process.wait(timeout=120) == 3
        assert "bad: failed: path_not_found: " in serving.output()
        assert "error: server_failed: a model cannot be served, and --exit-on-error is set" in serving.output()
