# SPDX-License-Identifier: Apache-2.0
"""What measures a GPU runs on a CPU to its end, on little; its tables are those of its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.tables import NOTHING, READER, RESULTS, document, goals, read, tables
from tests.support.paths import ROOT

RUN = ROOT / "benchmarks" / "gpu" / "run.sh"
RECORDS = (
    {"part": "machine", "card": "Card", "torch": "2.13.0"},
    {"part": "engine", "model": "llama-3-8b", "name": "decode", "load": "1 x 512", "tokens_per_s": 146.04},
    {"part": "engine", "model": "llama-3-8b", "name": "start, warm", "start_s": 15.1},
    {"part": "engine", "model": "llama-3-8b", "name": "mix", "load": "64 in flight", "failed": "OutOfMemoryError"},
)


def run(out: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable}
    return subprocess.run([RUN, "--small"], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_every_part_runs_and_says_what_a_cpu_leaves_out(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert found.returncode == 0, found.stdout[-3000:]
    records = read(tmp_path / "figures.jsonl")
    assert [each for each in records if "failed" in each] == []
    parts = {
        "machine",
        "engine",
        "captured",
        "served",
        "attention",
        "equality",
        "encoder",
        "sampling",
        "peers",
        "ranks",
    }
    assert {each["part"] for each in records} == {*parts, "run"}
    assert all(each["equal"] == each["of"] for each in records if "equal" in each and each["load"] == "float32")
    skipped = {(each["part"], each["name"]) for each in records if "skipped" in each}
    assert {("attention", "sweep"), ("engine", "profile"), ("peers", "paged"), ("peers", "compiled")} <= skipped
    mixes = {each["name"]: each for each in records if each["part"] == "engine" and "held_over_live" in each}
    assert set(mixes) == {"mix", "mix, grammar", "mix, prefixes", "equal"}
    assert mixes["mix, prefixes"]["reused_tokens"] > 0
    assert mixes["mix"]["steady_tokens_per_s"] > 0
    assert mixes["mix"]["tail_s"] > 0
    assert "steady_tokens_per_s" not in mixes["equal"], "all are sent at once"
    [machine] = [each for each in records if each["part"] == "machine"]
    assert {"torch", "triton"} <= machine["locked"].keys(), "a device has its own"
    ways = {each["name"]: each for each in records if each["part"] == "served" and each["load"].startswith("4 x")}
    assert set(ways) == {"engine", "generate", "completions", "streams"}
    assert all(each["of_engine"] > 0 for name, each in ways.items() if name != "engine")
    assert ways["streams"]["ttft_p50_ms"] > 0
    assert "| tiny | decode, drawn | 2 x 16 |" in found.stdout


CAPTURED = """
import sys
sys.path.insert(0, "benchmarks/gpu")
from argparse import Namespace
from pathlib import Path
import captured, peft, torch  # peft looks at the device, which is simulated later
from tests.support.simulated_gpu import simulated_gpus

captured.SIZES, captured.WIDTH, captured.NUM_NEW = {"llama": {}}, {}, 4
with simulated_gpus(1):
    captured.main(Namespace(out=Path(sys.argv[1]), device=torch.device("cuda")))
"""


@pytest.mark.full
def test_captured_steps_are_counted_on_a_simulated_device(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CAPTURED, tmp_path],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    llama, adapted = read(tmp_path / "figures.jsonl")
    assert llama["graphs"] > 0
    assert 0 < llama["replays"] <= llama["steps"]
    assert llama["eager_because"] is None
    assert (adapted["replays"] > 0) == (adapted["eager_because"] is None)


FAILING = """
import sys
sys.path.insert(0, "benchmarks/gpu")
import run

def fail(options):
    raise RuntimeError("no memory")

def note(options):
    run.figures.Figures("noted", options.out).add(left_s=options.left_s)

