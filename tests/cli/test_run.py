# SPDX-License-Identifier: Apache-2.0
"""`hf-triton run`: one model served and talked to in one terminal."""

from pathlib import Path

import pytest

from tests.support.commands import Terminal, hf_triton
from tests.support.serving import descendants, wait_until_gone


def test_a_prompt_is_answered_and_nothing_is_left(tmp_path: Path) -> None:
    done = hf_triton("run", "demo", "How can you be", "--max-tokens=8", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == "Loading demo ...\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("end", ["/bye\n", "\x03"])
def test_a_terminal_talks_and_the_end_stops_the_server(end: str) -> None:
    with Terminal("run") as terminal:
        terminal.wait_for("/help lists commands.")
        terminal.wait_for(">>> ")
        family = descendants(terminal.process.pid)
        terminal.type("Hello\n/stats\n")
        terminal.wait_for(" tokens/s")
        terminal.wait_for(">>> ")
        terminal.type(end)
        if end == "\x03":
            terminal.wait_for("Ctrl+C again, or /bye, ends.")
            terminal.type(end)
        assert terminal.wait() == 0
    wait_until_gone(family)
    assert "I1" not in terminal.output  # of Triton's log


@pytest.mark.full
def test_a_folder_that_fails_is_one_sentence(tmp_path: Path) -> None:
    assert hf_triton("new", "broken", "--model=/nowhere/at/all", f"--into={tmp_path}").returncode == 0
    done = hf_triton("run", str(tmp_path / "broken"))
    assert done.returncode == 1
    _, line = done.stderr.splitlines()
    assert line.startswith("error: server_failed: broken cannot be served: path_not_found: there is no folder ")
