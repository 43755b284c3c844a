# SPDX-License-Identifier: Apache-2.0
"""Markdown on a terminal while it is generated."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

_FENCE: Final = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})(.*)")
"""A line that begins or ends a block of code; behind backticks on one that begins it stand no others (CommonMark)."""


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
        height = self._console.height
        text = "\n".join(self._tail.split("\n")[-height:])[-height * self._console.width :]  # all that can be seen
        lines = Text(text).wrap(self._console, self._console.width)
        self._live.update(Text("\n").join(lines[1 - height :]))

    def close(self) -> None:
        """Show what is left."""
        self._live.stop()
        self._print([self._tail])
        self._tail = ""

    def _print(self, blocks: list[str]) -> None:
        from markdown_it import MarkdownIt
        from rich.markdown import Markdown

        # rich shows neither HTML, such as a tag of the model's own, nor definitions of references: they are text here.
        parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")
        for block in filter(str.strip, blocks):
            markdown = Markdown(block)
            markdown.parsed = parser.parse(block)
            self._console.print(markdown, end="\n")


@contextlib.contextmanager
def markdown_stream() -> Iterator[MarkdownStream]:
    """A stream that is closed at the end."""
    stream = MarkdownStream()
    try:
        yield stream
    finally:
        stream.close()


def split_blocks(text: str) -> tuple[list[str], str]:
    """The blocks of Markdown that are complete, and the rest.

    A block ends with a blank line that no fence is open at and no indented line follows, which may belong to a list.
    """
    blocks: list[str] = []
    lines: list[str] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        if lines and not fence and lines[-1].isspace() and not line[0].isspace():
            blocks.append("".join(lines))
            lines = []
        lines.append(line)
        if matched := _FENCE.match(line):
            mark, rest = matched.groups()
            if not fence:
                fence = mark
            elif mark.startswith(fence) and not rest.strip():
                fence = ""
    return blocks, "".join(lines)
