# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from hf_triton.errors import clip
from hf_triton.folders.cards import CARDS, CPU
from hf_triton.folders.model_folder import TASKS


def read_settings(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """The values of a repeatable option KEY=VALUE, by key."""
    settings: dict[str, str] = {}
    for given in values:
        name, equals, text = given.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"must be KEY=VALUE, got {clip(given)}")
        if name in settings:
            raise click.BadParameter(f"{clip(name)} is given twice: give it once")
        settings[name] = text
    return settings


def not_writable(folder: Path, error: OSError) -> click.UsageError:
    """The error of a folder that `--into` cannot write to."""
    return click.UsageError(f"{folder} cannot be written to ({error.strerror}): choose another folder with --into")


SET: Final = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", callback=read_settings, help="A setting. Repeatable."
)
TASK: Final = click.option(
    "--task", type=click.Choice(TASKS), help="What the model does. By default what the checkpoint's files say."
)


class CardName(click.ParamType[str]):
    """The name of a card, or `cpu`."""

    name = "card"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = str(value).lower().replace("_", "-")
        if name != CPU and name not in CARDS:
            near = difflib.get_close_matches(name[:20], CARDS, n=1)
            hint = f", did you mean {near[0]}" if near else ""
            self.fail(f"there is no card {clip(value)}{hint}; known are {', '.join([CPU, *CARDS])}", param, ctx)
        return name