run.LARGE_TASKS = {}
run.figures.check_options = lambda parser, options: options
run.TASKS = [run.Task("fails", 1, fail), run.Task("long", 600, note), run.Task("short", 1, note)]
sys.exit(run.main())
"""


@pytest.mark.full
def test_a_task_that_fails_or_needs_too_long_stops_no_other_and_a_second_call_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING, "--out", str(tmp_path), "--deadline", "100"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 1
    records = read(tmp_path / "figures.jsonl")
    assert [(each["part"], each.get("name")) for each in records] == [
        ("run", "fails"), ("run", "long"), ("noted", None), ("run", "short")
    ]  # fmt: skip
    assert records[0]["failed"] == "RuntimeError: no memory"
    assert records[1]["skipped"].endswith(" s are left of 600")
    command[-1] = "700"
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert [each.get("name") for each in read(tmp_path / "figures.jsonl")[4:]] == ["fails", None, "long"]


def test_tables_have_the_figures_and_what_failed() -> None:
    text = tables(RECORDS)
    assert text.startswith("**Card**: torch 2.13.0.")
    assert "| model | name | load | tokens per s |\n|---|---|---|---|\n| llama-3-8b | decode | 1 x 512 | 146 |" in text
    assert "* failed: engine llama-3-8b mix 64 in flight: OutOfMemoryError" in text


def test_goals_are_reached_missed_or_not_measured() -> None:
    lines = goals(RECORDS).splitlines()
    assert "reached: engine llama-3-8b decode 1 x 512 tokens_per_s >= 145: 146" in lines
    assert "MISSED: engine llama-3-8b start, warm start_s <= 15: 15.1" in lines
    assert sum(line.startswith("not measured") for line in lines) == len(lines) - 2


def test_a_document_has_rows_of_the_last_run_that_has_them_and_no_run_that_failed(tmp_path: Path) -> None:
    assert document(tmp_path) == NOTHING
    decode = {"part": "engine", "model": "llama-3-8b", "name": "decode", "load": "64 x 1024", "tokens_per_s": 1352.5}
    wide = {**decode, "load": "256 x 512", "tokens_per_s": 7}
    rows = {**decode, "part": "peers", "name": "rows", "tokens_per_s": 1922.2}
    equal = {"part": "equality", "model": "llama", "load": "float32", "equal": 24, "of": 24}
    for name, records in (
        (
            "2027-01-31-card",
            [{"part": "machine", "card": "Card", "date": "2027-01-31"}, {**decode, "tokens_per_s": 1}, wide],
        ),
        ("2027-02-01-card", [{"part": "machine", "card": "Card", "date": "2027-02-01"}, decode, rows]),
        (
            "2027-02-01-card-2",
            [
                {"part": "machine", "card": "Card", "date": "2027-02-01"},
                equal,
                {**equal, "name": "auto"},
                {"part": "run", "name": "tests", "failed": "exit status 2"},
            ],
        ),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    text = document(tmp_path)
    assert text.startswith("* **Card, 2027-02-01**: ")
    assert text.count("\n| ") == len(READER) + 2
    assert "|  | 64 of 1,024 | Card, 2027-02-01 | 1,352 | 0.70 | - |" in text
    assert "|  | 256 of 512 | Card, 2027-01-31 | 7 | - | - |" in text
    assert "| float32 48 of 48 | Card, 2027-02-01 |" in text
    assert "failed" not in text


def test_no_document_claims_a_run_that_is_not_on_file() -> None:
    records = [each for path in sorted(RESULTS.glob("*.jsonl")) for each in read(path)]
    failed = any(each.get("name") == "tests" and "failed" in each for each in records)
    passed = any(each.get("part") == "tests" and each.get("failures") == 0 for each in records)
    assert failed
    assert not passed, "README and docs/performance.md say that no run of tests/gpu that passed is on file"
    for name in ("README.md", "docs/performance.md"):
        assert "No run in which `tests/gpu` passed is on file" in (ROOT / name).read_text(encoding="utf-8")
