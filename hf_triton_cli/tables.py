# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal, lines with tabs where standard output is none; and plots."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

COLOURS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("READY", "ok"), "green"),
    **dict.fromkeys(("LOADING", "UNLOADING", "ASLEEP", "warning"), "yellow"),
    **dict.fromkeys(("UNAVAILABLE", "error"), "red"),
}
"""The colours of states."""
DIRECTIONS: Final = frozenset(("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"))
"""Unicode's marks that change the direction of what follows."""

MAX_WHOLE: Final = 12
"""Characters of a state or a number: a column of such cells breaks none while the others have room."""


def show_table(rows: Sequence[Mapping[str, object]], below: str = "") -> None:
    """Print rows of the same columns, of which the first names the row; None is shown as a dash.

    A terminal shows the column `below` under the table.
    """
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

    console = Console()
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    above = [number for number, column in enumerate(columns) if column != below]
    words = {number: [*columns[number].split("_"), *(line[number] for line in cells)] for number in above}
    widths = {number: max(map(len, words[number])) for number in above}
    has_room = sum(min(width, MAX_WHOLE) + 1 for width in widths.values()) <= console.width
    for number, width in widths.items():
        is_whole = has_room and width <= MAX_WHOLE
        table.add_column(columns[number].replace("_", "\n"), overflow="fold", no_wrap=is_whole)
    for line in cells:
        table.add_row(*(Text(line[number], COLOURS.get(line[number], "")) for number in above))
    console.print(table)
    for row in rows:
        if row.get(below):
            console.print(Text.assemble((f"{row[columns[0]]}: ", "bold"), printable(str(row[below]))))


def size_words(num_bytes: int) -> str:
    """A size as people write it: `2.9 MB`."""
    from rich.filesize import decimal

    return decimal(num_bytes)


def new_figure() -> Any:
    """A figure of matplotlib to draw on; None, and a line on standard error, where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        click.echo("No plot: `pip install 'hf-triton[bench]'` installs matplotlib.", err=True)
        return None
    return Figure(figsize=(9, 4), layout="constrained")


def printable(text: str) -> str:
    """A text without control characters and marks of direction, which could steer the terminal; lines and tabs stay."""
    return "".join(
        char
        for char in text
        if char in "\n\t" or (unicodedata.category(char) != "Cc" and unicodedata.bidirectional(char) not in DIRECTIONS)
    )
