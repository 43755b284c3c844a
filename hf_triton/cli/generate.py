# SPDX-License-Identifier: Apache-2.0
"""`hf-triton generate`: one completion of a running Triton, streamed to the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from hf_triton.cli.client import Triton, complete_models, triton_options
from hf_triton.cli.exit_codes import INTERRUPTED
from hf_triton.cli.model_folder import read_settings
from hf_triton.cli.tables import printable
from hf_triton.protocol.options import CHAT_OPTIONS, OPTIONS
from hf_triton.protocol.ports import TEXT_OUTPUTS
from hf_triton.protocol.validation import read_json

if TYPE_CHECKING:
    from hf_triton.openai.triton import Model, TritonModels
    from hf_triton.openai.triton_messages import Generation, Outputs

Command = TypeVar("Command", bound=Callable[..., Any])
SEVERAL: Final = ("n", "num_return_sequences", "best_of")
"""Parameters with which the completions come at once, not in pieces."""
OPTION_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("max_tokens", "max_new_tokens"), "--max-tokens"),
    **{name: f"--{name}" for name in ("temperature", "seed", "stop")},
    "top_p": "--top-p",
    "text_input": "the prompt",
}
"""What was typed, by the names in the server's sentences."""
COMMAND_DECIDES: Final = ("stream", "exclude_input_in_output", "sampling_parameters", "cancel", "messages")


def sampling_options(command: Command) -> Command:
    """Give a command options for generation parameters; it gets them as `sampling`'s arguments."""
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
    for option in reversed(options):
        command = option(command)
    return command


def _read_params(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, object]:
    params = read_settings(context, option, values)
    for name in COMMAND_DECIDES:
        if name in params:
            raise click.BadParameter(f"{name} is for the command to decide: leave it out")
    return {name: read_json(text) for name, text in params.items()}


def split_parameters(params: Mapping[str, object], **given: object) -> tuple[dict[str, object], dict[str, Any]]:
    """Generation parameters, and options of the request as Triton takes them.

    Args:
        params: Those of `--param`.
        given: Those with an option of their own; None and () are not given.

    Raises:
        click.UsageError: A parameter is given both ways.
    """
    named = {name: value for name, value in given.items() if value not in (None, ())}
    if twice := sorted(named.keys() & params.keys()):
        raise click.UsageError(f"{twice[0]} is given twice: give it once")
    is_option = OPTIONS | CHAT_OPTIONS
    options = {name: _scalar(value) for name, value in params.items() if name in is_option}
    return {**named, **{name: value for name, value in params.items() if name not in is_option}}, options


def _scalar(value: object) -> bool | int | str:
    """Triton's request parameters are booleans, integers and strings; others go as JSON."""
    return value if isinstance(value, bool | int | str) else json.dumps(value)


def typed_names(params: Mapping[str, object]) -> dict[str, str]:
    """The names in a sentence that were typed otherwise; those of `--param` were typed as they are."""
    return {name: typed for name, typed in OPTION_NAMES.items() if name not in params}


@click.command(epilog='Example: hf-triton generate "The model" -m demo --max-tokens 20 --temperature 0.8 --seed 7')
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@click.option(
    "-m", "--model", metavar="MODEL", shell_complete=complete_models, help="May be left out if one is served."
)
@triton_options
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as a JSON object.")
def generate(
    words: tuple[str, ...],
    model: str | None,
    triton: str,
    headers: dict[str, str],
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    params: dict[str, object],
    as_json: bool,
) -> None:
    """Generate a completion of PROMPT, and print it as it comes.

    Without PROMPT, or if it is -, standard input is read. MODEL PROMPT in place of --model does too. Ctrl+C cancels
    the request.
    """
    name, prompt = _read_words(words, model)
    sampling, options = split_parameters(
        params, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
    )
    names = typed_names(params)
    try:
        asyncio.run(_generate(Triton(triton, headers), name, prompt, sampling, options, names, as_json))
    except KeyboardInterrupt:
        click.echo("\nCancelled.", err=True)
        sys.exit(INTERRUPTED)


def _read_words(words: tuple[str, ...], model: str | None) -> tuple[str | None, str]:
    """The model, if it is named, and the prompt.

    Raises:
        click.UsageError: There is no prompt, or there are too many words.
    """
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


async def _generate(
    triton: Triton,
    name: str | None,
    prompt: str,
    sampling: Mapping[str, object],
    options: Mapping[str, Any],
    names: Mapping[str, str],
    as_json: bool,
) -> None:
    from hf_triton.openai.errors import ApiError
    from hf_triton.openai.triton_messages import Generation

    models = triton.models()
    try:
        model = await triton.choose(models, name)
        options = {**options, "exclude_input_in_output": True}
        generation = Generation(model.name, uuid.uuid4().hex, sampling, options, prompts=[prompt], names=names)
        if as_json:
            _print_json(model.name, await models.generate(generation))
        elif model.door is None or any(parameter in sampling for parameter in SEVERAL):
            click.echo("\n---\n".join(map(shown, texts_of(await models.generate(generation)))))
        else:
            await _print_stream(models, model, generation)
    except ApiError as error:
        raise triton.api_error(error) from None
    finally:
        await models.close()


async def _print_stream(models: TritonModels, model: Model, generation: Generation) -> None:
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
