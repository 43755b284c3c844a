# SPDX-License-Identifier: Apache-2.0
"""`hf-triton generate`: one completion of a running Triton, streamed to the terminal."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from hf_triton.protocol.dialects import ALIASES
from hf_triton.protocol.names import TEXT_OUTPUTS
from hf_triton.protocol.request_options import CHAT_OPTIONS, OPTIONS
from hf_triton.protocol.validation import read_json
from hf_triton_cli.client.image_files import read_image_file
from hf_triton_cli.client.running_triton import Triton, complete_models, triton_options
from hf_triton_cli.exit_codes import INTERRUPTED
from hf_triton_cli.shared_options import read_settings
from hf_triton_cli.tables import printable

if TYPE_CHECKING:
    from hf_triton_gateway.triton.triton_messages import Generation, Outputs
    from hf_triton_gateway.triton.triton_models import TritonModels

Command = TypeVar("Command", bound=Callable[..., Any])
SEVERAL: Final = ("n", "num_return_sequences", "best_of")
"""Parameters with which the completions come at once, not in pieces."""
OPTION_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("max_tokens", "max_new_tokens"), "--max-tokens"),
    **{name: f"--{name}" for name in ("temperature", "seed", "stop")},
    "top_p": "--top-p",
    "text_input": "the prompt",
}
NAMED: Final = ("max_tokens", "temperature", "top_p", "seed", "stop")
"""Parameters with an option of their own."""
COMMAND_DECIDES: Final = ("stream", "exclude_input_in_output", "sampling_parameters", "cancel", "messages")


@dataclass(frozen=True)
class Sampling:
    """The generation parameters and request options that a command is given."""

    values: Mapping[str, object]
    typed_names: Mapping[str, str]
    """What was typed, by the names in the server's sentences; those of `--param` were typed as they are."""


def sampling_options(command: Command) -> Command:
    """Give a command options for generation parameters; it gets them as one argument, `sampling`."""

    @functools.wraps(command)
    def with_sampling(*, params: Mapping[str, object], **values: Any) -> Any:
        given = {name: value for name in NAMED if (value := values.pop(name)) not in (None, ())}
        in_params = set(map(canonical, params))
        if twice := next((name for name in given if canonical(name) in in_params), None):
            raise click.UsageError(f"{twice} is given twice: give it once")
        typed_names = {name: typed for name, typed in OPTION_NAMES.items() if name not in params}
        return command(sampling=Sampling({**given, **params}, typed_names), **values)

    options = (
        click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Maximum number of tokens to generate."),
        click.option("--temperature", type=click.FloatRange(0, 100), metavar="NUMBER", help="0 is greedy."),
        click.option(
            "--top-p",
            type=click.FloatRange(0, 1, min_open=True),
            metavar="NUMBER",
            help="Sample from the likeliest tokens.",
        ),
        click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed of the random generator."),
        click.option("--stop", multiple=True, metavar="TEXT", help="Generation stops before TEXT. Repeatable."),
        click.option(
            "--param",
            "params",
            multiple=True,
            metavar="KEY=VALUE",
            callback=_read_params,
            help="Any other request parameter; VALUE is JSON, or else a string. Repeatable.",
        ),
    )
    decorated: Any = with_sampling
    for option in reversed(options):
        decorated = option(decorated)
    return cast(Command, decorated)


def canonical(name: str) -> str:
    """Our name of a parameter that other servers' clients call otherwise."""
    return ALIASES.get(name, name)


def _read_params(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, object]:
    params = read_settings(context, option, values)
    for name in COMMAND_DECIDES:
        if name in params:
            raise click.BadParameter(f"{name} is for the command to decide: leave it out")
    return {name: read_json(text) for name, text in params.items()}


def split_parameters(values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Any]]:
    """Generation parameters, and options of the request as Triton takes them."""
    is_option = OPTIONS | CHAT_OPTIONS
    options = {name: _scalar(value) for name, value in values.items() if name in is_option}
    return {name: value for name, value in values.items() if name not in is_option}, options


