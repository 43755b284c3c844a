# SPDX-License-Identifier: Apache-2.0
"""Whether the library reads a grammar in time: tried in a process of its own, as nothing stops it once it has begun.

Its limits count steps of the finished expression. Making that is not counted, and takes minutes for some: fifty
patterns that all must hold, in a schema of a thousand characters. Knows no tokenizer: what takes long does with any.
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

from hf_triton.server import die_with_parent

MAX_TRIAL_S: Final = 3
"""Of a processor's time, whole seconds: what else runs on the machine does not count."""
MAX_WAIT_S: Final = 60.0
"""Of any time."""
RETRY_S: Final = 30.0
"""After which it is tried again to start a process."""


class GrammarTrial:
    """Tries one grammar after the other; the process starts with the first, and anew after one that took too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._retries_at_s = 0.0  # by `time.monotonic()`

    def is_quick(self, kind: str, text: str) -> bool:
        """Whether a grammar is read, or refused, within `MAX_TRIAL_S`.

        Args:
            kind: `Grammar.kind`.
            text: `Grammar.text`.

        Raises:
            OSError: No grammar can be tried now; `TimeoutError` is one.
        """
        with self._lock:
            answer = self._ask(kind, text)
            if answer is None:  # it had ended: by this grammar, or before
                answer = self._ask(kind, text)
            return answer is not None and answer

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _ask(self, kind: str, text: str) -> bool | None:
        """Whether the process answers in time; None where it has ended."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            process.stdin.flush()
            answer = _answers(process)
        except BrokenPipeError:
            answer = None
        if not answer:
            self._stop()
        return False if process.returncode == -signal.SIGXCPU else answer

    def _start(self) -> subprocess.Popen[bytes]:
        if time.monotonic() < self._retries_at_s:
            raise TimeoutError
        try:
            return _start()
        except OSError:
            self._retries_at_s = time.monotonic() + RETRY_S
            raise

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


def _start() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_triton.grammar.compiler"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if not _answers(process):
        _kill(process)
        raise TimeoutError
    return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what it has not read
            pipe.close()


def _answers(process: subprocess.Popen[bytes]) -> bool | None:
    """Whether the process says within `MAX_WAIT_S` that it is done; None where it ends."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    if not select.select([descriptor], [], [], MAX_WAIT_S)[0]:
        return False
    return True if os.read(descriptor, 1) else None


def answer_trials(try_out: Callable[[str, str], None]) -> None:
    """What the process does: try the grammars of the standard input, a line each, and answer each with a dot."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # to be ended by SIGXCPU is nothing to keep an image of
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    os.write(1, b".")
    for line in sys.stdin.buffer:
        # Nothing of ours runs while the library reads: the kernel ends the process, by SIGXCPU.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + MAX_TRIAL_S, most_s))
        try_out(*json.loads(line))
        os.write(1, b".")
