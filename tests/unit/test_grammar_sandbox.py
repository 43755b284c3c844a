# SPDX-License-Identifier: Apache-2.0
"""Untrusted grammars are compiled in a child process first."""

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from hf_triton.grammar.compiler import NUM_GRAMMARS_KEPT
from hf_triton.grammar.sandbox import MAX_CPU_S, RETRY_S, GrammarSandbox
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from tests.support.folders import shadow_modules
from tests.support.grammars import KIND, build_compiler, check_completions, json_schema, lark, regex, rejection

HOSTILE = json_schema({"allOf": [{"pattern": f".*{number:x}"} for number in range(50)]})
"""A thousand characters that take the library minutes."""


@pytest.mark.full
def test_grammar_that_takes_minutes_is_refused_and_the_next_one_compiled() -> None:
    start_s = time.monotonic()
    assert "takes more than 3 s of a processor" in rejection(HOSTILE)
    assert time.monotonic() - start_s < 60
    check_completions(regex("[ab]{3}"), re.compile("[ab]{3}").fullmatch)


def test_child_that_has_ended_is_started_again() -> None:
    sandbox = GrammarSandbox()
    assert sandbox.compiles_in_time(regex("a"))
    first = sandbox.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert sandbox.compiles_in_time(lark("wrong grammars are refused elsewhere"))
    second = sandbox.pid
    assert second not in (None, first)
    sandbox.close()
    assert sandbox.pid is None
    assert second is not None
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_child_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    sandbox = GrammarSandbox()
    assert sandbox.compiles_in_time(regex("a"))
    sandbox.close()


def test_child_ends_with_the_input_of_its_parent() -> None:
    """As it does if the parent is killed."""
    sandbox = GrammarSandbox()
    assert sandbox.compiles_in_time(regex("a"))
    process = sandbox._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0
    sandbox.close()


@pytest.mark.full
def test_load_on_the_machine_is_not_counted() -> None:
    sandbox = GrammarSandbox()
    assert sandbox.compiles_in_time(regex("a"))
    pid = sandbox.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    resume = threading.Timer(MAX_CPU_S + 1, os.kill, [pid, signal.SIGCONT])
    resume.start()
    assert sandbox.compiles_in_time(regex("b"))
    resume.join()
    assert sandbox.pid == pid
    sandbox.close()


class CountingSandbox(GrammarSandbox):
    def __init__(self, executable: str) -> None:
        super().__init__(executable)
        self.grammars: list[Grammar] = []

    def compiles_in_time(self, grammar: Grammar) -> bool:
        self.grammars.append(grammar)
        return super().compiles_in_time(grammar)


def test_grammars_are_compiled_without_a_sandbox_that_cannot_start(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = CountingSandbox("/nowhere")
    compiler = build_compiler(sandbox=sandbox)
    with caplog.at_level(logging.WARNING):
        compiler.compile(regex("secret[ab]"), SamplingParams(20))
    assert "FileNotFoundError" in caplog.text
    assert "secret" not in caplog.text


def test_compiled_grammar_is_not_tried_again() -> None:
    sandbox = CountingSandbox("/nowhere")
    compiler = build_compiler(sandbox=sandbox)
    for _ in range(2):
        compiler.compile(regex("a[bc]"), SamplingParams(20))
    assert sandbox.grammars == [regex("a[bc]")]


def test_failed_start_is_not_repeated_for_each_grammar() -> None:
    now_s = 1000.0
    sandbox = GrammarSandbox("/nowhere", lambda: now_s)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            sandbox.compiles_in_time(regex("a"))
        with pytest.raises(TimeoutError):
            sandbox.compiles_in_time(regex("a"))
        now_s += RETRY_S


def test_recent_grammars_are_known() -> None:
    compiler, params = build_compiler(KIND), SamplingParams(20)
    grammars = [regex(f"a{number}") for number in range(NUM_GRAMMARS_KEPT + 1)]
    assert not compiler.knows(grammars[0])
    for grammar in (*grammars[:-1], grammars[0], grammars[-1]):
        compiler.compile(grammar, params)
    assert [compiler.knows(grammar) for grammar in grammars] == [True, False, *[True] * (len(grammars) - 2)]
