# SPDX-License-Identifier: Apache-2.0
"""`hf-triton bench` with the real AIPerf, which `make test-clients` installs."""

import json
import os
from pathlib import Path

import pytest

from hf_triton.testing import TritonServer
from tests.support.clients import CLIENTS, has
from tests.support.commands import hf_triton
from tests.support.gateway import add_demo

pytestmark = pytest.mark.full


def test_bench_reports_each_concurrency_of_a_restricted_server(tmp_path: Path) -> None:
    aiperf = has(CLIENTS / "aiperf" / "bin" / "aiperf")
    add_demo(tmp_path / "repository")
    shape = ["--prompt-tokens=20", "--output-tokens=8", "--requests=6", "--concurrency=1,3"]
    restricted = "--grpc-restricted-protocol=inference,model-config:secret=open"
    with TritonServer(tmp_path / "repository", arguments=[restricted]) as server:
        path = os.pathsep.join([str(aiperf.parent), os.environ["PATH"]])
        options = [f"--triton={server.grpc_url}", "--header=triton-grpc-protocol-secret:open"]
        options += [f"--out={tmp_path / 'out'}", "--json"]
        done = hf_triton("bench", "demo", *shape, *options, PATH=path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["concurrency"] for row in rows] == [1, 3]
    assert all(row["tokens/s"] > row["requests/s"] > 0 and row["TTFT p50 ms"] > 0 for row in rows)
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == rows


def test_a_missing_aiperf_is_named_with_its_installation() -> None:
    done = hf_triton("bench", "demo", PATH="/usr/bin:/bin")
    assert done.returncode == 1
    assert "pipx install aiperf==" in done.stderr
