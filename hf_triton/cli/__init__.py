# SPDX-License-Identifier: Apache-2.0
"""The command line: `hf-triton`. A client of the server like any other; no module imports it."""

from __future__ import annotations

import sys

import click

from hf_triton import __version__
from hf_triton.cli.bench import bench
from hf_triton.cli.chat import chat
from hf_triton.cli.check import check
from hf_triton.cli.exit_codes import EXIT_CODES, FAILED
from hf_triton.cli.export import export
from hf_triton.cli.generate import generate
from hf_triton.cli.listing import list_models
from hf_triton.cli.models import load, unload
from hf_triton.cli.new import new
from hf_triton.cli.openai import openai
from hf_triton.cli.optimize import optimize
from hf_triton.cli.pull import pull
from hf_triton.cli.serve import serve
from hf_triton.cli.status import status
from hf_triton.cli.typed import as_typed
from hf_triton.errors import HfTritonError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hf-triton")
def cli() -> None:
    """Serve Hugging Face models on Triton Inference Server: a model is a folder."""


cli.add_command(serve)
cli.add_command(openai)
for command in (new, pull, check, optimize, export, list_models, status, load, unload, generate, chat, bench):
    cli.add_command(command)


def main() -> None:
    """Run the command; an `HfTritonError` becomes one line on standard error and an exit code."""
    try:
        cli()
    except HfTritonError as error:
        click.echo(as_typed(f"error: {error}"), err=True)
        sys.exit(EXIT_CODES.get(error.code, FAILED))
