# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal, lines with tabs where standard output is none; and plots."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import click


def show_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows of the same columns; None is shown as a dash."""
    if not rows:
        return
    columns = list(rows[0])
    cells = [["-" if row[column] in (None, "") else printable(str(row[column])) for column in columns] for row in rows]
    if not sys.stdout.isatty():
        click.echo("\n".join("\t".join(" ".join(cell.split()) for cell in line) for line in [columns, *cells]))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in cells:
        table.add_row(*map(Text, line))
    Console().print(table)


def new_figure() -> Any:
    """A figure of matplotlib to draw on; None, and a line on standard error, where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        click.echo("No plot: `pip install 'hf-triton[bench]'` installs matplotlib.", err=True)
        return None
    return Figure(figsize=(9, 4), layout="constrained")


def rounded(figure: float | None, digits: int = 2) -> float | None:
    """A figure of a table; None if it is not known."""
    return None if figure is None else round(figure, digits)


def printable(text: str) -> str:
    """A text without control characters, which could steer the terminal; line ends and tabs stay."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
