# SPDX-License-Identifier: Apache-2.0
"""Benchmarks start, and those of the engine run to their end, on little."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.errors import HfTritonError
from hf_triton.testing import build_tiny_checkpoint
from tests.support.reference import load_reference

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "\nif __name__ ==" in path.read_text(encoding="utf-8"))


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The module of the name that a test is parametrized with; they are scripts, and import each other as such."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    return importlib.import_module(request.param)


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["engine"], indirect=True)
def test_the_engine_is_measured_beside_generate_and_a_bare_loop(benchmark: ModuleType) -> None:
    plain, model = benchmark.build_model(), benchmark.build_packed_model()
    requests = benchmark.build_requests()["mixed"][:3]
    figures = benchmark.measure(plain, model, requests, width=2)
    assert 1 < figures["mean rows"] <= 2
    assert min(figures.values()) > 0
    rows = benchmark.table([{"equal 16": figures}, {"equal 16": figures}])
    assert rows["equal 16"]["continuous / bare"] == figures["continuous"] / figures["bare"]


@pytest.mark.parametrize("benchmark", ["engine"], indirect=True)
def test_a_failed_request_is_no_figure(benchmark: ModuleType, tmp_path: Path) -> None:
    model = load_reference(build_tiny_checkpoint(tmp_path, "llama")).model
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=2, max_cache_tokens=128))
    try:
        with pytest.raises(HfTritonError, match="max_cache_tokens"):
            benchmark.run_requests(engine, [([1, 2, 3], 4), ([1] * 200, 4)], 2)
    finally:
        engine.close()


@pytest.mark.parametrize("benchmark", SCRIPTS, indirect=True)
def test_every_benchmark_says_what_it_takes(benchmark: ModuleType) -> None:
    assert "--help" in CliRunner().invoke(benchmark.main, ["--help"], catch_exceptions=False).stdout


def run(name: str, *arguments: str) -> str:
    """A benchmark runs in a process of its own: it sets what belongs to the whole process."""
    command = [sys.executable, FOLDER / f"{name}.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["agents"], indirect=True)
def test_agents_are_measured_with_what_they_share(benchmark: ModuleType) -> None:
    lines = run("agents", "--small", "--agents", "2").splitlines()
    assert len(lines) == 2
    computed, cached, *times_ms = map(float, re.findall(r" ([\d.]+)(?= |$)", lines[0].partition("agents")[2]))
    load = benchmark.SMALL
    assert load.num_added <= computed < load.num_prefix
    assert 50 < cached < 100
    assert len(times_ms) == 4
    assert min(times_ms) > 0
    held, gap = map(float, re.findall(r" ([\d.]+)(?= |$)", lines[1]))
    assert held >= gap > 0


@pytest.mark.full
def test_calls_of_a_step_are_counted_beside_a_busy_model() -> None:
    head, *rows, totals = (re.split(r" {2,}", line) for line in run("python_calls").splitlines())
    assert head == ["calls per step", "two layers", "eight layers", "busy neighbour"]
    assert float(totals[1]) < 170  # 157, and what is looked at by time
    for column in (1, 2, 3):
        counts = [float(row[column]) for row in rows]
        assert float(totals[column]) == pytest.approx(sum(counts), abs=0.1 * len(counts))
        assert sum(counts) > 0
