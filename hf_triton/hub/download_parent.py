# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a download: starts the process, reads its events, kills it at a deadline. Knows no Hub API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hf_triton.errors import CheckpointError, HubError
from hf_triton.hub.spec import CheckpointSpec

logger = logging.getLogger(__name__)

_Event = dict[str, Any]


@dataclass(frozen=True)
class DownloadLimits:
    """Deadlines and the interval of log lines, in seconds."""

    total_s: float
    stall_s: float
    """Limit of the time without a new byte."""
    log_interval_s: float = 10.0


def download(
    spec: CheckpointSpec,
    cache_dir: Path,
    environment: Mapping[str, str],
    limits: DownloadLimits,
    on_event: Callable[[_Event], None] = lambda event: None,
) -> Path:
    """Download a checkpoint; progress and retries are logged, and `on_event` gets each event of the process.

    Raises:
        HubError: The download failed or exceeded a limit.
        CheckpointError: The repository lacks needed files.
    """
    with _running(spec, cache_dir, environment) as process:
        events, watch = _events(process), DownloadWatch(spec.name, limits)
        while True:
            try:
                event = events.get(timeout=watch.remaining_s())
            except queue.Empty:
                continue
            if "snapshot" in event:
                return Path(event["snapshot"])
            if "code" in event:
                kind = CheckpointError if event["code"].startswith("checkpoint_") else HubError
                raise kind(event["code"], event["sentence"])
            if "ended" in event:
                raise HubError(
                    "hub_unavailable",
                    f"the process that downloads {spec.name} ended without a result (exit code {process.wait()}; -9: "
                    f"killed, often for lack of memory): run `{sys.executable} -m hf_triton.hub.download` to see "
                    "whether it starts, and try again",
                )
            watch.update(event)
            on_event(event)


class DownloadWatch:
    """Keeps the deadlines of a download and logs its progress."""

    def __init__(self, name: str, limits: DownloadLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._limits, self._clock = name, limits, clock
        self._deadline = clock() + limits.total_s
        self._last_progress = self._last_log = clock()
        self._num_bytes = 0
        self._last_warning = ""

    def remaining_s(self) -> float:
        """Seconds until the next deadline; a HubError if one has passed."""
        now, stalls_at = self._clock(), self._last_progress + self._limits.stall_s
        if now >= self._deadline:
            raise self._timeout("did not finish within", "download_timeout_s", self._limits.total_s)
        if now >= stalls_at:
            raise self._timeout("received no byte for", "download_stall_timeout_s", self._limits.stall_s)
        return min(self._deadline, stalls_at) - now

    def update(self, event: _Event) -> None:
        """Record progress or a warning, and log it at intervals; a checksum being computed counts as progress."""
        now = self._clock()
        if event.get("num_bytes", 0) > self._num_bytes or event.get("is_checking"):
            self._last_progress = now
        self._num_bytes = event.get("num_bytes", self._num_bytes)
        self._last_warning = event.get("warning", self._last_warning)
        if now - self._last_log < self._limits.log_interval_s:
            return
        self._last_log = now
        if "warning" in event:
            logger.warning("%s: warning of the Hub's client: %s", self._name, event["warning"])
        else:
            state = "verifying" if event["is_checking"] else "downloading"
            num_gb, total_gb = self._num_bytes / 1e9, event["total_bytes"] / 1e9
            logger.info("%s: %s, %.2f of %.2f GB", self._name, state, num_gb, total_gb)

    def _timeout(self, what: str, setting: str, limit_s: float) -> HubError:
        warning = f"; last warning of the client: {self._last_warning}" if self._last_warning else ""
        return HubError(
            "hub_timeout",
            f"the download of {self._name} {what} {limit_s:g} s ({self._num_bytes / 1e9:.2f} GB received{warning}): "
            f"check the network and HF_ENDPOINT, or raise {setting}; complete files are kept",
        )


@contextlib.contextmanager
def _running(
    spec: CheckpointSpec, cache_dir: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The download process. It is killed at the end of this block, and its partial files are removed.

    It exits by itself if this process dies, since its standard input ends then.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "hf_triton.hub.download"],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # output of the client; ours comes as events
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        request = {"spec": dataclasses.asdict(spec), "cache_dir": str(cache_dir)}
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which the events show
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        yield process
    finally:
        parts = _open_parts(process.pid)
        process.kill()
        process.wait()
        with contextlib.suppress(BrokenPipeError):  # a request that was never read
            process.stdin.close()
        for part in parts:
            part.unlink(missing_ok=True)


def _open_parts(pid: int) -> list[Path]:
    """The partial files that a process has open; the client would never resume them."""
    paths = []
    with contextlib.suppress(OSError):  # the process has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                paths.append(Path(os.readlink(descriptor)))
    return [path for path in paths if path.name.endswith(".incomplete")]


def _events(process: subprocess.Popen[bytes]) -> queue.Queue[_Event]:
    """The process's events, read by a thread so that waiting for one can time out."""
    events: queue.Queue[_Event] = queue.Queue()

    def read(stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                with contextlib.suppress(ValueError):
                    events.put(json.loads(line))
        events.put({"ended": True})

    assert process.stdout is not None
    threading.Thread(target=read, args=(process.stdout,), name="hf_triton-download", daemon=True).start()
    return events
