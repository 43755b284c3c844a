# SPDX-License-Identifier: Apache-2.0
"""The group of commands: imports a command's module when it runs, and shows the help in sections and colours."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import click

from hf_triton.errors import clip

HINTS: Final[Mapping[str, str]] = {
    "ps": "status",
    "ls": "list",
    "show": "list, status or check",
    "rm": "unload, or `hf cache rm` for files of the Hub",
    "stop": "unload",
    "start": "serve or load",
    "create": "new",
    "help": "--help",
    "version": "--version",
}
"""Other programs' words for what a command here does."""


class HelpFormatter(click.HelpFormatter):
    """Click's, with colours on a terminal."""

    def write_heading(self, heading: str) -> None:
        super().write_heading(click.style(heading, bold=True))

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **options: Any) -> None:
        super().write_dl([(click.style(name, fg="cyan"), text) for name, text in rows], *args, **options)


class HelpContext(click.Context):
    """Click's, with that formatter; without colours where NO_COLOR is set."""

    formatter_class = HelpFormatter

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if os.environ.get("NO_COLOR"):
            self.color = False


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for.

    Args:
        sections: Of the help: by title, each command's line.
        modules: By command, where that is not `hf_triton_cli.NAME:NAME`: `module:attribute`.
    """

    context_class = HelpContext

    def __init__(
        self, *args: Any, sections: Mapping[str, Mapping[str, str]], modules: Mapping[str, str], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._sections = sections
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in self._sections.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, attribute = self._modules.get(cmd_name, f"{cmd_name}:{cmd_name}").partition(":")
        command: click.Command = getattr(importlib.import_module(f"hf_triton_cli.{module}"), attribute)
        for each in (command, *getattr(command, "commands", {}).values()):
            each.context_class = HelpContext
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name.startswith("-") or name in self.list_commands(ctx):
            return super().resolve_command(ctx, args)
        near = HINTS.get(name) or " or ".join(difflib.get_close_matches(name[:60], self.list_commands(ctx)))
        hint = f", did you mean {near}?" if near else "; `hf-triton --help` lists all"
        raise click.UsageError(f"there is no command {clip(name)}{hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in self._sections.items():
            with formatter.section(title):
                formatter.write_dl(list(section.items()))
