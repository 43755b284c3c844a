# SPDX-License-Identifier: Apache-2.0
"""A conversation in the terminal: its messages, the commands inside it, and the answers as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from hf_triton.errors import HfTritonError
from hf_triton.protocol.parameters import parse_parameters
from hf_triton.protocol.request_options import CHAT_OPTIONS, OPTIONS
from hf_triton.protocol.validation import read_json
from hf_triton_cli.client.generate import COMMAND_DECIDES, canonical, shown, split_parameters
from hf_triton_cli.client.image_files import content_of, read_image_file
from hf_triton_cli.client.markdown import markdown_stream
from hf_triton_cli.client.running_triton import Triton
from hf_triton_cli.tables import printable

if TYPE_CHECKING:
    from hf_triton_gateway.triton.triton_models import Model, TritonModels

T = TypeVar("T")

RETURNS: Final = ("message", "finish_reason", "num_input_tokens", "num_output_tokens")
TYPED_NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "messages": "the conversation",
    "text_input": "it by `hf-triton generate`",
}
COMMANDS: Final[Mapping[str, str]] = {
    "/reset": "forget the conversation, as /clear does",
    "/system TEXT": "set the system prompt, and forget the conversation; without TEXT, none",
    "/image FILE": "send an image with the next message; several are sent together; without FILE, none",
    "/set NAME VALUE": "set a parameter, such as temperature; without VALUE its default; alone, show all that are set",
    "/model NAME": "go on with another model",
    "/stats": "tokens and times of the last answer",
    "/save FILE": "write the conversation as JSON",
    "/bye": "end, as /quit, Ctrl+D and Ctrl+C twice do",
}
HELP: Final = (
    "\n".join(f"{command:<17}{meaning}" for command, meaning in COMMANDS.items())
    + '\nA line that ends with \\ goes on in the next; lines between """ are one message. Ctrl+C stops an answer.'
)


@dataclass
class Stats:
    """Counts and times of one answer."""

    start_s: float
    first_s: float | None = None
    end_s: float | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None

    def __str__(self) -> str:
        end_s = self.end_s or time.monotonic()
        parts = [f"{self.num_input_tokens} tokens of prompt"] if self.num_input_tokens is not None else []
        if self.num_output_tokens is not None:
            rate = self.num_output_tokens / max(end_s - self.start_s, 1e-9)
            parts.append(f"{self.num_output_tokens} tokens in {end_s - self.start_s:.2f} s, {rate:.1f} tokens/s")
        if self.first_s is not None:
            parts.append(f"the first after {self.first_s - self.start_s:.2f} s")
        return "; ".join(parts) + "."


