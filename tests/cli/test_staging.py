# SPDX-License-Identifier: Apache-2.0
"""Folders appear in a model repository when they are complete, or not at all: Triton loads what it finds there."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_triton.folders.staging import publish, staging_folder
from tests.support.commands import COMMAND, in_process
from tests.support.paths import ROOT
from tests.support.sentence_checkpoints import save_sentence_model


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one disk only")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def write_folder(folder: Path) -> Path:
    (folder / "1" / "onnx").mkdir(parents=True)
    for name in ("config.pbtxt", "1/model.py", "1/onnx/config.json", "1/onnx/model.onnx"):
        (folder / name).write_text(name)
    return folder


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_is_written_beside_the_repository_and_moved(repository: Path) -> None:
    with staging_folder(repository / "mine") as staging:
        assert Path(staging).parent == repository.parent
        folder = write_folder(Path(staging) / "mine")
        expected = files_of(folder)
        assert list(repository.iterdir()) == []
        publish(folder, repository / "mine")
    assert files_of(repository / "mine") == expected
    assert list(repository.parent.iterdir()) == [repository]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["new", "mine", "--model=acme/tiny", "--set=foo=1", "--into=made/repository"], 2),
        (["export", "vllm", "ner", "--into=made/repository/mine"], 2),
        (["pull", "/nowhere/at/all", "--into-folder=made/checkpoint"], 3),
        (["new", "mine", "--model=acme/tiny", "--into=file/repository"], 2),
    ],
)
def test_a_command_that_fails_leaves_nothing_behind(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "ner", "ner", ignore=shutil.ignore_patterns("__pycache__"))
    Path("file").touch()
    before = files_of(tmp_path)
    done = in_process(*arguments)
    assert (done.exit_code, done.output.count("error: ")) == (code, 1)
    assert [name for name in files_of(tmp_path) if "__pycache__" not in name] == before


def test_a_folder_that_is_not_published_takes_the_parents_with_it(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "made" / "repository" / "mine") as staging:
        write_folder(staging / "mine")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_moves_to_another_disk_and_its_config_last(tmp_path: Path, other_disk: Path) -> None:
    folder = write_folder(tmp_path / "mine")
    publish(folder, other_disk / "mine")
    assert files_of(other_disk / "mine") == files_of(folder)
    times = {path.name: path.stat().st_mtime_ns for path in (other_disk / "mine").rglob("*") if path.is_file()}
    assert max(times, key=lambda name: times[name]) == "config.pbtxt"


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, other_disk: Path) -> None:
    folder = write_folder(tmp_path / "mine")
    (folder / "1" / "link").symlink_to("nowhere")
    (other_disk / "empty").mkdir()
    for target in (other_disk / "mine", other_disk / "empty"):
        with pytest.raises(OSError, match="No such file"):
            publish(folder, target)
    assert files_of(other_disk) == ["empty"]


def test_a_folder_that_came_meanwhile_is_not_overwritten(repository: Path, tmp_path: Path) -> None:
    (repository / "mine").mkdir()
    (repository / "mine" / "config.pbtxt").write_text("another's")
    with pytest.raises(OSError, match="not empty"):
        publish(write_folder(tmp_path / "mine"), repository / "mine")
    assert files_of(repository) == ["mine", "mine/config.pbtxt"]


@pytest.mark.full
def test_optimize_that_is_ended_leaves_nothing(
    repository: Path, tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    make_folder(repository, "mine", huggingface_model=save_sentence_model(tmp_path / "model"))
    command = [COMMAND, "optimize", str(repository / "mine"), "--rounds=1000000"]
    before = set(tmp_path.iterdir())
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            assert [path.name for path in repository.iterdir()] == ["mine"]
            if "Measuring" in line:
                break
        [staging] = set(tmp_path.iterdir()) - before
        assert (staging / "onnx" / "config.pbtxt").exists()
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode not in (0, -signal.SIGTERM)
    assert set(tmp_path.iterdir()) == before
    assert [path.name for path in repository.iterdir()] == ["mine"]
