# SPDX-License-Identifier: Apache-2.0
"""`hf-triton serve` in a terminal: the printed commands work, and Ctrl+C leaves no process behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hf_triton
from hf_triton.server import free_ports
from hf_triton.testing import build_tiny_checkpoint
from tests.support.folders import shadow_modules
from tests.support.paths import ROOT
from tests.support.serving import (
    COMMAND,
    PORTS,
    Serving,
    curl_lines,
    port_options,
    running,
    send,
    serve_until_exit,
    wait_until_gone,
)
from tests.support.slow_model import slow_model

STOP_LIMIT_S = 60.0
DEMO = Path(hf_triton.__file__).parent / "demo"
DECOUPLED = "model_transaction_policy { decoupled: true }"
READY = re.compile(
    r"demo: ready in \d+ s: LlamaForCausalLM, float32 on cpu, [\d.]+ MB, continuous batching, KV cache of .*"
)
SENTENCE = re.compile(r'"(How can you be|I am going) [a-z ,\']+')


def log_file(serving: Serving) -> Path:
    return Path(serving.output().splitlines()[0].rpartition(" ")[2])


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    shadow_modules(tmp_path)
    process = Serving(output=tmp_path / "output", folder=tmp_path)
    yield process
    process.process.kill()
    process.process.wait()


def test_printed_commands_work_and_ctrl_c_stops_all_processes(serving: Serving) -> None:
    lines = curl_lines(serving.wait_for("Ctrl+C stops the server"))
    assert len(lines) == 2
    response = send(lines[0])
    assert SENTENCE.search(response), response
    assert "/v1/chat/completions" in lines[1][1]
    assert len(json.loads(send(lines[1]))["choices"][0]["message"]["content"]) > 10
    shown = serving.output().splitlines()
    assert shown[1] == "demo: loading"
    assert READY.fullmatch(shown[2]), shown[2]
    assert len(shown) <= 15
    assert "successfully loaded 'demo'" in log_file(serving).read_text()
    page = f"http://localhost:{serving.openai_port}/"
    assert page in serving.output()
    assert "<!doctype html>" in send(["curl", page]).lower()
    family = serving.descendants()
    assert len(family) >= 4  # tritonserver, its Python stubs of the model and of its door, the gateway
    os.kill(serving.process.pid, signal.SIGINT)
    assert serving.process.wait(timeout=STOP_LIMIT_S) == 0, serving.output()
    assert [pid for pid in family if Path(f"/proc/{pid}").exists()] == []
    assert serving.output().endswith("Stopped.\n")


@pytest.mark.full
def test_second_ctrl_c_reports_unanswered_requests(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", "llama")
    folder = make_folder(tmp_path / "repository", "slow", huggingface_model=checkpoint)
    (folder / "1" / "model.py").write_text(slow_model(0.2))
    body = '{"text_input": "a", "max_new_tokens": 200, "ignore_eos": true}'
    with running(str(tmp_path / "repository"), output=tmp_path / "output") as serving:
        (line, *_) = curl_lines(serving.wait_for("Ctrl+C stops the server"))
        client = subprocess.Popen(["curl", "-s", line[3], "-d", body], stdout=subprocess.PIPE, text=True)
        time.sleep(1)
        os.kill(serving.process.pid, signal.SIGINT)
        serving.wait_for("Ctrl+C again stops at once")
        os.kill(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(timeout=STOP_LIMIT_S) == 0, serving.output()
        assert serving.output().endswith("a connection was still open, or a model was not unloaded.\n")
        assert client.communicate(timeout=STOP_LIMIT_S)[0] == ""


def test_ctrl_c_while_starting_stops_all_processes(serving: Serving) -> None:
    serving.wait_for("Starting tritonserver")
    while not (family := serving.descendants()):
        time.sleep(0.05)
    os.kill(serving.process.pid, signal.SIGINT)
    assert serving.process.wait(timeout=60) == 0, serving.output()
    wait_until_gone(family)


def test_ctrl_c_while_a_process_is_forked_is_not_lost() -> None:
    script = (
        "import os, signal; from hf_triton_cli.commands import main; "
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT)); main()"
    )
    command = [sys.executable, "-c", script, "serve", *port_options(free_ports(len(PORTS)))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"Starting tritonserver; its log: \S+\n(demo: loading\n)?Stopped.\n", result.stdout)


@pytest.mark.full
def test_server_ends_when_the_command_is_killed(serving: Serving) -> None:
    serving.wait_for("Ctrl+C stops the server")
    family = serving.descendants()
    serving.process.kill()
    wait_until_gone(family)


def test_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run([COMMAND, "serve", f"--http-port={port}"], capture_output=True, text=True)
    assert result.returncode == 2
    assert f"port {port} in use" in result.stderr


def test_equal_ports_are_refused() -> None:
    port = str(free_ports(1)[0])
    result = subprocess.run(
        [COMMAND, "serve", "--http-port", port, "--openai-port", port], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert f"must be different ports, got {port}, 8001, 8002, {port}" in result.stderr


def test_incompatible_numpy_is_named(tmp_path: Path) -> None:
    (tmp_path / "numpy-2.1.0.dist-info").mkdir()
    (tmp_path / "numpy-2.1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n")
    result = serve_until_exit(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert result.returncode == 1
    assert "corrupts strings with numpy 2.1.0: `pip install 'numpy<2'`" in result.stderr


@pytest.mark.full
def test_folder_of_another_backend_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "1").mkdir(parents=True)
    (tmp_path / "theirs" / "config.pbtxt").write_text('backend: "vllm"')
    serving = Serving(str(tmp_path), output=tmp_path / "output")
    assert serving.process.wait(timeout=120) == 1
    assert 'a folder for this library has backend: "python" in its config.pbtxt' in serving.output()


@pytest.mark.full
def test_server_that_cannot_start_is_an_error(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    make_folder(tmp_path / "repository", "mine", huggingface_model=DEMO)
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    binary.chmod(0o755)
    result = serve_until_exit(tmp_path / "repository", PATH=str(tmp_path))
    assert result.returncode == 1
    assert re.search(
        r"server_failed: tritonserver exited while starting; its log, \S+, says:\nout of order\n", result.stderr
    )


@pytest.mark.full
def test_server_that_aborts_while_starting_is_started_once_more(
    tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    make_folder(tmp_path / "repository", "mine", huggingface_model=DEMO)
    binary, runs = tmp_path / "tritonserver", tmp_path / "runs"
    binary.write_text(f"#!/bin/sh\necho run >> {runs}\nkill -ABRT $$\n")
    binary.chmod(0o755)
    result = serve_until_exit(tmp_path / "repository", PATH=f"{tmp_path}:/bin")
    assert result.returncode == 1
    assert "server_failed: tritonserver exited while starting" in result.stderr
    assert runs.read_text() == "run\n" * 2


REASONS = {
    "a&b": "its name has a space or a special character of the shell that Triton starts it with: rename it",
    "bare": "it has no 1/model.py: copy one from a model folder",
    "form": 'config.pbtxt cannot be parsed: 2:47: Message type "inference.ModelParameter" has no field named '
    '"int64_value": a setting is parameters { key: "..." value { string_value: "..." } }',
    "modèle": "its name is not ASCII, and Triton's Python cannot open it: rename it",
    "nowhere": "path_not_found: there is no folder ",
    "number": "config.pbtxt cannot be parsed: 2:61: Expected string but found: '128'",
    "quotes": 'config.pbtxt cannot be parsed: 2:66: Message type "inference.ModelParameter" has no field named '
    '"temperature": a setting is parameters { key: "..." value { string_value: "..." } }, and a " inside it is escaped '
    'as \\"',
    "renamed": "config.pbtxt names the model falcon7b, and Triton expects the folder's name: remove the line name:",
    "setting": 'config.pbtxt cannot be parsed: 2:1: Message type "inference.ModelConfig" has no field named '
    '"max_output_length": a setting is parameters { key: "max_output_length" value { string_value: "64" } }',
    "stray": "it has neither config.pbtxt nor 1/model.py: ",
    "two words": "its name has a space or a special character of the shell that Triton starts it with: rename it",
    "typo": 'config.pbtxt cannot be parsed: 2:1: Message type "inference.ModelConfig" has no field named '
    "\"max_bach_size\", did you mean 'max_batch_size'?",
    "unclosed": 'config.pbtxt cannot be parsed: 3:1: Message type "inference.ModelTransactionPolicy" has no field '
    'named "parameters": is a } missing before it?',
    "unversioned": "it has no version folder: copy 1/model.py from a model folder",
}
"""By folder name, the reason why the folder is not served."""
UNREADABLE = {
    "form": 'parameters { key: "max_output_length" value { int64_value: 128 } }',
    "number": 'parameters { key: "max_output_length" value { string_value: 128 } }',
    "quotes": 'parameters { key: "generation_defaults" value { string_value: "{"temperature": 0.7}" } }',
    "renamed": 'name: "falcon7b"',
    "setting": "max_output_length: 64",
    "typo": "max_bach_size: 8",
    "unclosed": "model_transaction_policy {",
}


def make_defective_folders(repository: Path, make_folder: Callable[..., Path]) -> None:
    make_folder(repository, "nowhere", huggingface_model="./nowhere")
    for name, config in UNREADABLE.items():
        make_folder(repository, name, config=config, huggingface_model="./x")
    (make_folder(repository, "bare", huggingface_model="./x") / "1" / "model.py").unlink()
    make_folder(repository, "two words", huggingface_model="./x")
    make_folder(repository, "a&b", huggingface_model="./x")
    make_folder(repository, "modèle", huggingface_model="./x")
    shutil.rmtree(make_folder(repository, "unversioned", huggingface_model="./x") / "1")
    (repository / "stray").mkdir()


@pytest.mark.full
def test_served_folders_and_reasons_of_the_others_are_printed(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    repository = tmp_path / "repository"
    make_defective_folders(repository, make_folder)
    shutil.copytree(DEMO, tmp_path / "demo")
    make_folder(repository, "batching", config="max_batch_size: 8", huggingface_model="../../demo", stream=True)
    make_folder(repository, "a_stream", config=DECOUPLED, huggingface_model=DEMO)
    shutil.copytree(ROOT / "stream_door", repository / "nowhere_stream")
    with running(str(repository), output=tmp_path / "output") as serving:
        output = serving.wait_for("Ctrl+C stops the server")
        for name, reason in REASONS.items():
            assert f"\n{name}: failed: {reason}" in output
        assert output.count(": failed: ") == len(REASONS)
        assert len(re.findall(r"^(a_stream|batching): ready in ", output, re.MULTILINE)) == 2
        assert "the setting stream does nothing without" in log_file(serving).read_text()
        lines = curl_lines(output)
        assert ["batching" in " ".join(line) for line in lines] == [True, True]
        assert SENTENCE.search(send(lines[0]))


@pytest.mark.full
def test_path_of_the_repository_and_host_may_be_any(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    repository = tmp_path / "it's my (modèles) & more"
    make_folder(repository, "mine", config=DECOUPLED, huggingface_model="../../demo")
    shutil.copytree(DEMO, tmp_path / "demo")
    with running(str(repository), "--host=127.0.0.2", output=tmp_path / "output") as serving:
        streaming, completing = curl_lines(serving.wait_for("Ctrl+C stops the server"))
        assert send(streaming).count("data: ") > 1
        assert '"choices"' in send(completing)
        serving.process.terminate()
        assert serving.process.wait(timeout=STOP_LIMIT_S) == 0
        assert serving.output().endswith("Stopped.\n")


def test_repository_without_a_loadable_model_is_an_error(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    make_folder(tmp_path / "repository", "bad", huggingface_model="./nowhere")
    serving = Serving(str(tmp_path / "repository"), output=tmp_path / "output")
    assert serving.process.wait(timeout=120) == 3
    assert "error: server_failed: no model is served" in serving.output()


def test_server_is_not_started_if_all_folders_have_defects(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    (make_folder(tmp_path / "repository", "bare", huggingface_model="./x") / "1" / "model.py").unlink()
    result = serve_until_exit(tmp_path / "repository")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"bare: failed: {REASONS['bare']}\nerror: server_failed: no model is served" in result.stderr


def test_folder_without_model_folders_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    result = serve_until_exit(tmp_path)
    assert result.returncode == 2
    assert f"there is no model folder in {tmp_path}: copy one in; a checkpoint has a config.json" in result.stderr


@pytest.mark.full
def test_a_killed_server_ends_the_command_with_a_sentence(serving: Serving) -> None:
    serving.wait_for("/v1/")
    [server] = [pid for pid in serving.descendants() if b"tritonserver\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(server, signal.SIGKILL)
    assert serving.process.wait(30) == 1
    assert "error: server_failed: tritonserver exited by signal 9 (Killed)" in serving.output()
