# SPDX-License-Identifier: Apache-2.0
"""What `hf-triton serve` reads in Triton's log, and the one line a model that it makes of it."""

import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import click
import pytest

from hf_triton.server import describe_log
from hf_triton_cli.serving.board import Board
from hf_triton_cli.serving.model_states import ModelStates
from hf_triton_cli.serving.server_log import Event, ServerLog, parse_line

HEAD = 'I1127 06:35:10.776028 22625 model_lifecycle.cc:777] "{}"'
FAILED = (
    r"failed to load 'm' version 1: Internal: TritonModelException: hub_gated: say \"please\"\n\nAt:\n  /srv/a.py(3)\n"
)
LINES: dict[str, Event | None] = {
    HEAD.format("loading: m:1"): Event("m", "loading"),
    "2026-11-27T06:35:10Z I 22625 model_lifecycle.cc:777] loading: m:12": Event("m", "loading"),
    HEAD.format("successfully loaded 'm'"): Event("m", "ready"),
    HEAD.format("successfully loaded 'm' version 1"): Event("m", "ready"),
    HEAD.format(FAILED): Event("m", "failed", 'hub_gated: say "please"'),
    HEAD.format("successfully unloaded 'm' version 1"): Event("m", "unloaded"),
    HEAD.format("m: loaded: BertModel, float32 on cpu"): Event("m", "told", "BertModel, float32 on cpu"),
    HEAD.format("m: stopping the server: a model's engine has failed"): Event(
        "m", "stopping", "a model's engine has failed"
    ),
    "hf_triton: the process of the model m has died; stopping the server": Event(
        "m", "stopping", "its process has died"
    ),
    HEAD.format("failed to load 'm'"): None,
    "2026-11-27 06:35:41,116 INFO 127.0.0.1 GET '/] successfully loaded 'm'": None,
    "| m | 1 | READY |": None,
    "": None,
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_says_what_happens_to_a_model(line: str) -> None:
    assert parse_line(line) == LINES[line]


def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *parts: str
) -> list[str]:
    """What is printed for a log's lines, failures first: of the first part while the server starts, then afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log, board = ServerLog(), Board()
    states = ModelStates(board, log, ["door"])
    for part in parts:
        with log.path.open("a") as file:
            file.writelines(HEAD.format(line) + "\n" for line in part.split("; "))
        states.update()
        board.close()
    printed = capsys.readouterr()
    return [*printed.err.splitlines(), *printed.out.splitlines()]


LOADED = "loading: m:1; m: loaded: A, 1 GB; successfully loaded 'm'"


def test_a_start_is_two_lines_a_model_without_doors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(tmp_path, monkeypatch, capsys, f"loading: door:1; {LOADED}; successfully loaded 'door'")
    assert lines == ["m: loading", "m: ready in 1 s: A, 1 GB"]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (f"{LOADED}; successfully unloaded 'm' version 1", ["m: ready in 1 s: A, 1 GB"]),
        ("successfully unloaded 'm' version 1", ["m: unloaded"]),
        (
            f"{LOADED}; loading: m:1; successfully unloaded 'm' version 1; successfully loaded 'm'; "
            "successfully unloaded 'm' version 1",
            ["m: ready in 1 s: A, 1 GB"] * 2,
        ),
        (
            "loading: m:1; failed to load 'm' version 1: Internal: x",
            ["m: failed: Internal: x (the former one goes on)"],
        ),
        (
            f"loading: m:1; failed to load 'm' version 1: x; {LOADED}; successfully unloaded 'm' version 1",
            ["m: failed: x (the former one goes on)", "m: ready in 1 s: A, 1 GB"],
        ),
        (
            "m: stopping the server: its engine has failed; successfully unloaded 'm' version 1",
            ["m: failed: its engine has failed; the server stops"],
        ),
    ],
)
def test_a_change_while_serving_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str, lines: list[str]
) -> None:
    start = ["m: loading", "m: ready in 1 s: A, 1 GB"]
    printed = shown(tmp_path, monkeypatch, capsys, LOADED, change)
    for line in start:
        printed.remove(line)
    assert printed == lines


def test_a_large_log_goes_on_in_an_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hf_triton_cli.serving.server_log.MAX_BYTES", 10)
    log = ServerLog()
    with log.path.open("a") as file:
        for name in ("a", "b"):
            file.write(HEAD.format(f"loading: {name}:1") + "\n")
            file.flush()
            assert [event.model for event in log.events()] == [name]
            assert log.path.stat().st_size == 0
    assert "loading: b:1" in Path(f"{log.path}.1").read_text()


def test_a_removed_log_is_said_once_and_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hf_triton_cli.serving.server_log.MAX_BYTES", 10)
    log = ServerLog()
    with log.path.open("a") as file:
        log.path.unlink()
        for name in ("a", "b"):
            file.write(HEAD.format(f"loading: {name}:1") + "\n")
            file.flush()
            assert [event.model for event in log.events()] == [name]
        assert os.fstat(file.fileno()).st_size == 0
    assert capsys.readouterr().err.count("was removed") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_the_former_log_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hf_triton_cli.serving.server_log.MAX_BYTES", 1000)
    log = ServerLog()
    log.path.write_text("x" * 2000 + "\n")
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, former[1]))  # Python ignores SIGXFSZ: writing fails
    try:
        assert list(log.events()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert list(tmp_path.iterdir()) == [log.path]
    assert log.path.stat().st_size == 0


def test_a_reader_that_has_ended_ends_no_printing_program() -> None:
    lines = "".join(f"say('{number}' * 70000);" for number in range(3))
    script = f"import sys; from hf_triton_cli.say import say; {lines} sys.stderr.write('went on')"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"went on"
    assert process.returncode == 0


def test_what_comes_while_a_large_log_is_copied_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hf_triton_cli.serving.server_log.MAX_BYTES", 10)
    log, copy = ServerLog(), shutil.copyfileobj

    def append(name: str) -> None:
        with log.path.open("a") as file:
            file.write(HEAD.format(f"loading: {name}:1") + "\n")

    def copy_slowly(source: IO[bytes], target: IO[bytes]) -> None:
        append("b")
        copy(source, target)

    monkeypatch.setattr("shutil.copyfileobj", copy_slowly)
    append("a")
    assert [event.model for event in log.events()] == ["a", "b"]
    assert list(log.events()) == []


def test_a_live_board_is_drawn_by_its_caller_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    num_threads = threading.active_count()
    with Board(may_be_live=True) as board:
        board.show("m", "loading")
        board.refresh()
        assert "loading, 0 s" in click.unstyle(capsys.readouterr().out)
        board.show("m", "ready", "A")
        assert threading.active_count() == num_threads
    assert "ready in 1 s: A" in click.unstyle(capsys.readouterr().out)


def test_an_error_shows_the_lines_of_a_log_that_tell_something() -> None:
    noise = [
        HEAD.format("x"),
        "+---+",
        "W1126 1 2 metrics.cc:798] DCGM unable to start",
        "Error: Failed to initialize NVML",
    ]
    log = Path("/tmp/a.log")
    assert describe_log("\n".join([*noise, "no memory", *noise]), log) == f"; its log, {log}, says:\nno memory"
    assert describe_log("\n".join(noise), None) == "; its log ends:\n" + "\n".join(noise)
