# SPDX-License-Identifier: Apache-2.0
"""The command line: `hf-triton`. A client of the server like any other; no module imports it."""

from __future__ import annotations

import sys

import click

from hf_triton import __version__
from hf_triton.cli.openai import openai
from hf_triton.cli.serve import serve
from hf_triton.errors import HfTritonError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hf-triton")
def cli() -> None:
    """Serve Hugging Face models on Triton Inference Server: a model is a folder."""


cli.add_command(serve)
cli.add_command(openai)


def main() -> None:
    """Run the command; an `HfTritonError` becomes one line on standard error and exit code 1."""
    try:
        cli()
    except HfTritonError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
