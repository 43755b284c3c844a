# SPDX-License-Identifier: Apache-2.0
"""The commands of `hf-triton`, in the sections of its help, and how an error ends one. Imports no command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import click

from hf_triton import __version__
from hf_triton.errors import HfTritonError
from hf_triton_cli.exit_codes import INTERRUPTED, exit_code
from hf_triton_cli.lazy import LazyGroup
from hf_triton_cli.tables import printable
from hf_triton_cli.typed import as_typed

SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "Serve": {
        "run": "Serve a model and talk to it in this terminal.",
        "serve": "Serve models of the Hub or of folders, beside an OpenAI API.",
        "openai": "Speak OpenAI's API in front of a Triton elsewhere.",
    },
    "Model folders": {
        "new": "Write a model folder.",
        "check": "Say what is wrong with folders, without serving them.",
        "pull": "Download checkpoints.",
        "bundle": "Write models and packages as one file.",
        "size": "Say how many GPUs a model and a load need.",
        "settings": "List the settings of a folder, or explain one.",
        "optimize": "Measure runtimes for an encoder, and keep the fastest.",
        "export": "Write a folder for another server.",
    },
    "A running server": {
        "list": "Show the models: state, task, engine, context.",
        "status": "Show what the server and its models do now.",
        "load": "Load a model folder, or load it again.",
        "unload": "Unload a model folder.",
        "sleep": "Have a model give its memory back.",
        "wake": "Wake a model that sleeps.",
        "generate": "Print a completion of a prompt.",
        "chat": "Talk to a model.",
        "run-batch": "Answer a file of requests.",
        "bench": "Measure a model under load with AIPerf.",
    },
}
"""The help's lines, by section and command."""
MODULES: Final = {
    **{name: f"serving.{name}:{name}" for name in ("run", "serve", "openai")},
    **{name: f"client.{name}:{name}" for name in ("status", "generate", "chat", "bench")},
    "list": "client.listing:list_models",
    "load": "client.loading:load",
    "unload": "client.loading:unload",
    "sleep": "client.sleeping:sleep",
    "wake": "client.sleeping:wake",
    "run-batch": "client.run_batch:run_batch",
}
EPILOG: Final = """\b
Examples:
  hf-triton run Qwen/Qwen3-0.6B "Why is the sky blue?"
  hf-triton serve model_repository
  hf-triton COMMAND --help
"""


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    modules=MODULES,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="hf-triton")
def cli() -> None:
    """Serve Hugging Face models on Triton Inference Server: a model is a folder."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; an error becomes one line on standard error and an exit code."""
    _open_closed_streams()
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # its handlers can crash a program that a command starts
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it tells of a handshake that failed, as the commands do
    try:
        sys.exit(cli.main(arguments, prog_name="hf-triton", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        failure = HfTritonError("wrong_usage", _sentence(error))
    except HfTritonError as error:
        failure = error
    click.echo(printable(as_typed(f"error: {failure}")), err=True)  # it may quote a checkpoint
    sys.exit(exit_code(failure))


def _open_closed_streams() -> None:
    """Read nothing from a standard stream that is closed (`>&-`), and write to none; no file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _sentence(error: click.ClickException) -> str:
    """Click's message in the form of our own: one line, a small first letter, no full stop."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    if message[1:2].islower():
        message = message[0].lower() + message[1:]
    if isinstance(error, click.NoSuchOption | click.MissingParameter) and error.ctx:
        message += f"; `{error.ctx.command_path} --help` lists what there is"
    return message
