# SPDX-License-Identifier: Apache-2.0
"""An assistant's message, whole or in deltas, as a row of blocks: reasoning, text, tool calls. Knows no API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

REASONING: Final = "reasoning"
TEXT: Final = "text"
TOOL_CALL: Final = "tool_call"
CUSTOM_CALL: Final = "custom_call"
Kind: TypeAlias = Literal["reasoning", "text", "tool_call", "custom_call"]


@dataclass
class Block:
    """One block, the last of them still growing."""

    kind: Kind
    index: int
    """Position among the blocks."""
    call_id: str = ""
    name: str = ""
    """The tool that a call names."""
    call: int = -1
    """Position among the tool calls."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Reasoning, text, the arguments of a tool call as JSON text, or the input of a custom tool."""
        return "".join(self.pieces)


Step: TypeAlias = tuple[Literal["start", "delta", "end"], Block, str]
"""What a delta does to a block; the text is empty but for `delta`."""


class Blocks:
    """The blocks of one message, which is fed in deltas; a block ends where the next starts."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def feed(self, message: Mapping[str, Any]) -> Iterator[Step]:
        """The steps of a delta, or of a whole message."""
        if piece := message.get("reasoning_content"):
            yield from self._extend(Block(REASONING, len(self.blocks)), piece)
        if piece := message.get("content"):
            yield from self._extend(Block(TEXT, len(self.blocks)), piece)
        for position, call in enumerate(message.get("tool_calls") or ()):
            is_custom = "custom" in call
            tool = call["custom"] if is_custom else call.get("function", {})
            call_id, name = call.get("id") or "", tool.get("name") or ""
            kind: Kind = CUSTOM_CALL if is_custom else TOOL_CALL
            block = Block(kind, len(self.blocks), call_id, name, call.get("index", position))
            yield from self._extend(block, tool.get("input" if is_custom else "arguments") or "")

    def end(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield "end", self.blocks[-1], ""

    def _extend(self, block: Block, piece: str) -> Iterator[Step]:
        """Add a piece to the last block if that is of the same kind and call, or else to `block`."""
        last = self.blocks[-1] if self._is_open else None
        if last is None or (last.kind, last.call) != (block.kind, block.call):
            yield from self.end()
            self.blocks.append(block)
            self._is_open = True
            yield "start", block, ""
        else:
            block = last
        if piece:
            block.pieces.append(piece)
            yield "delta", block, piece


def blocks_of(message: Mapping[str, Any]) -> list[Block]:
    blocks = Blocks()
    for _ in blocks.feed(message):
        pass
    return blocks.blocks
