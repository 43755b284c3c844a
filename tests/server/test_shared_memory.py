# SPDX-License-Identifier: Apache-2.0
"""Requests free the shared memory between Triton and the stub early; containers have little of it."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import generate
from tests.support.paths import ROOT

pytestmark = pytest.mark.full

MIB = 2**20
NUM_REQUESTS = 24
WAITING = """

    def build_prompt(self, text):
        while not (pathlib.Path(__file__).parent / "go").exists():
            time.sleep(0.01)
        return "x"
"""


def shared_bytes(server: TritonServer) -> int:
    """What the server and its processes have taken of /dev/shm."""
    files = Path("/dev/shm").glob(f"hf_triton_{os.getpid()}_{server.http_port}*")
    return sum(file.stat().st_blocks * 512 for file in files)


def num_in_flight(server: TritonServer) -> int:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        found = re.search(r"^hf_triton_requests_in_flight\{.*\} (\d+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.fixture
def folder(tmp_path: Path, make_folder: Callable[..., Path]) -> Path:
    checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", "falcon")
    folder = make_folder(tmp_path / "models", "waiting", huggingface_model=checkpoint, max_prompt_bytes=2 * MIB)
    model = folder / "1" / "model.py"
    model.write_text("import pathlib\nimport time\n" + model.read_text() + WAITING)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[TritonServer]:
    with TritonServer(folder.parent) as server:
        yield server


def test_requests_that_wait_hold_none_of_it(server: TritonServer, folder: Path) -> None:
    assert server.is_model_ready("waiting"), server.log_tail()
    before = shared_bytes(server)
    assert before > 0
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        replies = [pool.submit(generate, server, "waiting", "y" * MIB, max_new_tokens=1) for _ in range(NUM_REQUESTS)]
        deadline_s = time.monotonic() + 60
        while num_in_flight(server) < NUM_REQUESTS:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        taken = shared_bytes(server) - before
        (folder / "1" / "go").touch()
        assert [reply.result().status for reply in replies] == [200] * NUM_REQUESTS
    assert taken < NUM_REQUESTS // 4 * MIB


MANY = 500


@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm")
@pytest.mark.parametrize(("size_mib", "is_filled"), [(16, False), (30, True)])
def test_leaving_clients_end_no_server(tmp_path: Path, size_mib: int, is_filled: bool) -> None:
    """Triton 24.10 dies of a final response in two sends whose client has cancelled."""
    mount = f"mount -t tmpfs -o size={size_mib}m tmpfs /dev/shm"
    module = [sys.executable, "-m", "tests.support.leaving_clients", str(tmp_path), str(MANY), str(int(is_filled))]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["lives"], seen["log"]
    assert seen["unanswered"] == 0
    assert seen["left"] > 0
    assert set(seen["statuses"]) <= {"200", "400", "200 out_of_memory", "503 out_of_memory"}
    assert "could not be sent" not in seen["log"]
    assert re.search(r"/dev/shm has \d+ MiB free, and what does not fit is refused", seen["log"])
