# SPDX-License-Identifier: Apache-2.0
"""Markdown on a terminal while it is generated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class MarkdownStream:
    """Shows blocks for good when they are complete, and the last one as plain text until then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, transient=True, refresh_per_second=10)
        self._tail = ""

    def write(self, piece: str) -> None:
        """Show a piece."""
        from rich.text import Text

        self._live.start()
        blocks, self._tail = split_blocks(self._tail + piece)
        self._print(blocks)
        lines = Text(self._tail).wrap(self._console, self._console.width)
        self._live.update(Text("\n").join(lines[1 - self._console.height :]))

    def close(self) -> None:
        """Show what is left."""
        self._live.stop()
        self._print([self._tail])
        self._tail = ""

    def _print(self, blocks: list[str]) -> None:
        from rich.markdown import Markdown

        for block in filter(str.strip, blocks):
            self._console.print(Markdown(block), end="\n")


@contextlib.contextmanager
def markdown_stream() -> Iterator[MarkdownStream]:
    """A stream that is closed at the end."""
    stream = MarkdownStream()
    try:
        yield stream
    finally:
        stream.close()


def split_blocks(text: str) -> tuple[list[str], str]:
    """The blocks that a blank line ends, and the rest; a fenced block of code is one."""
    blocks, lines, is_fenced = [], [], False
    for line in text.splitlines(keepends=True):
        lines.append(line)
        if line.lstrip().startswith(("```", "~~~")):
            is_fenced = not is_fenced
        elif line.isspace() and line.endswith("\n") and not is_fenced:
            blocks.append("".join(lines))
            lines = []
    return blocks, "".join(lines)
