# SPDX-License-Identifier: Apache-2.0
"""`hf-triton new` writes folders that load as they are; `hf-triton pull` fills the cache or a folder."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_triton.errors import HubError
from hf_triton.folders.model_folder import model_settings
from hf_triton.settings import DEFAULT_MODELS
from hf_triton.testing import LoopbackHub, TritonServer, build_tiny_checkpoint
from tests.support.client import generate
from tests.support.commands import hf_triton, in_process
from tests.support.fp8_blocks import CONFIG, IN_PYTORCH, KERNEL, edit_config, write_kernel

NAME = "Qwen/Qwen3-0.6B"
GGUF = "acme/Tiny-GGUF"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.add(NAME, build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "qwen3"))
        gguf = tmp_path_factory.mktemp("gguf")
        for quant in ("Q4_K_M", "Q8_0"):
            (gguf / f"Tiny-{quant}.gguf").write_text(quant)
        hub.add(GGUF, gguf)
        yield hub


@pytest.mark.full
def test_a_new_folder_loads_as_it_is_after_a_pull(hub: LoopbackHub, tmp_path: Path) -> None:
    environment = hub.environment() | {"HF_HOME": str(tmp_path / "home")}
    repository = tmp_path / "new" / "repository"
    options = [f"--model={NAME}", f"--into={repository}", "--stream-door", "--set", "max_output_length=3"]
    done = hf_triton("new", "mine", *options)
    assert done.returncode == 0, done.stderr
    pulled = hf_triton("pull", NAME, **environment)
    assert pulled.returncode == 0, pulled.stderr
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    with TritonServer(repository, environment=offline) as server:
        assert {model.name for model in server.models() if model.state == "READY"} == {"mine", "mine_stream"}
        assert generate(server, "mine", "Hello").json()["text_output"]


def test_a_task_alone_is_enough_for_a_folder(tmp_path: Path) -> None:
    model, revision = DEFAULT_MODELS["question-answering"]
    done = in_process("new", "transformer", "--task=question-answering", f"--into={tmp_path}")
    assert done.exit_code == 0, done.stderr
    assert f" for {model}@{revision}." in done.stdout
    config = (tmp_path / "transformer" / "config.pbtxt").read_text()
    for value in (model, revision, "question-answering"):
        assert f'string_value: "{value}"' in config


def test_a_folder_may_name_one_of_another_machine(tmp_path: Path) -> None:
    done = in_process("new", "mine", "--model=/nowhere/llama", f"--into={tmp_path}")
    assert done.stderr == "There is no folder '/nowhere/llama' here: it must exist where the model is served.\n"
    assert 'value { string_value: "/nowhere/llama" }' in (tmp_path / "mine" / "config.pbtxt").read_text()


def test_one_gguf_file_is_pulled_and_copied(hub: LoopbackHub, tmp_path: Path) -> None:
    environment = hub.environment() | {"HF_HOME": str(tmp_path / "home")}
    refused = hf_triton("pull", GGUF, **environment)
    assert refused.returncode == 1
    assert f"{GGUF} has GGUF files (Tiny-Q4_K_M.gguf, Tiny-Q8_0.gguf): name one" in refused.stderr
    assert hf_triton("pull", f"{GGUF}:q4_k_m", **environment).returncode == 0
    done = hf_triton("pull", f"{GGUF}:Q8_0", f"--into-folder={tmp_path / 'plain'}", **environment)
    assert done.stdout == f"{GGUF}:Q8_0: {tmp_path / 'plain'} (4 bytes)\n"
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["Tiny-Q8_0.gguf"]
    assert in_process("new", "mine", f"--model={GGUF}:Q8_0", f"--into={tmp_path}").exit_code == 0
    assert 'key: "gguf_file" value { string_value: "Q8_0" }' in (tmp_path / "mine" / "config.pbtxt").read_text()


@pytest.mark.full
def test_a_pulled_folder_serves_without_the_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    done = hf_triton("pull", NAME, f"--into-folder={folder}", HF_HOME=str(tmp_path / "home"), **hub.environment())
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{NAME}: {folder} \([\d.]+ [kM]B\)\n", done.stdout)
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert in_process("new", "mine", f"--model={folder}", f"--into={tmp_path}").exit_code == 0
    (tmp_path / "repository").mkdir()
    (tmp_path / "mine").rename(tmp_path / "repository" / "mine")
    with TritonServer(tmp_path / "repository", environment={"HF_HUB_OFFLINE": "1"}) as server:
        assert generate(server, "mine", "Hello").json()["text_output"]


@pytest.fixture
def blocks(hub: LoopbackHub, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A checkpoint in blocks of FP8, and an environment with a Hub that has its kernel."""
    folder = build_tiny_checkpoint(tmp_path / "blocks", "qwen3")
    edit_config(folder, quantization_config=CONFIG)
    kernel = write_kernel(tmp_path / "kernel")
    hub.add(KERNEL, kernel, revisions={"v4": kernel})
    hub.requests.clear()
    return folder, hub.environment() | {"HF_HOME": str(tmp_path / "home"), "KERNELS_CACHE": str(tmp_path / "kernels")}