class Session:
    """One conversation."""

    def __init__(
        self,
        triton: Triton,
        runner: asyncio.Runner,
        parameters: Mapping[str, object],
        system: str | None,
    ) -> None:
        self._triton = triton
        self._runner = runner
        self._parameters = dict(parameters)
        self._messages: list[dict[str, Any]] = []
        self._images: list[bytes] = []
        self._models: TritonModels | None = None
        self._model: Model | None = None
        self._stats: Stats | None = None
        self._task: asyncio.Task[Any] | None = None
        self._set_system(system)

    def open(self, name: str | None) -> None:
        """Connect and choose the model."""

        async def connect() -> None:
            self._models = self._models or self._triton.models()
            self._model = await self._triton.choose(self._models, name)

        self._wait_for(connect())

    def greet(self) -> None:
        """Say what the model is, on a terminal."""
        if not sys.stdin.isatty() or self._model is None:
            return
        info = self._model.folder.info
        what = f" ({info.engine} engine, {info.dtype}, context of {info.context_length} tokens)" if info else ""
        click.echo(f"{click.style(self._model.name, bold=True)}{what} at {self._triton.address}; /help lists commands.")

    def close(self) -> None:
        """Cancel what SystemExit has left where it was, and disconnect."""

        async def disconnect(models: TritonModels) -> None:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
            await models.close()

        if self._models is not None:
            self._runner.run(disconnect(self._models))

    def handle(self, text: str) -> bool:
        """Answer a message, or do what a command says; False ends the conversation.

        Raises:
            HfTritonError: From a pipe, it failed: what follows would belong to another conversation.
            click.UsageError: From a pipe, a command is wrong.
        """
        command, _, argument = text.strip().partition(" ")
        if command in ("/bye", "/quit", "/exit"):
            return False
        try:
            if command.startswith("/") and (command[1:].isalpha() or command == "/?"):
                self._run(command, argument.strip())
            elif command:
                self.answer(text)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo("\nCancelled; the message is not part of the conversation.", err=True)
        except (HfTritonError, click.ClickException) as error:
            if not sys.stdin.isatty():
                raise
            sentence = error.sentence if isinstance(error, HfTritonError) else error.format_message()
            click.echo(f"{click.style('error:', fg='red')} {printable(sentence)}", err=True)
            if isinstance(error, HfTritonError) and "context" in error.code:
                click.echo("The conversation fills the context: /reset forgets it.", err=True)
        return True

    def _run(self, command: str, argument: str) -> None:
        match command:
            case "/reset" | "/clear":
                self._messages = self._messages[:1] if self._has_system() else []
                self._images = []
                click.echo("The conversation is forgotten.")
            case "/system":
                self._set_system(argument or None)
                click.echo("The system prompt is set." if self._messages else "There is no system prompt.")
            case "/image":
                self._add_image(argument.strip("'\""))  # a terminal quotes the name of a file that is dropped on it
            case "/set":
                self._set(*argument.split(None, 1))
            case "/model":
                if not argument:
                    raise click.UsageError("/model needs a model's name: `hf-triton list` shows all")
                self.open(argument)
                self.greet()
            case "/stats":
                click.echo(self._stats or "There is no answer yet.")
            case "/save":
                self._save(argument)
            case "/help" | "/?":
                click.echo(HELP)
            case _:
                raise click.UsageError(f"there is no command {command}: /help lists them")

    def _has_system(self) -> bool:
        return bool(self._messages) and self._messages[0]["role"] == "system"

    def _set_system(self, system: str | None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def _add_image(self, file: str) -> None:
        """Read an image for the next message, or drop those that wait."""
        if not file:
            self._images = []
        elif self._model is not None and self._model.folder.info and self._model.folder.info.images == "no":
            raise click.UsageError(f"{self._model.name} takes no images: /model goes on with another one")
        else:
            self._images.append(read_image_file(file))
        number = len(self._images)
        click.echo(f"The next message has {number or 'no'} image{'' if number == 1 else 's'}.")

    def _set(self, name: str = "", text: str | None = None) -> None:
        """Set a parameter of the next answers, or show all."""
        name = name.replace("-", "_")
        if name in COMMAND_DECIDES:
            raise click.UsageError(f"{name} is for the command to decide: leave it out")
        if name:
            value = None if text is None else read_json(text)
            if name not in OPTIONS | CHAT_OPTIONS:
                parse_parameters({name: value})
            for same in [key for key in self._parameters if canonical(key) == canonical(name)]:
                del self._parameters[same]
            if value is not None:
                self._parameters[name] = value
        lines = [f"{key} = {json.dumps(value)}" for key, value in self._parameters.items()]
        click.echo("\n".join(lines) or "All parameters have the model's defaults.")

    def _save(self, file: str) -> None:
        """Write the conversation."""
        if not file:
            raise click.UsageError("/save needs the name of a file")
        try:
            with Path(file).expanduser().open("x", encoding="utf-8") as stream:
                json.dump(self._messages, stream, ensure_ascii=False, indent=2)
        except OSError as error:
            raise click.UsageError(f"{file} cannot be written: {error.strerror}") from None
        click.echo(f"Saved {len(self._messages)} messages to {file}.")

    def answer(self, text: str) -> None:
        """Send a message and print the answer; one without an answer is forgotten, with its images."""
        images, self._images = self._images, []
        self._messages.append({"role": "user", "content": content_of(text, images)})
        try:
            answer = self._wait_for(self._print_answer())
        except BaseException:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": answer})

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work in a task, which `close` cancels if it is not at its end."""
        self._task = task = self._runner.get_loop().create_task(work)
        return self._runner.run(_result_of(task))

    async def _print_answer(self) -> str:
        """Print the answer as it comes: as Markdown on a terminal, its reasoning dim."""
        from hf_triton_gateway.http.api_errors import ApiError

        content: list[str] = []
        is_terminal, is_dim = sys.stdout.isatty(), False
        with contextlib.ExitStack() as stack:
            write = stack.enter_context(markdown_stream()).write if is_terminal else _echo
            try:
                async with aclosing(self._deltas()) as deltas:
                    async for delta in deltas:
                        if reasoning := delta.get("reasoning_content"):
                            _echo(click.style(shown(reasoning), dim=True))
                            is_dim = True
                        if piece := delta.get("content"):
                            if is_dim:
                                _echo("\n\n")
                                is_dim = False
                            content.append(piece)
                            write(shown(piece))
            except ApiError as error:
                raise self._triton.api_error(error) from None
            finally:
                if is_dim or (content and not is_terminal):
                    with contextlib.suppress(BrokenPipeError):
                        click.echo()
        return "".join(content)

    async def _deltas(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer's message in pieces; in one if the model does not stream."""
        from hf_triton_gateway.chat.answers import delta_of, message_of
        from hf_triton_gateway.http.client_names import ClientNames
        from hf_triton_gateway.triton.triton_messages import Generation

        assert self._models is not None
        assert self._model is not None
        sampling, options = split_parameters(self._parameters)
        names = ClientNames({**TYPED_NAMES, **_names_of_images(self._messages)}, rows=())
        generation = Generation(
            self._model.name,
            uuid.uuid4().hex,
            sampling,
            options,
            messages=self._messages,
            returns=RETURNS,
            names=names,
        )
        self._stats = Stats(time.monotonic())
        if self._model.door is None:
            outputs = await self._models.generate(generation)
            self._count(outputs)
            yield message_of(outputs, 0)
            return
        async with aclosing(self._models.stream(generation)) as responses:
            async for outputs in responses:
                self._count(outputs)
                if delta := delta_of(outputs, 0):
                    yield json.loads(delta)

    def _count(self, outputs: Mapping[str, Any]) -> None:
        """Note what a response says of the answer."""
        assert self._stats is not None
        self._stats.end_s = time.monotonic()
        self._stats.first_s = self._stats.first_s or self._stats.end_s
        for name in ("num_input_tokens", "num_output_tokens"):
            if name in outputs:
                setattr(self._stats, name, outputs[name][0])


async def _result_of(task: asyncio.Task[T]) -> T:
    return await task


def _names_of_images(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What sentences call the images of a conversation, by their places."""
    return {
        f"messages[{index}].content[{place}]": f"image {place + 1}"
        if message is messages[-1]
        else "an image of an earlier message"
        for index, message in enumerate(messages)
        for place, part in enumerate(message["content"])
        if isinstance(part, dict) and part["type"] == "image_url"
    }


def _echo(text: str) -> None:
    click.echo(text, nl=False)  # click drops the style where standard output is no terminal
