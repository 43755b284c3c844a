# SPDX-License-Identifier: Apache-2.0
"""Compiles untrusted grammars in a child process with a CPU limit, to learn which ones take too long.

llguidance's limits count steps of the finished automaton. Building it is not counted and cannot be interrupted, and
takes minutes for some: fifty patterns in one `allOf`, in a schema of a thousand characters. The tokenizer does not
matter for this, so the child uses one of bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from llguidance import LLTokenizer

from hf_triton.errors import RequestError, panics_as_errors
from hf_triton.grammar.matcher import build_matcher
from hf_triton.protocol.structured_output import Grammar

MAX_CPU_S: Final = 3
"""CPU time of one grammar, whole seconds: other load on the machine does not count."""
MAX_WAIT_S: Final = 60.0
"""Wall time of one grammar, or of the child's start."""
RETRY_S: Final = 30.0
"""Time from a failed start of the child to the next attempt."""


class GrammarSandbox:
    """Compiles one grammar after the other in a child process, restarted after a grammar that exceeds the limits."""

    def __init__(self, executable: str = sys.executable, clock: Callable[[], float] = time.monotonic) -> None:
        self._executable = executable
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._retry_at_s = -math.inf

    @property
    def pid(self) -> int | None:
        """The child's process id; None before the first grammar and after `close`."""
        return None if self._process is None else self._process.pid

    def compiles_in_time(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled or rejected within `MAX_CPU_S`.

        Raises:
            OSError: The child cannot be started; `TimeoutError` if it was tried less than `RETRY_S` ago.
        """
        with self._lock:
            is_in_time = self._compile(grammar)
            if is_in_time is None:  # the child had ended before, or by this grammar
                is_in_time = self._compile(grammar)
            return is_in_time is True

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _compile(self, grammar: Grammar) -> bool | None:
        """Whether the child answers in time; None if it has ended."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([grammar.kind, grammar.text]).encode() + b"\n")
            process.stdin.flush()
            answer = _answers(process)
        except BrokenPipeError:
            answer = None
        if not answer:
            self._stop()
        return False if process.returncode == -signal.SIGXCPU else answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._clock() < self._retry_at_s:
            raise TimeoutError
        try:
            process = subprocess.Popen(
                [self._executable, "-P", "-m", "hf_triton.grammar.sandbox"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            if not _answers(process):
                _kill(process)
                raise TimeoutError
        except OSError:
            self._retry_at_s = self._clock() + RETRY_S
            raise
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # unread input
            pipe.close()


def _answers(process: subprocess.Popen[bytes]) -> bool | None:
    """Whether the child writes its byte within `MAX_WAIT_S`; None if it ends."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    if not select.select([descriptor], [], [], MAX_WAIT_S)[0]:
        return False
    return True if os.read(descriptor, 1) else None


def main() -> None:
    """The child: compile the grammars on standard input, one a line, and answer each with a byte."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGXCPU would dump core
    _, hard_limit_s = resource.getrlimit(resource.RLIMIT_CPU)
    tokenizer = LLTokenizer("byte")
    os.write(1, b".")
    for line in sys.stdin.buffer:  # ends with the parent
        kind, text = json.loads(line)
        # No Python code runs while the library compiles: the kernel ends the process by SIGXCPU.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + MAX_CPU_S, hard_limit_s))
        with contextlib.suppress(RequestError), panics_as_errors():  # a wrong grammar is refused by the parent
            build_matcher(tokenizer, Grammar(kind, text, ""))
        os.write(1, b".")


if __name__ == "__main__":
    main()
