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
from typing import Final

import triton_python_backend_utils as pb_utils

logger = logging.getLogger(__name__)

SERVER_POLL_S = 1.0


def start_process(model_name: str) -> None:
    """Set up the process of a model: UTF-8, log lines to the server's log, an end with the server.

    Args:
        model_name: The folder's, for the log.
    """
    _use_utf8()
    _end_with_server()
    _send_logs_to_triton(model_name)


def _end_with_server() -> None:
    """End this process with its server: a stub whose server was killed can live on, and keep its GPU memory."""
    server = os.getppid()

    def watch() -> None:
        while os.getppid() == server:
            time.sleep(SERVER_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="hf_triton-server-watch", daemon=True).start()


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

    Args:
        model_name: For the log.
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


def _use_utf8() -> None:
    """Make UTF-8 the encoding of files and output, and flush output line by line.

    Triton starts its Python in ASCII, whatever the locale is, and would show a folder's own output at its exit.
    """
    with contextlib.suppress(locale.Error):  # a system without it keeps its own
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


class TritonLogHandler(logging.Handler):
    """Sends log records to the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.levelno >= logging.ERROR:
                pb_utils.Logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                pb_utils.Logger.log_warn(text)
            else:
                pb_utils.Logger.log_info(text)
        except Exception:  # such as a folder's `logger.info("%d", "x")`: serving continues without the line
            self.handleError(record)


def _send_logs_to_triton(model_name: str) -> None:
    """Send hf_triton's own log lines to the server's log, each with the model's name."""
    root = logging.getLogger("hf_triton")
    for old in list(root.handlers):
        root.removeHandler(old)
    handler = TritonLogHandler()
    handler.setFormatter(logging.Formatter(f"{model_name}: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
