# SPDX-License-Identifier: Apache-2.0
"""A download in a process of its own: started, listened to, stopped at its deadline. Knows nothing of the Hub's API."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from hf_triton.errors import CheckpointError, HubError
from hf_triton.hub.download import Job, encode
from hf_triton.server import die_with_parent

logger = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0

_Event = dict[str, Any]


@dataclass(frozen=True)
class Patience:
    """How long to wait, in seconds."""

    total_s: float
    """For the whole download."""
    stall_s: float
    """For the next byte."""


def download(job: Job, environment: Mapping[str, str], patience: Patience) -> Path:
    """Fetch what a job wants; progress and retries are logged every ten seconds.

    Args:
        job: What to fetch.
        environment: The process's, the access token in HF_TOKEN included.
        patience: When to give up.

    Returns:
        The snapshot folder.

    Raises:
        HubError: It cannot be had, or not in time.
        CheckpointError: The repository has no usable weights.
    """
    with _running(job, environment) as process:
        events, watch = _events(process), _Watch(job, patience)
        while True:
            event = _next(events, watch.remaining_s())
            if event is None:
                continue
            if "snapshot" in event:
                return Path(event["snapshot"])
            if "code" in event:
                kind = CheckpointError if event["code"].startswith("checkpoint_") else HubError
                raise kind(event["code"], event["sentence"])
            if "ended" in event:
                raise _ended(job, process)
            watch.take(event)


class _Watch:
    """Keeps the deadlines, and tells the log how far it is."""

    def __init__(self, job: Job, patience: Patience) -> None:
        now = time.monotonic()
        self._job, self._patience = job, patience
        self._deadline = now + patience.total_s
        self._last_sign = self._last_log = now
        self._num_bytes = 0
        self._last_warning = ""

    def remaining_s(self) -> float:
        """Seconds until patience ends.

        Raises:
            HubError: It has.
        """
        now, stalls_at = time.monotonic(), self._last_sign + self._patience.stall_s
        if now >= self._deadline:
            raise self._too_slow("was not done after", "download_timeout_s", self._patience.total_s)
        if now >= stalls_at:
            raise self._too_slow("sent no byte for", "download_stall_timeout_s", self._patience.stall_s)
        return min(self._deadline, stalls_at) - now

    def take(self, event: _Event) -> None:
        """Note progress or a warning."""
        now = time.monotonic()
        if event.get("num_bytes", 0) > self._num_bytes or event.get("is_checking"):
            self._last_sign = now
        self._num_bytes = event.get("num_bytes", self._num_bytes)
        self._last_warning = event.get("warning", self._last_warning)
        if now - self._last_log < LOG_INTERVAL_S:
            return
        self._last_log = now
        if "warning" in event:
            logger.warning("%s: the Hub's client says: %s", self._job.model, event["warning"])
        else:
            total, doing = event["total_bytes"], "checking" if event["is_checking"] else "downloading"
            logger.info("%s: %s, %.2f of %.2f GB", self._job.model, doing, self._num_bytes / 1e9, total / 1e9)

    def _too_slow(self, what: str, setting: str, limit_s: float) -> HubError:
        last = f", and its client said last: {self._last_warning}" if self._last_warning else ""
        return HubError(
            "hub_timeout",
            f"the Hub {what} {limit_s:g} s while {self._job.model} was downloaded ({self._num_bytes / 1e9:.2f} GB had "
            f"come{last}): check the network and HF_ENDPOINT, or raise {setting}; the files that are complete are kept",
        )


def _ended(job: Job, process: subprocess.Popen[bytes]) -> HubError:
    return HubError(
        "hub_unavailable",
        f"the process that downloads {job.model} ended without a word (exit code {process.wait()}; -9 is a kill for "
        f"want of memory): run `{sys.executable} -m hf_triton.hub.download` to see whether it starts, and try again",
    )


# --- the process -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(job: Job, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The process with its job; it does not outlive this block, nor this process, and leaves no part of a file."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_triton.hub.download"],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the client's own words; ours come as events
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended, which the events tell
            stdin.write(encode(job))
        yield process
    finally:
        parts = _open_parts(process.pid)
        process.kill()
        process.wait()
        for part in parts:
            part.unlink(missing_ok=True)


def _open_parts(pid: int) -> list[Path]:
    """The unfinished files that a process is writing; the client would never go on with them."""
    parts = []
    with contextlib.suppress(OSError):  # it has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                parts.append(Path(os.readlink(descriptor)))
    return [part for part in parts if part.name.endswith(".incomplete")]


def _events(process: subprocess.Popen[bytes]) -> queue.Queue[_Event]:
    """The events of the process, read by a thread so that waiting for one can end."""
    events: queue.Queue[_Event] = queue.Queue()

    def read(stdout: IO[bytes]) -> None:
        with stdout:
            for event in _json_lines(stdout):
                events.put(event)
        events.put({"ended": True})

    assert process.stdout is not None
    threading.Thread(target=read, args=(process.stdout,), name="hf_triton-download", daemon=True).start()
    return events


def _json_lines(stdout: IO[bytes]) -> Iterator[_Event]:
    for line in stdout:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _next(events: queue.Queue[_Event], timeout_s: float) -> _Event | None:
    try:
        return events.get(timeout=timeout_s)
    except queue.Empty:
        return None
