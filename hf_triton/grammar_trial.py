# SPDX-License-Identifier: Apache-2.0
"""Whether the library reads a grammar in time: tried in a process of its own, as nothing stops it once it has begun.

Its limits count steps of the finished expression. Making that is not counted, and takes minutes for some: fifty
patterns that all must hold, in a schema of a thousand characters. Knows no tokenizer: what takes long does with any.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

from hf_triton.child import die_with_parent
from hf_triton.errors import where

logger = logging.getLogger(__name__)

MAX_TRIAL_S: Final = 3.0
MAX_START_S: Final = 60.0


class GrammarTrial:
    """Tries one grammar after the other; the process starts with the first, and anew after one that took too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def is_quick(self, kind: str, text: str) -> bool:
        """Whether a grammar is read, or refused, within `MAX_TRIAL_S`; so it is taken to be where none can be tried.

        Args:
            kind: `Grammar.kind`.
            text: `Grammar.text`.
        """
        with self._lock:
            try:
                answer = self._ask(kind, text)
                if answer is None:  # it had ended: by this grammar, or before
                    answer = self._ask(kind, text)
            except (OSError, TimeoutError) as error:
                logger.warning("grammars are read without a trial: %s", where(error))
                return True
            return answer is not None and answer

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _ask(self, kind: str, text: str) -> bool | None:
        """Whether the process answers in time; None where it has ended."""
        process = self._process = self._process or _start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            process.stdin.flush()
            answer = _answers(process, MAX_TRIAL_S)
        except BrokenPipeError:
            answer = None
        if not answer:
            self._stop()
        return answer

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


def _start() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_triton.grammar"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if not _answers(process, MAX_START_S):
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


def _answers(process: subprocess.Popen[bytes], timeout_s: float) -> bool | None:
    """Whether the process says that it is done in time; None where it ends."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return False
    return True if os.read(descriptor, 1) else None


def answer_trials(try_out: Callable[[str, str], None]) -> None:
    """What the process does: try the grammars of the standard input, a line each, and answer each with a dot."""
    die_with_parent()
    os.write(1, b".")
    for line in sys.stdin.buffer:
        try_out(*json.loads(line))
        os.write(1, b".")
