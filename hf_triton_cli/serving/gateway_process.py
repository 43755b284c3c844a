# SPDX-License-Identifier: Apache-2.0
"""The OpenAI gateway as a process beside tritonserver. Knows its address, and nothing about its API."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from hf_triton.errors import ServerError
from hf_triton.scratch import ScratchFolder
from hf_triton.server import delayed_signals, describe_log, describe_status, end_with_parent, open_local, read_log
from hf_triton_cli.serving.gateway_options import as_arguments
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.triton.triton_headers import read_headers

START_LIMIT_S: Final = 60.0
STOP_GRACE_S: Final = 5.0
"""Beyond what it gives its requests in flight."""


class GatewayProcess:
    """`hf-triton openai` as a process, which gets SIGTERM when the thread that started it ends.

    Args:
        config: The gateway's.
        log: File descriptor for its output, or a file that it is appended to; see `TritonServer`.
        headers: To send to Triton with every call, besides those of the config's file.

    Raises:
        SettingsError: That file cannot be read.
    """

    def __init__(
        self, config: GatewayConfig, log: int | Path | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._scratch = ScratchFolder("gateway")  # for this user alone
        self._kept_log = log
        self._log = Path(self._scratch.name) / "log" if log is None else log
        if headers:
            given = config.triton_headers_file
            headers = {**headers, **(read_headers(given) if given is not None else {})}
            file = Path(self._scratch.name) / "triton_headers"  # an argument would be shown to all users
            file.write_text("".join(f"{name}: {value}\n" for name, value in headers.items()))
            config = config.model_copy(update={"triton_headers_file": file})
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and return at once."""
        log: IO[bytes] | int = self._log.open("ab") if isinstance(self._log, Path) else self._log
        with contextlib.nullcontext(log) if isinstance(log, int) else log, delayed_signals():
            self._process = subprocess.Popen(
                # -P: no file of the folder that the command runs in takes the place of a module.
                [sys.executable, "-P", "-m", "hf_triton_cli", "openai", *as_arguments(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C reaches the command alone
                preexec_fn=end_with_parent,
            )

    def wait_until_started(self) -> None:
        """Wait until it answers requests, be it that Triton is not there yet.

        Raises:
            ServerError: It has ended, or does not answer in time.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while self._health() == 0:
            self.check()
            if time.monotonic() > deadline:
                raise ServerError("gateway_failed", f"the OpenAI gateway did not start within {START_LIMIT_S:g} s")
            time.sleep(0.05)

    def _health(self) -> int:
        """The HTTP status of its health; 0 if it does not answer."""
        try:
            with open_local(f"{self.config.scheme}://{self.config.host}:{self.config.port}/health", 5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    def check(self) -> None:
        """Raise a ServerError if the process has ended."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            text = read_log(self._log) if isinstance(self._log, Path) else ""
            reason = describe_log(text, self._kept_log)
            raise ServerError("gateway_failed", f"the OpenAI gateway exited {describe_status(status)}{reason}")

    def stop(self) -> None:
        """Let requests in flight finish; kill what is left of the process group if it takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.config.shutdown_timeout_s + STOP_GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._scratch.cleanup()
