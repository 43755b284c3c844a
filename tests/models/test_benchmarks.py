# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run to their end, on little."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.errors import HfTritonError
from hf_triton.runner.cpu import linear_kernel

FOLDER = Path(__file__).parents[2] / "benchmarks"


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
def test_a_failed_request_is_no_figure(benchmark: ModuleType) -> None:
    engine = ContinuousBatchingEngine(benchmark.build_model(), EngineOptions(max_num_seqs=2, max_cache_tokens=128))
    try:
        with pytest.raises(HfTritonError, match="max_cache_tokens"):
            benchmark.run_requests(engine, [([1, 2, 3], 4), ([1] * 300, 4)], 2)
    finally:
        engine.close()


def run(benchmark: ModuleType, arguments: str) -> str:
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(benchmark.main, arguments.split(), catch_exceptions=False).stdout
    finally:
        torch.set_num_threads(threads)


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["encoder"], indirect=True)
def test_encoders_are_measured_beside_padding(benchmark: ModuleType) -> None:
    output = run(benchmark, "--rounds 1 --requests 64")
    assert re.search(r"64 clients +as they come +[\d.]+ +[\d.]+", output)
    assert re.search(r"128 texts +engine +[\d.]+ +1.00", output)


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["apart"], indirect=True)
def test_tokenizer_apart_is_measured_beside_one_folder(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CASES", {"alone ms": benchmark.alone})
    assert re.search(r"alone ms +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+-[\d.]+", run(benchmark, "--rounds 2"))


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["hybrid"], indirect=True)
def test_hybrid_models_are_measured_in_both_engines(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "MODELS", dict(list(benchmark.MODELS.items())[:1]))
    lines = run(benchmark, "--rounds 1 --requests 2").splitlines()
    assert len(lines) == 1 + len(benchmark.MODELS)
    for line in lines[1:]:
        batch, continuous, ratio = map(float, line.split()[-3:])
        assert continuous / batch == pytest.approx(ratio, abs=0.1)


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["agents"], indirect=True)
def test_agents_are_measured_with_what_they_share(benchmark: ModuleType) -> None:
    lines = run(benchmark, "--small --agents 2").splitlines()
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
@pytest.mark.parametrize("benchmark", ["linear"], indirect=True)
def test_the_benchmark_of_linear_layers_has_all_ways(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if linear_kernel.can_run(torch.float32) and linear_kernel.can_run(torch.bfloat16):
        monkeypatch.setattr(benchmark, "NUM_BYTES", 1e6)
        monkeypatch.setattr(benchmark, "TOLERANCE", float("inf"))
        run = CliRunner().invoke(benchmark.main, ["--rounds", "1"], catch_exceptions=False)
        ratios = [float(line.split()[-3]) for line in run.stdout.splitlines()[1:]]
        assert len(ratios) == 2 * len(benchmark.SHAPES) * len(benchmark.COUNTS)
        assert min(ratios) > 0


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["paged_attention"], indirect=True)
def test_the_attention_benchmark_has_all_ways(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LOADS", ((2, 70),))
    monkeypatch.setattr(benchmark, "DTYPES", (torch.float32,))
    monkeypatch.setattr(benchmark, "CACHES_BYTES", 1)
    assert re.search(r"float32 2 x 70( +[\d.]+){3}$", run(benchmark, "--repetitions 2"), re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["python_calls"], indirect=True)
def test_calls_of_a_step_are_counted_beside_a_busy_model(benchmark: ModuleType) -> None:
    head, *rows, totals = (re.split(r" {2,}", line) for line in run(benchmark, "").splitlines())
    assert head == ["calls per step", "two layers", "eight layers", "busy neighbour"]
    assert float(totals[1]) < 150  # 119, and what is looked at by time
    for column in (1, 2, 3):
        counts = [float(row[column]) for row in rows]
        assert float(totals[column]) == pytest.approx(sum(counts), abs=0.1 * len(counts))
        assert sum(counts) > 0
