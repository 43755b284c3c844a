# SPDX-License-Identifier: Apache-2.0
"""`hf-triton chat`: a conversation with a model of a running Triton, in the terminal or line by line from a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hf_triton.cli.client import Triton, triton_options
from hf_triton.cli.exit_codes import INTERRUPTED
from hf_triton.cli.generate import sampling_options, shown, split_parameters
from hf_triton.errors import HfTritonError

if TYPE_CHECKING:
    from hf_triton.openai.triton import Model, TritonModels

RETURNS: Final = ("message", "finish_reason")
HELP: Final = """\
/reset         forget the conversation
/system TEXT   set the system prompt, and forget the conversation; without TEXT, none
/save FILE     write the conversation as JSON
/quit          end, as Ctrl+D does
A line that ends with \\ goes on in the next. Ctrl+C stops an answer."""


@click.command(epilog='Example: hf-triton chat demo --system "Be brief." --max-tokens 200')
@click.argument("model", required=False)
@triton_options
@sampling_options
@click.option("--system", metavar="TEXT", help="System prompt.")
def chat(
    model: str | None,
    triton: str,
    headers: dict[str, str],
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    params: dict[str, object],
    system: str | None,
) -> None:
    """Talk to MODEL, which may be left out if one is served. /help lists the commands inside.

    From a pipe, each line is one message.
    """
    sampling, options = split_parameters(
        params, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
    )
    _prepare_input()
    with asyncio.Runner() as runner:
        session = Session(Triton(triton, headers), runner, sampling, options, system)
        try:
            session.open(model)
            while (text := read_message()) is not None and session.handle(text):
                pass
        finally:
            session.close()
    if session.failure is not None:
        raise session.failure


def _prepare_input() -> None:
    """Give a terminal a line editor, which takes a paste as one message; let bytes that are no UTF-8 pass."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the request is refused, with a sentence


def read_message() -> str | None:
    """The next message: a line, with those that follow a trailing backslash; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else ">>> ") if sys.stdin.isatty() else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:  # drops what was typed
            click.echo()
            lines = []
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


class Session:
    """One conversation.

    Args:
        triton: The server.
        runner: Its loop; Ctrl+C cancels what runs in it.
        sampling: Generation parameters.
        options: Options of each request.
        system: System prompt.
    """

    def __init__(
        self,
        triton: Triton,
        runner: asyncio.Runner,
        sampling: Mapping[str, object],
        options: Mapping[str, Any],
        system: str | None,
    ) -> None:
        self._triton = triton
        self._runner = runner
        self._sampling = sampling
        self._options = options
        self._messages: list[dict[str, Any]] = []
        self._models: TritonModels | None = None
        self._model: Model | None = None
        self._set_system(system)
        self.failure: HfTritonError | click.ClickException | None = None
        """The error that ended a conversation from a pipe."""

    def open(self, name: str | None) -> None:
        """Connect and choose the model.

        Raises:
            HfTritonError: It cannot be talked to.
        """

        async def connect() -> None:
            self._models = self._triton.models()
            self._model = await self._triton.choose(self._models, name)

        self._runner.run(connect())
        if sys.stdin.isatty() and self._model is not None:
            click.echo(f"{self._model.name} at {self._triton.address}; /help lists the commands.")

    def close(self) -> None:
        """Disconnect."""
        if self._models is not None:
            self._runner.run(self._models.close())

    def handle(self, text: str) -> bool:
        """Answer a message, or do what a command says; False ends the conversation."""
        command, _, argument = text.strip().partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit" | "/bye":
                return False
            case "/reset":
                self._messages = self._messages[:1] if self._has_system() else []
                click.echo("The conversation is forgotten.")
            case "/system":
                self._set_system(argument.strip() or None)
                click.echo("The system prompt is set." if self._messages else "There is no system prompt.")
            case "/save":
                return self._save(argument.strip())
            case "/help" | "/?":
                click.echo(HELP)
            case _ if command.startswith("/") and "/" not in command[1:] and command[1:].isalpha():
                return self._refuse(click.UsageError(f"there is no command {command}: /help lists them"))
            case _:
                return self._answer(text)
        return True

    def _has_system(self) -> bool:
        return bool(self._messages) and self._messages[0]["role"] == "system"

    def _set_system(self, system: str | None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def _refuse(self, error: HfTritonError | click.ClickException) -> bool:
        """Say on a terminal what failed; from a pipe, end the conversation: what follows would belong to another."""
        if not sys.stdin.isatty():
            self.failure = error
            return False
        sentence = error.sentence if isinstance(error, HfTritonError) else error.message
        click.echo(f"error: {sentence}", err=True)
        return True

    def _save(self, file: str) -> bool:
        if not file:
            return self._refuse(click.UsageError("/save needs the name of a file"))
        try:
            with Path(file).expanduser().open("x", encoding="utf-8") as stream:
                json.dump(self._messages, stream, ensure_ascii=False, indent=2)
        except OSError as error:
            return self._refuse(click.ClickException(f"{file} cannot be written: {error.strerror}"))
        click.echo(f"Saved {len(self._messages)} messages to {file}.")
        return True

    def _answer(self, text: str) -> bool:
        """Send a message and print the answer; a message without an answer leaves the conversation as it was."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._runner.run(self._print_answer())
        except HfTritonError as error:
            self._messages.pop()
            return self._refuse(error)
        except KeyboardInterrupt:
            self._messages.pop()
            click.echo("\nCancelled; the message is not part of the conversation.", err=True)
            if not sys.stdin.isatty():
                sys.exit(INTERRUPTED)
        else:
            self._messages.append({"role": "assistant", "content": answer})
        return True

    async def _print_answer(self) -> str:
        from hf_triton.openai.errors import ApiError

        content: list[str] = []
        is_dim = False
        try:
            async with aclosing(self._deltas()) as deltas:
                async for delta in deltas:
                    if reasoning := delta.get("reasoning_content"):
                        click.echo(_dim(shown(reasoning)), nl=False)
                        is_dim = True
                    if piece := delta.get("content"):
                        if is_dim:
                            click.echo("\n")
                            is_dim = False
                        content.append(piece)
                        click.echo(shown(piece), nl=False)
        except ApiError as error:
            raise self._triton.api_error(error) from None
        finally:
            with contextlib.suppress(BrokenPipeError):
                click.echo()
        return "".join(content)

    async def _deltas(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer's message in pieces; in one if the model does not stream."""
        from hf_triton.openai.answers import delta_of, message_of
        from hf_triton.openai.triton_messages import Generation

        assert self._models is not None
        assert self._model is not None
        generation = Generation(
            self._model.name,
            uuid.uuid4().hex,
            self._sampling,
            self._options,
            messages=self._messages,
            returns=RETURNS,
        )
        if self._model.door is None:
            yield message_of(await self._models.generate(generation), 0)
            return
        async with aclosing(self._models.stream(generation)) as responses:
            async for outputs in responses:
                if delta := delta_of(outputs, 0):
                    yield json.loads(delta)


def _dim(text: str) -> str:
    return click.style(text, dim=True)  # click drops the style where standard output is no terminal
