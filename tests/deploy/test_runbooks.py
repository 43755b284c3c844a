# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/runbooks is run: those of a proxy by test_fleet.py, the others here."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_triton.testing import LoopbackHub, build_tiny_checkpoint
from tests.support.paths import ROOT
from tests.support.runbooks import RUNBOOKS, blocks, run_block
from tests.support.serving import running

NAME, OTHER = "acme/text", "acme/other"
IN_TEST_FLEET = {"node-gone": 2, "bad-model": 1, "upgrade": 4, "rollback": 1}
LINES_OF_A_SCREEN = 40
KUBECTL = shutil.which("kubectl")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "llama")


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path) -> Iterator[LoopbackHub]:
    other = build_tiny_checkpoint(tmp_path / "other", "llama", seed=1)  # and another commit
    with LoopbackHub() as hub:
        hub.add(NAME, checkpoint)
        hub.add(OTHER, other)
        yield hub


@pytest.fixture
def small_disk(checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one model and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in checkpoint.iterdir()) * 3 // 2
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_page_is_a_screen() -> None:
    for path in RUNBOOKS.glob("*.md"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_OF_A_SCREEN, path.name


@pytest.mark.full
def test_room_is_made_on_a_full_disk(hub: LoopbackHub, small_disk: Path) -> None:
    look, prune, pull = blocks("disk-full")
    environment = {**hub.environment(), "HF_HUB_CACHE": str(small_disk)}
    run_block(f"hf-triton pull {OTHER}", {}, **environment)
    [ref] = small_disk.glob("models--acme--other/refs/main")
    ref.unlink()  # as when a branch has moved on
    refused = run_block(pull, {}, **environment)
    assert refused.returncode == 1
    assert "disk_full" in refused.stderr
    assert OTHER in run_block(look, {}, **environment).stdout
    assert run_block(prune, {}, **environment).returncode == 0
    pulled = run_block(pull, {}, **environment)
    assert pulled.returncode == 0, pulled.stderr


@pytest.mark.full
def test_a_cache_stands_in_for_the_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    environment = {**hub.environment(), "HF_HUB_CACHE": str(tmp_path / "cache")}
    [block] = blocks("hub-gone")
    pull, serve = block.splitlines()
    refused = run_block(pull, {}, **environment)
    assert "offline_and_not_cached" in refused.stderr
    run_block(pull.removeprefix("HF_HUB_OFFLINE=1 "), {}, **environment)
    hub.fail(status=503, times=1000)
    assert run_block(pull, {}, **environment).returncode == 0
    name = serve.split()[-1]
    for variables in ({"HF_HUB_OFFLINE": "1"}, {}):
        with running(name, "--no-openai", output=tmp_path / "output", **environment, **variables) as serving:
            serving.wait_for("Ctrl+C stops the server")


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl")
@pytest.mark.parametrize("name", ["upgrade", "rollback", "bad-model", "node-gone"])
def test_kubectl_takes_its_commands(name: str) -> None:
    text = re.sub(r"\s+", " ", (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8"))
    commands = re.findall(r"kubectl (?:-n hf-triton )?(?:set|rollout|delete) [\w /=.:-]+?(?=`| kubectl|$)", text)
    assert commands
    for command in commands:
        done = run_block(f"{command.strip()} --server=http://127.0.0.1:1 --request-timeout=1s", {})
        assert "refused" in done.stderr, done.stderr


def test_every_block_is_run() -> None:
    for path in RUNBOOKS.glob("*.md"):
        others = [block for block in blocks(path.stem) if not block.startswith("kubectl")]
        expected = IN_TEST_FLEET.get(path.stem, {"disk-full": 3, "hub-gone": 1}.get(path.stem))
        assert len(others) == expected, path.name
    assert (ROOT / "deploy" / "haproxy" / "server.sh").stat().st_mode & 0o111