def kernel_requests(hub: LoopbackHub) -> list[str]:
    return [request.path for request in hub.requests if KERNEL in request.path]


@pytest.mark.full
def test_kernels_are_pulled_once_and_stay_at_their_commit(
    hub: LoopbackHub, blocks: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, environment = blocks
    lock = tmp_path / "kernels" / "kernels.lock"
    done = hf_triton("pull", "--kernels", str(folder), **environment)
    assert done.returncode == 0, done.stderr
    commit = json.loads(lock.read_text())[KERNEL]
    snapshot = tmp_path / "kernels" / "kernels--kernels-community--finegrained-fp8" / "snapshots" / commit
    assert done.stdout == f"{lock}: {KERNEL} is locked at {commit} from now on\n{folder}: {snapshot}\n"
    assert sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*.*")) == [
        "build/torch-cuda/__init__.py",
        "build/torch-cuda/metadata.json",
    ]
    newer = write_kernel(tmp_path / "newer", "answer = 2\n")
    hub.add(KERNEL, newer, revisions={"v4": newer})
    hub.requests.clear()
    assert hf_triton("pull", "--kernels", str(folder), **environment).stdout == f"{folder}: {snapshot}\n"
    assert kernel_requests(hub) == []
    shutil.rmtree(snapshot)
    again = hf_triton("pull", "--kernels", str(folder), **environment)
    assert again.stdout == f"{folder}: {snapshot}\n"
    assert snapshot.joinpath("build/torch-cuda/__init__.py").read_text() == IN_PYTORCH
    assert all(commit in path for path in kernel_requests(hub) if "/resolve/" in path)


