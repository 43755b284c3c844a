# SPDX-License-Identifier: Apache-2.0
"""Temporary folders: those of the dead are removed, and no other."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hf_triton import scratch
from hf_triton.scratch import OWNER, ScratchFolder, remove_abandoned

OWN = """
import sys
from hf_triton.scratch import ScratchFolder
folder = ScratchFolder("doors")
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def start_owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWN],
        env=os.environ | {"TMPDIR": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_folder_is_removed_with_its_owner_or_after_its_death(tmp_path: Path) -> None:
    ends, ended_folder = start_owner(tmp_path)
    lives, living_folder = start_owner(tmp_path)
    dies, dead_folder = start_owner(tmp_path)
    (dead_folder / "kept").mkdir()
    ends.communicate("")
    assert not ended_folder.exists()
    dies.send_signal(signal.SIGKILL)
    dies.communicate()
    assert dead_folder.exists()
    with ScratchFolder("server") as own:
        assert not dead_folder.exists()
        assert living_folder.exists()
        remove_abandoned(tmp_path)
        assert {each.name for each in tmp_path.iterdir()} == {living_folder.name, Path(own).name}
    lives.communicate("")
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_dead_owner_s_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hf_triton_doors_without_a_lock").mkdir()
    (tmp_path / "hf_triton_file").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / OWNER).touch()
    (tmp_path / "hf_triton_link").symlink_to(other)
    (tmp_path / "hf_triton_linked_lock").mkdir()
    (tmp_path / "hf_triton_linked_lock" / OWNER).symlink_to(other / OWNER)
    before = sorted(tmp_path.rglob("*"))
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    abandoned = tmp_path / "hf_triton_gateway_x"
    abandoned.mkdir()
    (abandoned / OWNER).touch()
    own = os.geteuid()
    monkeypatch.setattr(scratch.os, "geteuid", lambda: own + 1)
    remove_abandoned(tmp_path)
    assert abandoned.exists(), "it is another user's"
    monkeypatch.undo()
    remove_abandoned(tmp_path)
    assert not abandoned.exists()


def test_a_root_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    remove_abandoned(tmp_path / "nothing")
