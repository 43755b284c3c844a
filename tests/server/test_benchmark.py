# SPDX-License-Identifier: Apache-2.0
"""The server benchmark and a short soak run to their end; a lost answer fails the benchmark."""

import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hf_triton.testing import TritonServer

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("server", "engine", "folders", "inside", "lean_client")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which imports others as such."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("server")
    monkeypatch.setattr(found, "NUM_ALONE", 2)
    monkeypatch.setattr(found, "MIN_PIECES", 2)
    return found


@pytest.mark.full
def test_each_endpoint_is_measured_beside_the_engine(benchmark: ModuleType, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    checkpoint = benchmark.save(benchmark.build_small_model(), tmp_path / "checkpoint")
    benchmark.add_folder(repository, "plain", checkpoint)
    decoupled = "model_transaction_policy { decoupled: true }"
    benchmark.add_folder(repository, "streamed", checkpoint, decoupled, stream="true")
    with TritonServer(repository) as server, contextlib.closing(benchmark.LeanClient(server.http_url)) as client:
        figures = benchmark.overhead(benchmark.Ways(client, [[3, 5, 7], [11, 13]] * 4), 8)
        assert all(figures[name] > 0 for name in figures if name != "added alone ms")
        assert figures["stream / server"] == figures["stream / engine"] / figures["server / engine"]


@pytest.mark.full
def test_lost_answer_gives_no_figure(benchmark: ModuleType, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    checkpoint = benchmark.save(benchmark.build_small_model(), tmp_path / "checkpoint")
    benchmark.add_folder(repository, "plain", checkpoint, max_cache_tokens=256, max_output_length=1)
    with TritonServer(repository) as server:

        def post(body: dict[str, object]) -> None:
            with contextlib.closing(benchmark.LeanClient(server.http_url)) as client:
                client.post("/v2/models/plain/generate", [{"text_input": "w1"}, body], 1)

        inside = {"requests": [([3] * 300, 32)], "width": 1}
        for body in (
            {"text_input": "w1 " * 300, "max_new_tokens": 32},
            {"text_input": json.dumps(inside), "id": "inside"},
        ):
            with pytest.raises(benchmark.LostAnswerError, match="memory_exceeded"):
                post(body)


@pytest.mark.full
def test_short_soak() -> None:
    options = ["--requests", "1000", "--samples", "4", "--allowed-kib", str(64 << 10)]
    run = subprocess.run([sys.executable, FOLDER / "soak.py", *options], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.full
def test_encoder_is_measured_beside_its_process() -> None:
    sizes = ["--rounds", "1", "--texts", "2", "--requests", "130", "--seconds", "1"]
    subprocess.run([sys.executable, FOLDER / "encoder_server.py", *sizes], check=True, timeout=240)