def _scalar(value: object) -> bool | int | str:
    """Triton's request parameters are booleans, integers and strings; others go as JSON."""
    return value if isinstance(value, bool | int | str) else json.dumps(value)


@click.command(epilog='Example: hf-triton generate "The model" -m demo --max-tokens 20 --temperature 0.8 --seed 7')
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@click.option(
    "-m", "--model", metavar="MODEL", shell_complete=complete_models, help="May be left out if one is served."
)
@triton_options
@sampling_options
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="Image for the next of PROMPT's placeholders. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as a JSON object.")
def generate(
    words: tuple[str, ...],
    model: str | None,
    triton: Triton,
    sampling: Sampling,
    images: tuple[str, ...],
    as_json: bool,
) -> None:
    """Generate a completion of PROMPT, and print it as it comes.

    Without PROMPT, or if it is -, standard input is read. Two arguments are MODEL and PROMPT. Ctrl+C cancels the
    request.
    """
    name, prompt = _read_words(words, model)
    files = [read_image_file(file) for file in images]
    try:
        asyncio.run(complete(triton, name, prompt, sampling, files, as_json=as_json))
    except KeyboardInterrupt:
        click.echo("\nCancelled.", err=True)
        sys.exit(INTERRUPTED)


def _read_words(words: tuple[str, ...], model: str | None) -> tuple[str | None, str]:
    """The model, if it is named, and the prompt."""
    if len(words) > (2 if model is None else 1):
        raise click.UsageError("there is more than a prompt: quote it, and name the model with --model")
    *named, prompt = words or ["-"]
    if not words and sys.stdin.isatty():
        raise click.UsageError("there is no prompt: give it as an argument, or pipe it in")
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise click.UsageError(f"the prompt is empty{': standard input has no text' if prompt == '-' else ''}")
    return (named[0] if named else model), text


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise click.UsageError("standard input is not UTF-8 text") from None


async def complete(
    triton: Triton,
    name: str | None,
    prompt: str,
    sampling: Sampling,
    images: Sequence[bytes] = (),
    *,
    as_json: bool = False,
) -> None:
    """Print the completion of a prompt as it comes."""
    from hf_triton_gateway.http.client_names import ClientNames
    from hf_triton_gateway.triton.triton_messages import Generation

    parameters, options = split_parameters({**sampling.values, "exclude_input_in_output": True})
    async with triton.asked() as models:
        model = await triton.choose(models, name)
        names = ClientNames(sampling.typed_names, rows=())
        generation = Generation(
            model.name, uuid.uuid4().hex, parameters, options, prompts=[prompt], images=images, names=names
        )
        if as_json:
            _print_json(model.name, await models.generate(generation))
        elif model.door is None or any(name in parameters for name in SEVERAL):
            click.echo("\n---\n".join(map(shown, texts_of(await models.generate(generation)))))
        else:
            await _print_stream(models, generation)


async def _print_stream(models: TritonModels, generation: Generation) -> None:
    has_begun = False
    async with aclosing(models.stream(generation)) as responses:
        try:
            async for outputs in responses:
                has_begun = True
                click.echo(shown(texts_of(outputs)[0]), nl=False)
        finally:
            if has_begun:
                click.echo()  # an error begins on a line of its own


def texts_of(outputs: Outputs) -> list[str]:
    """The completions, or the deltas of them."""
    return next((list(map(str, outputs[name])) for name in TEXT_OUTPUTS if name in outputs), [""])


def shown(text: str) -> str:
    """A completion as it is shown in a terminal; a pipe gets it unchanged."""
    return printable(text) if sys.stdout.isatty() else text


def _print_json(model: str, outputs: Outputs) -> None:
    texts = texts_of(outputs)
    more = {name: values for name, values in outputs.items() if name not in TEXT_OUTPUTS}
    each = [
        {"text": text, **{name: values[index] for name, values in more.items() if len(values) == len(texts)}}
        for index, text in enumerate(texts)
    ]
    click.echo(json.dumps({"model": model, "completions": each}, ensure_ascii=False, indent=2))
