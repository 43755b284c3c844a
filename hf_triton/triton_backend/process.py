# SPDX-License-Identifier: Apache-2.0
"""The process of a model: encoding, log lines, and its end together with the server's."""

from __future__ import annotations

import contextlib
import gc
import io
import locale
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Final

import triton_python_backend_utils as pb_utils

from hf_triton.errors import OneLineFormatter
from hf_triton.model_process import STARTED_IN, scarce_shared_memory

logger = logging.getLogger(__name__)

SERVER_POLL_S: Final = 1.0
WAITS_FOR_EXIT: Final = "do_wait"
"""Linux's function, as /proc names it, in which a thread sleeps that waits for a process to exit."""


@contextlib.contextmanager
def loading_process(model_name: str) -> Iterator[None]:
    """Set up the process of a model: UTF-8, log lines to the server's log, an end with the server.

    Triton 24.10 gives up a process that has stood still for a second or two while it loads (a throttled processor, a
    paused machine), without a word, and then waits until it exits: for ever, as it serves well. While the block runs,
    and once at its end, the process looks whether that has happened, and ends itself if so; Triton then reports the
    load as failed.
    """
    use_started_folder()
    _use_utf8()
    watch = _Watch(model_name)
    watch.start()
    _send_logs_to_triton(model_name)
    if scarce := scarce_shared_memory():
        logger.warning("%s", scarce)
    try:
        yield
        watch.end_if_given_up()
    finally:
        watch.is_loading = False  # from here on Triton may wait for this process's exit with good reason


class _Watch(threading.Thread):
    """Ends this process with its server, or if its server has given it up while it loads.

    A stub whose server was killed can live on, and keep its GPU memory.
    """

    def __init__(self, model_name: str) -> None:
        super().__init__(name="hf_triton-server-watch", daemon=True)
        self.is_loading = True
        self._model_name = model_name
        self._server = os.getppid()

    def run(self) -> None:
        while os.getppid() == self._server:
            if self.is_loading:
                self.end_if_given_up()
            time.sleep(SERVER_POLL_S)
        os._exit(1)

    def end_if_given_up(self) -> None:
        if not self._is_given_up() or not self.is_loading:
            return
        message = f"the process of the model {self._model_name} stood still while it loaded, and Triton has given it up"
        print(f"hf_triton: {message}; ending it: load the model again", file=sys.stderr, flush=True)
        os._exit(1)

    def _is_given_up(self) -> bool:
        """Whether the server's thread that started this process, and loads its model, waits for its exit.

        False where /proc does not tell, as in gVisor.
        """
        own = str(os.getpid())
        for thread in Path(f"/proc/{self._server}/task").glob("*"):
            with contextlib.suppress(OSError):  # the thread has ended, or /proc has no such files
                if own in (thread / "children").read_text().split():
                    return (thread / "wchan").read_text() == WAITS_FOR_EXIT
        return False


SENTINEL: Final = """
read -r word && exit
grep -qs "^State:.Z" "/proc/$1/status" && exit
kill -TERM "$1" 2>/dev/null || exit
echo "hf_triton: the process of the model $2 has died; stopping the server" >&2
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 "$1" 2>/dev/null || exit; done
kill -KILL "$1"
"""
"""A shell that waits for a word. If the pipe closes without one, it ends the server $1, by force after 10 s.

A server that has died itself is left alone: the log's last lines would blame a model.
"""


class Sentinel:
    """Ends the server when this process dies, killed from outside or for its memory.

    Triton does not restart it, stays ready, and never answers its requests in flight.
    """

    def __init__(self, model_name: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", SENTINEL, "hf_triton-sentinel", str(os.getppid()), model_name], stdin=subprocess.PIPE
        )

    def dismiss(self) -> None:
        """Stop watching: this process is about to exit in good order."""
        with contextlib.suppress(OSError):  # it has ended before
            self._shell.communicate(b"word\n")


def stop_server() -> None:
    """Ask the server to finish its requests and exit, so that its supervisor starts a fresh one.

    A stub that died is never replaced, and its model stays ready on servers before 26.01: lingering would be worse.
    """
    logger.error("stopping the server: a model's engine has failed")
    os.kill(os.getppid(), signal.SIGTERM)


def freeze_objects() -> None:
    """Exempt the objects of a loaded model from garbage collection.

    Torch, transformers and a model are half a million objects. The collector would scan them every ten seconds or so of
    load, for 0.3 s in which no other thread runs; and at exit, which crashes Triton 24.10's stub.
    """
    gc.collect()
    gc.freeze()


def use_started_folder() -> None:
    """Go back to the server's current folder, and import nothing from it any more, as Triton's Python does first."""
    sys.path[:] = filter(None, sys.path)
    with contextlib.suppress(OSError):  # it is gone
        os.chdir(os.environ.pop(STARTED_IN, "."))


def _use_utf8() -> None:
    """Make UTF-8 the encoding of files and output, and flush output line by line.

    Triton starts its Python in ASCII, whatever the locale is, and would show a folder's own output at its exit.
    """
    with contextlib.suppress(locale.Error):  # a system without it keeps its own
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _call(log: Callable[[str], None], text: str) -> None:
    log(text)


class TritonLogHandler(logging.Handler):
    """Sends log records to the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.levelno >= logging.ERROR:
                log = pb_utils.Logger.log_error
            elif record.levelno >= logging.WARNING:
                log = pb_utils.Logger.log_warn
            else:
                log = pb_utils.Logger.log_info
            # Triton writes file and line of its caller: those of the record, not of this handler.
            code = _call.__code__.replace(co_filename=record.filename, co_firstlineno=max(record.lineno - 1, 0))
            FunctionType(code, globals())(log, text)
        except Exception:  # such as a folder's `logger.info("%d", "x")`: serving continues without the line
            self.handleError(record)


def _send_logs_to_triton(model_name: str) -> None:
    """Send hf_triton's own log lines to the server's log, each with the model's name."""
    root = logging.getLogger("hf_triton")
    for old in list(root.handlers):
        root.removeHandler(old)
    handler = TritonLogHandler()
    handler.setFormatter(OneLineFormatter(f"{model_name}: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