@pytest.mark.full
@pytest.mark.parametrize("text", ["{", '{"kernels-community/finegrained-fp8": "v4"}'])
def test_a_damaged_lock_file_stops_a_pull(
    text: str, hub: LoopbackHub, blocks: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, environment = blocks
    lock = tmp_path / "kernels" / "kernels.lock"
    lock.parent.mkdir()
    lock.write_text(text)
    done = hf_triton("pull", "--kernels", str(folder), **environment)
    assert done.returncode == 1
    assert f"{lock} is damaged: it must be a JSON object" in done.stderr
    assert lock.read_text() == text
    assert kernel_requests(hub) == []


@pytest.mark.full
def test_kernels_without_a_hub(blocks: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, environment = blocks
    done = hf_triton("pull", "--kernels", str(folder), **environment, HF_HUB_OFFLINE="1")
    assert done.returncode == 4
    assert f"the kernel {KERNEL} (v4) is not in {tmp_path / 'kernels'}, and HF_HUB_OFFLINE forbids" in done.stderr


@pytest.mark.full
def test_a_model_without_such_kernels(hub: LoopbackHub, tmp_path: Path) -> None:
    environment = hub.environment() | {"HF_HOME": str(tmp_path / "home")}
    done = hf_triton("pull", "--kernels", NAME, **environment)
    assert done.stdout == f"{NAME}: no quantisation, for which no kernels of the Hub are needed\n"
    assert not list((tmp_path / "home").rglob("*.safetensors"))


WRONG = {
    "kernels into a folder": (["pull", "--kernels", "a/b", "--into-folder=x"], 2, "exclude each other"),
    "existing folder": (["new", "here", "--model=a/b"], 2, "here exists: choose another name"),
    "no model": (["new", "mine"], 2, "give --model, or one of these as --task: text-generation, "),
    "a task without a default": (["new", "mine", "--task=rerank"], 2, "give --model, or one of these as --task: "),
    "no such checkpoint": (["new", "mine", "--model=./nowhere"], 3, "there is no folder './nowhere'"),
    "no model of any kind": (["new", "mine", "--model=a/b/c"], 3, "'a/b/c', and it is no name on the Hub (OWNER/NAME)"),
    "an empty model": (["new", "mine", "--model="], 3, "there is no folder '', and it is no name on the Hub"),
    "bad name": (["new", "a b", "--model=a/b"], 2, "NAME must have ASCII letters"),
    "two ways to stream": (["new", "mine", "--model=a/b", "--stream", "--stream-door"], 2, "exclude each other"),
    "unknown setting": (
        ["new", "mine", "--model=a/b", "--set", "dtipe=int8"],
        2,
        "there is no setting 'dtipe' (from the command line), did you mean 'dtype'?",
    ),
    "wrong value": (["new", "mine", "--model=a/b", "--set", "dtype=x"], 2, "got 'x' (from the command line)"),
    "a name twice": (["new", "mine", "--model=a/b", "--set", "huggingface_model=c/d"], 2, "is given twice"),
    "a file for a repository": (["new", "mine", "--model=a/b", "--into=here/file"], 2, "'here/file' is a file"),
    "a GGUF file twice": (["new", "mine", "--model=a/b:Q8_0", "--set", "gguf_file=x"], 2, "gguf_file is given twice"),
    "no such GGUF file": (
        ["pull", f"{GGUF}:Q2_K"],
        1,
        "no GGUF file has the name or quantisation 'Q2_K': set gguf_file to one of Tiny-Q4_K_M.gguf, Tiny-Q8_0.gguf",
    ),
    "nothing to pull": (["pull", "nobody/nothing"], 3, "or it is private: correct the name, or set HF_TOKEN"),
    "no revision to pull": (["pull", f"{NAME}@v9"], 3, "/Qwen3-0.6B, and name it behind @"),
    "two into one folder": (["pull", "a/b", "c/d", "--into-folder=x"], 2, "takes one model"),
    "a folder that is not empty": (
        ["pull", "a/b", "--into-folder=here"],
        2,
        "takes one model and a folder that is empty",
    ),
}


ASKS_THE_HUB = ("no such GGUF file", "nothing to pull", "no revision to pull")


@pytest.mark.full
@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_has_a_sentence_and_an_exit_code(
    case: str, hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, code, sentence = WRONG[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    monkeypatch.setenv("COLUMNS", "200")
    if case in ASKS_THE_HUB:  # its address is read when a process begins
        asked = hf_triton(*arguments, HF_HOME=str(tmp_path / "home"), **hub.environment())
        ended, told = asked.returncode, asked.stderr
    else:
        done = in_process(*arguments)
        ended, told = done.exit_code, done.stderr
    assert ended == code, told
    assert sentence in told
    assert told.splitlines()[-1].startswith("error: ")
    assert sorted(os.listdir(tmp_path)) in (["here"], ["here", "home"])


@pytest.mark.full
def test_a_broken_download_is_resumed(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.fail(503, path=f"{NAME}/resolve")
    environment = hub.environment() | {"HF_HOME": str(tmp_path / "home")}
    assert hf_triton("pull", NAME, **environment).returncode == 4
    hub.heal()
    assert hf_triton("pull", NAME, **environment).returncode == 0


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("command", ["pull", "serve"])
def test_a_full_disk_is_one_sentence(hub: LoopbackHub, tmp_path: Path, command: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", home], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        done = hf_triton(command, NAME, HF_HOME=str(home), **hub.environment())
    finally:
        subprocess.run(["umount", home], check=True)
    assert done.returncode == 1
    [*_, sentence] = done.stderr.splitlines()
    assert sentence.startswith("error: disk_full: ")
    assert str(home) in sentence


def test_the_address_of_a_page_is_a_model_s_name(tmp_path: Path) -> None:
    page = "https://huggingface.co/Qwen/Qwen3-0.6B"
    assert model_settings(page, {}) == {"huggingface_model": "Qwen/Qwen3-0.6B"}
    assert model_settings(f"{page}/tree/v1", {}) == {"huggingface_model": "Qwen/Qwen3-0.6B", "revision": "v1"}
    file = "https://huggingface.co/a/b-GGUF/resolve/main/b-Q8_0.gguf"
    assert model_settings(file, {}) == {"huggingface_model": "a/b-GGUF", "gguf_file": "b-Q8_0.gguf"}
    with pytest.raises(HubError, match="it is no name on the Hub"):
        model_settings("https://example.org/a/b", {})
