# SPDX-License-Identifier: Apache-2.0
"""Blocks of an answer as output items of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hf_triton_gateway.agents.answer_blocks import CUSTOM_CALL, REASONING, TEXT, TOOL_CALL, Block
from hf_triton_gateway.agents.response_tools import ResponseTools
from hf_triton_gateway.chat.openai_logprobs import REPLACEMENT, chat_logprobs
from hf_triton_gateway.triton.triton_messages import Outputs

PREFIXES: Final[Mapping[str, str]] = {REASONING: "rs", TEXT: "msg", TOOL_CALL: "fc", CUSTOM_CALL: "ctc"}
"""Item ids begin with these."""
Tokens = list[dict[str, Any]]
"""Log probabilities, one a token."""


class ResponseItems:
    """Writes the items of one response; their ids are made of `identity`."""

    def __init__(self, identity: str, tools: ResponseTools) -> None:
        self._identity = identity
        self._tools = tools
        self._unread: Tokens = []  # of tokens whose text has not come yet
        self._logprobs: dict[int, Tokens] = {}  # of texts, by index

    def id_of(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._identity}_{block.index}"

    def item(self, block: Block, status: str, text: str | None = None) -> dict[str, Any]:
        """A block as an output item.

        Args:
            block: The block.
            status: `in_progress`, `completed` or `incomplete`.
            text: Its text; by default the block's. Empty content has no part if the item is in progress.
        """
        text = block.text if text is None else text
        if block.kind == REASONING:
            content = [{"type": "reasoning_text", "text": text}] if text or status != "in_progress" else []
            item: dict[str, Any] = {"type": "reasoning", "summary": [], "content": content}
        elif block.kind == TEXT:
            parts = [self.part(block, text)] if text or status != "in_progress" else []
            item = {"type": "message", "role": "assistant", "content": parts}
        else:
            name, namespace = self._tools.name_of(block.name)
            of_namespace = {} if namespace is None else {"namespace": namespace}
            kind, field = ("custom_tool_call", "input") if block.kind == CUSTOM_CALL else ("function_call", "arguments")
            item = {"type": kind, "call_id": block.call_id, "name": name, **of_namespace, field: text}
        return {"id": self.id_of(block), "status": status, **item}

    def name_of(self, block: Block) -> str:
        """The name of the tool that a block calls, without its namespace."""
        return self._tools.name_of(block.name)[0]

    def part(self, block: Block, text: str) -> dict[str, Any]:
        """The content of a message."""
        logprobs = self._logprobs.get(block.index, []) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    # --- log probabilities -------------------------------------------------------------------------------------------

    def read_logprobs(self, outputs: Outputs) -> None:
        """Take the log probabilities of a response's tokens, if they were asked for."""
        if (logprobs := chat_logprobs(outputs, 0)) is not None:
            self._unread += map(_as_output_text, logprobs["content"])

    def take_logprobs(self, block: Block, text: str) -> Tokens:
        """The log probabilities of a piece of a text; those of reasoning and calls before it are dropped."""
        if block.kind != TEXT:
            return []
        _, tokens, self._unread = split_at(self._unread, text)
        self._logprobs.setdefault(block.index, []).extend(tokens)
        return tokens

    def end_logprobs(self, block: Block) -> Tokens:
        """The log probabilities of a whole text."""
        if self._unread and not self._logprobs.get(block.index):
            self.take_logprobs(block, block.text)
        return self._logprobs.get(block.index, [])


def split_at(tokens: Sequence[dict[str, Any]], text: str) -> tuple[Tokens, Tokens, Tokens]:
    """The tokens before, of and behind the last place where they spell a text.

    Characters that are split between tokens are left out of the comparison; if nothing fits, all tokens are the text's.
    """
    words = [token["token"] for token in tokens]
    if (start := "".join(words).rfind(text)) < 0:
        words = [word.replace(REPLACEMENT, "") for word in words]
        whole = set("".join(words))
        text = "".join(character for character in text if character in whole)
        if (start := "".join(words).rfind(text)) < 0:
            return [], list(tokens), []
    parts: tuple[Tokens, Tokens, Tokens] = [], [], []
    position, end = 0, start + len(text)
    for token, word in zip(tokens, words, strict=True):
        ends_at = position + len(word)
        is_split = not word and token["token"] and start <= position <= end
        parts[1 if is_split else 0 if ends_at <= start else 1 if position < end else 2].append(token)
        position = ends_at
    return parts


def _as_output_text(token: dict[str, Any]) -> dict[str, Any]:
    """A token as an output text has it: its bytes are a list, empty if they are not known."""
    top = {"top_logprobs": [*map(_as_output_text, token["top_logprobs"])]} if "top_logprobs" in token else {}
    return {**token, "bytes": token["bytes"] or [], **top}
