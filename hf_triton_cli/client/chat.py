# SPDX-License-Identifier: Apache-2.0
"""`hf-triton chat`: a conversation with a model of a running Triton, in the terminal or line by line from a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from types import FrameType
from typing import Final

import click

from hf_triton_cli.client.generate import Sampling, sampling_options
from hf_triton_cli.client.running_triton import Triton, complete_models, triton_options
from hf_triton_cli.client.session import COMMANDS, Session
from hf_triton_cli.exit_codes import TERMINATED

QUOTES: Final = '"""'


@click.command(epilog='Example: hf-triton chat demo --system "Be brief." --max-tokens 200')
@click.argument("model", required=False, shell_complete=complete_models)
@triton_options
@sampling_options
@click.option("--system", metavar="TEXT", help="System prompt.")
def chat(
    model: str | None,
    triton: Triton,
    sampling: Sampling,
    system: str | None,
) -> None:
    """Talk to MODEL, which may be left out if one is served. /help lists the commands inside.

    From a pipe, each line is one message.
    """
    exit_at_sigterm()
    with asyncio.Runner() as runner:
        talk(Session(triton, runner, sampling.values, system), model)


def exit_at_sigterm() -> None:
    """Make SIGTERM end the command by SystemExit, so that terminal, requests and a server are left in order."""

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            sys.exit(TERMINATED)
        loop.call_soon_threadsafe(sys.exit, TERMINATED)  # in a task, it would be logged as the task's error

    signal.signal(signal.SIGTERM, handle)


def talk(session: Session, model: str | None, prompt: str | None = None) -> None:
    """Hold a conversation until its end, or until `prompt` is answered."""
    _prepare_input()
    try:
        session.open(model)
        if prompt is not None:
            session.answer(prompt)
        else:
            session.greet()
            ends = (KeyboardInterrupt,) if sys.stdin.isatty() else ()  # a second Ctrl+C, before the prompt is back
            with contextlib.suppress(*ends):
                while (text := read_message()) is not None and session.handle(text):
                    pass
    finally:
        session.close()


def _prepare_input() -> None:
    """Give a terminal a line editor, which takes a paste as one message; let bytes that are no UTF-8 pass."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline

            readline.set_completer_delims(" ")
            readline.set_completer(lambda text, state: [*filter(lambda it: it.startswith(text), COMMANDS), None][state])
            readline.parse_and_bind("tab: complete")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the request is refused, with a sentence


def read_message() -> str | None:
    '''The next message; None at the end of the input, or at the second Ctrl+C.

    It is a line, with those that follow a trailing backslash, or the lines between two `"""`.
    '''
    lines: list[str] = []
    was_interrupted = is_quoted = False
    while True:
        try:
            line = input(_prompt("... " if lines or is_quoted else ">>> ") if sys.stdin.isatty() else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:  # drops what was typed
            if was_interrupted:
                return None
            click.echo("\nCtrl+C again, or /bye, ends.")
            lines, was_interrupted, is_quoted = [], True, False
            continue
        if not is_quoted and not lines and line.startswith(QUOTES):
            is_quoted, line = True, line.removeprefix(QUOTES)
        if is_quoted:
            lines.append(line.removesuffix(QUOTES))
            if line.endswith(QUOTES):
                return "\n".join(lines).strip("\n")
        else:
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)


def _prompt(text: str) -> str:
    """The prompt in colour; the line editor does not count the codes of the colour."""
    if "readline" not in sys.modules or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\001\033[1;36m\002{text}\001\033[0m\002"
