# SPDX-License-Identifier: Apache-2.0
"""`hf-triton settings`: what a model folder may set, from the declarations."""

from __future__ import annotations

import textwrap

import click

from hf_triton.errors import SettingsError, clip
from hf_triton.protocol.validation import allowed, default_words, meanings, suggest
from hf_triton.settings import SETTING_NAMES, ModelSettings
from hf_triton_cli.tables import show_table


@click.command(epilog="Example: hf-triton settings max_num_seqs")
@click.argument("name", required=False)
def settings(name: str | None) -> None:
    """List the settings of a model folder, or explain the setting NAME.

    They stand in config.pbtxt, in environment variables (HF_TRITON_ and the name in capitals), or in --set.
    """
    fields = ModelSettings.model_fields
    key = SETTING_NAMES.get(name or "", "")
    if name is not None and key not in fields:
        raise SettingsError(f"there is no setting {clip(name)}{suggest(name, fields, '`hf-triton settings`')}")
    meaning = meanings(ModelSettings)
    if name is None:
        rows = ((each, default_words(field), meaning[each].partition(". ")[0]) for each, field in fields.items())
        show_table([dict(zip(("setting", "default", "meaning"), row, strict=True)) for row in rows])
        return
    click.echo(f"{click.style(key, bold=True)}: {allowed(fields[key])}; default {default_words(fields[key])}\n")
    click.echo(textwrap.fill(meaning[key], 100))
