# SPDX-License-Identifier: Apache-2.0
"""`hf-triton settings`: what a model folder may set, from the declarations."""

from __future__ import annotations

import textwrap

import click

from hf_triton.cli.tables import show_table
from hf_triton.errors import SettingsError, clip
from hf_triton.protocol.validation import allowed, default_words, suggest
from hf_triton.settings import SETTING_NAMES, ModelSettings

MEANING_WIDTH = 60


@click.command(epilog="Example: hf-triton settings max_num_seqs")
@click.argument("name", required=False)
def settings(name: str | None) -> None:
    """List the settings of a model folder, or explain the setting NAME.

    They stand in config.pbtxt, in environment variables (HF_TRITON_ and the name in capitals), or in --set.
    """
    fields = ModelSettings.model_fields
    if name is not None and name not in SETTING_NAMES:
        raise SettingsError(f"there is no setting {clip(name)}{suggest(name, fields, '`hf-triton settings`')}")
    if name is None:
        meanings = {key: " ".join((field.description or "").split()) for key, field in fields.items()}
        show_table(
            [
                {"setting": key, "default": default_words(field), "meaning": meanings[key].partition(". ")[0]}
                for key, field in fields.items()
            ]
        )
        return
    field = fields[SETTING_NAMES[name]]
    meaning = " ".join((field.description or "").split())
    click.echo(f"{click.style(SETTING_NAMES[name], bold=True)}: {allowed(field)}; default {default_words(field)}\n")
    click.echo(textwrap.fill(meaning, 100))
