# SPDX-License-Identifier: Apache-2.0
"""Lines of a command that goes on whether or not they can be printed."""

from __future__ import annotations

import os
import sys

import click


def say(text: str, *, err: bool = False) -> None:
    """Print a line; if its reader has ended, as `head -1` does, this line and later ones go nowhere."""
    try:
        click.echo(text, err=err)
    except OSError:
        stream = sys.stderr if err else sys.stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or the line is tried again at exit
