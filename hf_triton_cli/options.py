# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from hf_triton.errors import clip
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


SET: Final = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", callback=read_settings, help="A setting. Repeatable."
)
TASK: Final = click.option(
    "--task", type=click.Choice(TASKS), help="What the model does. By default what the checkpoint's files say."
)
