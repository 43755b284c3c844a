# SPDX-License-Identifier: Apache-2.0
"""`hf-triton serve` with names, checkpoints and folders, with tritonserver's flags, and wrong uses of both."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_triton.testing import LoopbackHub, build_tiny_checkpoint, build_tiny_encoder
from tests.support.certificates import Authority
from tests.support.commands import hf_triton
from tests.support.paths import ROOT
from tests.support.serving import curl_lines, running, send, serve_until_exit
from tests.support.tasks import save_task_checkpoint

pytestmark = pytest.mark.full

NAME = "Qwen/Qwen3-0.6B"
GATED = "meta-llama/Llama-3.2-1B"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "qwen3")


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.add(NAME, checkpoint)
        hub.add(GATED, checkpoint, gated=True)
        yield hub


def ask(port: int, path: str, body: dict[str, object] | None = None, **headers: str) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        loaded: dict[str, object] = json.load(answer)
        return loaded


def generate(port: int, name: str) -> object:
    return ask(port, f"/v2/models/{name}/generate", {"text_input": "Hello", "max_new_tokens": 4})["text_output"]


def test_names_checkpoints_and_folders_are_served_at_once(
    hub: LoopbackHub, checkpoint: Path, tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    hub.add("a/classifier", save_task_checkpoint(tmp_path / "classifier", "bert", "sequence", num_labels=3))
    labels = make_folder(tmp_path / "repository", "labels", huggingface_model="a/classifier")
    folder = tmp_path / "mine"
    shutil.copytree(ROOT / "falcon7b", folder)
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace("tiiuae/falcon-7b", str(checkpoint)))
    before = sorted(tmp_path.rglob("*"))
    what = [NAME, str(checkpoint), str(folder), str(labels)]
    environment = hub.environment() | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": ""}
    with running(*what, output=tmp_path / "output", **environment) as serving:
        output = serving.wait_for("/v1/")
        assert len(re.findall(r"^(labels|mine|qwen3-0.6b|tiny): ready in ", output, re.MULTILINE)) == 4
        serving.wait_for("Ctrl+C stops the server")
        assert "label" in send(next(line for line in curl_lines(serving.output()) if "/v1/classify" in line[1]))
        assert len([line for line in serving.output().splitlines() if "download" not in line]) <= 25
        texts = {generate(serving.http_port, name) for name in ("mine", "qwen3-0.6b", "tiny")}
    assert len(texts) == 1
    assert f"{NAME} (revision main): downloading" in output
    left = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    assert left - {path for path in left if path.is_relative_to(tmp_path / "home")} == {*before, tmp_path / "output"}


def test_settings_apply_to_what_has_no_folder(checkpoint: Path, tmp_path: Path) -> None:
    arguments = [str(checkpoint), "--stream", "--set", "max_output_length=3", "--no-openai"]
    with running(*arguments, output=tmp_path / "output") as serving:
        serving.wait_for("Ctrl+C stops the server")
        config = ask(serving.http_port, "/v2/models/tiny/config")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["parameters"]["max_output_length"] == {"string_value": "3"}  # type: ignore[index]


def test_explicit_mode_and_restricted_apis(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    assert hf_triton("new", "tiny", f"--model={checkpoint}", f"--into={tmp_path}").returncode == 0
    repository.mkdir()
    (tmp_path / "tiny").rename(repository / "tiny")
    restricted = "--http-restricted-api=health,metadata,model-repository:secret=open"
    protocol = "--grpc-restricted-protocol=inference,model-repository,model-config,health:key=key-to-be-kept"
    flags = ["--", "--model-control-mode=explicit", restricted, protocol]
    with running(str(repository), *flags, output=tmp_path / "output") as serving:
        serving.wait_for("hf-triton load NAME` loads one")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            ask(serving.http_port, "/v2/repository/index", {})
        load = urllib.request.Request(
            f"http://127.0.0.1:{serving.http_port}/v2/repository/models/tiny/load", b"{}", {"secret": "open"}
        )
        with urllib.request.urlopen(load, timeout=60):
            pass
        assert generate(serving.http_port, "tiny")
        answer = ask(serving.openai_port, "/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 2})
        assert answer["choices"]
    assert "key-to-be-kept" not in (tmp_path / "output").read_text()


def test_models_named_by_a_flag_are_loaded_with_their_doors(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--", "--model-control-mode=explicit", "--load-model=tiny"]
    with running(str(checkpoint), *flags, output=tmp_path / "output") as serving:
        serving.wait_for("/v1/")
        assert ask(serving.http_port, "/v2/models/tiny_stream/config")["name"] == "tiny_stream"


WRONG = {
    "no such folder": (["./nowhere"], 3, "there is no folder './nowhere'"),
    "no name of an owner": (["nothing"], 3, "(there is no folder 'nothing' here either)"),
    "no such name": (["nobody/nothing"], 3, "hub_not_found"),
    "gated": ([GATED], 3, "hub_gated"),
    "no such revision": ([f"{NAME}@v9"], 3, "hub_revision_not_found"),
    "unknown setting": ([NAME, "--set", "max_output_lenght=3"], 2, "did you mean 'max_output_length'?"),
    "impossible setting": ([NAME, "--set", "max_output_length=-3"], 2, "max_output_length"),
    "set without value": ([NAME, "--set", "revision"], 2, "must be KEY=VALUE"),
    "set without model": (["--set", "revision=main"], 2, "--set, --task and --stream are for models: name one"),
    "unknown task": ([NAME, "--task", "telepathy"], 2, "'telepathy' is not one of 'text-generation', 'embeddings'"),
    "own flag": ([NAME, "--", "--http-port=1"], 2, "give --http-port before --"),
    "flag apart from its value": ([NAME, "--", "--log-verbose", "1"], 2, "write --flag=value"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_has_a_sentence_and_an_exit_code(case: str, hub: LoopbackHub, tmp_path: Path) -> None:
    arguments, code, sentence = WRONG[case]
    environment = hub.environment() | {"HF_HOME": str(tmp_path), "HF_TOKEN": "", "COLUMNS": "200"}
    done = serve_until_exit(*arguments, **environment)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_no_hub_is_one_sentence(tmp_path: Path) -> None:
    done = serve_until_exit(NAME, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert done.returncode == 4
    assert "error: hub_unavailable" in done.stderr


@pytest.mark.parametrize(("head", "config"), [("sequence", {"num_labels": 1}), ("sequence", {}), ("answers", {})])
def test_printed_requests_fit_an_encoder(tmp_path: Path, head: str, config: dict[str, object]) -> None:
    checkpoint = save_task_checkpoint(tmp_path / "encoder", "bert", head, **config)
    with running(str(checkpoint), output=tmp_path / "output") as serving:
        output = serving.wait_for("Ctrl+C stops the server")
        answers = [json.loads(send(line)) for line in curl_lines(output)]
    assert len(answers) == 1
    assert all("error" not in answer for answer in answers)
    assert "encoder_stream" not in output


def test_printed_requests_have_the_names_that_folders_declare(
    checkpoint: Path, tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    certificate = Authority(tmp_path).issue("gateway", "DNS:localhost", "IP:127.0.0.1")
    repository, masks = tmp_path / "repository", tmp_path / "masks"
    build_tiny_encoder(masks, "fill-mask")
    text = 'input [ {{ name: "{}" data_type: TYPE_STRING dims: [ 1 ] }} ]'
    labels = save_task_checkpoint(tmp_path / "classifier", "bert", "sequence", num_labels=3)
    make_folder(repository, "labels", huggingface_model=labels, config=text.format("TEXT"))
    make_folder(repository, "masks", huggingface_model=masks)
    make_folder(repository, "writer", huggingface_model=checkpoint, config=text.format("args"))
    own = make_folder(repository, "near", huggingface_model=build_tiny_encoder(tmp_path / "vectors"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hooks.md").read_text(), flags=re.DOTALL)
    (own / "1" / "model.py").write_text(blocks[1])
    joined = repository / "joined"
    (joined / "1").mkdir(parents=True)
    (joined / "config.pbtxt").write_text(
        """platform: "ensemble"
        input [ { name: "QUERY" data_type: TYPE_STRING dims: [ -1 ] } ]
        output [ { name: "FOUND" data_type: TYPE_STRING dims: [ -1 ] } ]
        ensemble_scheduling { step [ {
          model_name: "masks" model_version: -1
          input_map { key: "text" value: "QUERY" } output_map { key: "output" value: "FOUND" }
        } ] }"""
    )
    tls = (f"--ssl-certfile={certificate.file}", f"--ssl-keyfile={certificate.key}")
    with running(str(repository), *tls, output=tmp_path / "output") as serving:
        lines = curl_lines(serving.wait_for("Ctrl+C stops the server", 240))
        answers = {line[-1]: send(line) for line in lines}
        classified = json.dumps({"model": "labels", "input": "The harbour is beautiful.", "top_k": 1})
        url = f"https://localhost:{serving.openai_port}/v1/classify"
        head = ["curl", "--cacert", str(Authority(tmp_path, "other").file), url, "-d", classified]
        assert subprocess.run(head, capture_output=True, check=False).returncode == 60
    bodies = [json.loads(body) for body in answers]
    assert {"first": "Anna lives at the harbour.", "second": "Anna lives at the harbour."} in bodies
    assert {"QUERY": "Anna lives at the harbour."} in bodies
    assert {"args": "How can you be"} in bodies
    assert {"model": "masks", "input": "Anna lives at the <mask>."} in bodies
    assert {"model": "labels", "input": "The harbour is beautiful."} in bodies
    refused = {body: answer for body, answer in answers.items() if "error" in json.loads(answer)}
    assert list(map(json.loads, refused)) in ([], [{"QUERY": "Anna lives at the harbour."}])  # which has no mask


def test_explicit_mode_shows_folders_that_cannot_be_read(
    checkpoint: Path, tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    repository = tmp_path / "repository"
    make_folder(repository, "tiny", huggingface_model=checkpoint)
    make_folder(repository, "garbled", huggingface_model=checkpoint, config="parameters {")
    ensemble = repository / "joined"
    (ensemble / "1").mkdir(parents=True)
    (ensemble / "config.pbtxt").write_text(
        """platform: "ensemble"
        input [ { name: "TEXT" data_type: TYPE_FP32 dims: [ -1 ] } ]
        output [ { name: "FOUND" data_type: TYPE_STRING dims: [ -1 ] } ]
        ensemble_scheduling { step [ { model_name: "tiny" model_version: -1
          input_map { key: "text_input" value: "TEXT" } output_map { key: "text_output" value: "FOUND" } } ] }"""
    )
    flags = ("--", "--model-control-mode=explicit", "--load-model=*")
    with running(str(repository), *flags, output=tmp_path / "output") as serving:
        output = serving.wait_for("Ctrl+C stops the server", 240)
    assert "garbled: failed: config.pbtxt cannot be parsed: " in output
    assert re.search("joined: failed: .*(does not fit|inconsistent)", output)
    assert "tiny: ready" in output
