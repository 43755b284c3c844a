# SPDX-License-Identifier: Apache-2.0
"""`hf-triton` commands: as processes with pipes, on a terminal, and in this process by click's runner."""

import contextlib
import os
import pty
import select
import subprocess
import time
from collections.abc import Callable, Sequence

from click.testing import CliRunner, Result

from hf_triton_cli.commands import main
from tests.support.serving import COMMAND

TIMEOUT_S = 90


def hf_triton(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | environment,
    )


class CommandLine:
    """All of `hf-triton`, errors too, in the form that `CliRunner.invoke` takes."""

    name = "hf-triton"

    def main(self, args: Sequence[str], **_: object) -> None:
        main(list(args))


def in_process(*arguments: object, stdin: str = "") -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(CommandLine(), words, stdin)  # type: ignore[arg-type]


class Terminal:
    """A command on a pseudo-terminal, as a context manager; it is killed at the end."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(slave)
        self.output = ""
        self._num_read = 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, typing: str = "") -> str:
        """Read until `text` comes after what the last call waited for; returns what came up to its end.

        Args:
            typing: Typed now, and again when `text` has not come for 15 seconds, as a person does: Python's readline
                does not notice a Ctrl+C in the very moment in which it begins to wait.
        """
        deadline, start, typed_s = time.monotonic() + TIMEOUT_S, self._num_read, float("-inf")
        while (found := self.output.find(text, start)) < 0:
            if typing and time.monotonic() > typed_s + 15:
                self.type(typing)
                typed_s = time.monotonic()
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.output!r}"
            if select.select([self._master], [], [], 0.5)[0]:
                try:
                    self.output += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # the command has ended
                    raise AssertionError(f"{text!r} did not come: {self.output!r}") from None
        self._num_read = found + len(text)
        return self.output[start : self._num_read]

    def interrupt(self) -> int:
        """Ctrl+C until the end, see `wait_for`; returns the exit code."""
        return self._end(lambda: self.type("\x03"))

    def terminate(self) -> int:
        """SIGTERM until the end, which readline may miss as it does a Ctrl+C; returns the exit code."""
        return self._end(self.process.terminate)

    def _end(self, ask: Callable[[], None]) -> int:
        while self.process.poll() is None:
            ask()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        return self.wait()

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        try:
            while piece := os.read(self._master, 65536):
                self.output += piece.decode(errors="replace")
        except OSError:
            pass
        return self.process.wait(TIMEOUT_S)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl+C is a signal, also beneath a shell's `&`."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
