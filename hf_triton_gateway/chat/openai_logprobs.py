# SPDX-License-Identifier: Apache-2.0
"""Log probabilities in OpenAI's two forms, from the outputs `logprobs` and `prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any, Final

from hf_triton_gateway.chat.answers import json_output
from hf_triton_gateway.triton.triton_messages import Outputs

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
CONTINUATION: Final = bytes(range(0x80, 0xC0))
"""Bytes of a character that do not begin it."""
MAX_TOKEN_BYTES: Final = 1024
"""Bytes that a prompt's first token may have, if a stop string has cut the text."""


def chat_logprobs(outputs: Outputs, index: int) -> dict[str, Any] | None:
    """The `logprobs` of a chat's choice; None if they were not asked for."""
    positions = json_output(outputs, "logprobs", index)
    return None if positions is None else chat_positions(positions)


def chat_positions(positions: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The same of these tokens."""
    return {"content": [_chat_position(list(position.values())) for position in positions], "refusal": None}


def _chat_position(tokens: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One token and the most likely ones: those with a rank."""
    return _chat_token(tokens[0]) | {"top_logprobs": [_chat_token(token) for token in _top(tokens)]}


def _chat_token(token: Mapping[str, Any]) -> dict[str, Any]:
    data = _bytes_of(token)
    return {"token": token["decoded_token"], "logprob": token["logprob"], "bytes": None if data is None else [*data]}


def _bytes_of(token: Mapping[str, Any]) -> bytes | None:
    """A token's bytes, which may be a part of a character; None: they are not known."""
    if "bytes" in token:
        return bytes(token["bytes"])
    text: str = token["decoded_token"]
    return None if REPLACEMENT in text else text.encode(errors="replace")


def _top(tokens: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted((token for token in tokens if token["rank"] is not None), key=lambda token: int(token["rank"]))


class TextOffsets:
    """The positions of a choice's tokens in its text: those of one character all begin where it does."""

    def __init__(self) -> None:
        self._num_characters = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def are_new(self) -> bool:
        """Whether no text has come yet."""
        return self._num_characters == 0

    def add(self, token: Mapping[str, Any]) -> int:
        """The offset of the next token."""
        if "bytes" in token:
            offset = self._num_characters
            self._num_characters += len(self._utf8.decode(bytes(token["bytes"])))
        else:  # a character before it that has not ended is one of replacement
            offset = self._num_characters + len(self._utf8.decode(b"", final=True))
            self._num_characters = offset + len(token["decoded_token"])
        return offset


def completion_logprobs(
    positions: list[Mapping[str, Any] | None], text: str, offsets: TextOffsets | None = None
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice, or of a piece of it.

    Args:
        positions: One for each token; None for the first token of a prompt, which has no probability.
        text: The choice's text. The first token of a prompt is what the other tokens leave of it.
        offsets: Those of the choice so far; None: it begins here.
    """
    offsets = offsets or TextOffsets()
    listed = [[*position.items()] if position else [] for position in positions]
    own: list[Mapping[str, Any]] = [tokens[0][1] if tokens else {"decoded_token": ""} for tokens in listed]
    if positions and positions[0] is None:
        own[0] = _first_token(text, own[1:])
    elif own and offsets.are_new:
        own[0] = _beginning(text, own[0])
    return {
        "tokens": [token["decoded_token"] for token in own],
        "token_logprobs": [token.get("logprob") for token in own],
        "top_logprobs": [_top_by_token(tokens) if tokens else None for tokens in listed],
        "text_offset": [offsets.add(token) for token in own],
    }


def _beginning(text: str, token: Mapping[str, Any]) -> Mapping[str, Any]:
    """A token at the beginning of a text, which has none of the space that sentencepiece's tokens begin with."""
    first = token["decoded_token"]
    word = first.removeprefix(" ")
    return token if text.startswith(first) or not text.startswith(word) else {**token, "decoded_token": word}


def _first_token(text: str, others: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What the other tokens leave of a text, or of its beginning: a stop string has cut it."""
    whole, rest = text.encode(), b"".join(_bytes_of(token) or token["decoded_token"].encode() for token in others)
    begun = len(rest) - len(rest.lstrip(CONTINUATION))  # of a character that the first token may begin
    shown = [rest[:start] + rest[start:].decode(errors="replace").encode() for start in (begun, 0)]
    # A tokenizer may write a mark for each byte of a character that is cut off.
    pairs = [(whole, shown[0]), (whole, shown[1]), (_without_marks(whole), _without_marks(shown[1]))]
    left = next((each.removesuffix(end) for each, end in pairs if each.endswith(end)), None)
    if left is None:
        ends = range(min(len(whole), MAX_TOKEN_BYTES) + 1)
        left = whole[: next((end for end in ends if shown[0].startswith(whole[end:])), 0)]
    first = left.decode(errors="replace")
    return {"decoded_token": first} | ({"bytes": [*left]} if REPLACEMENT in first else {})


def _without_marks(text: bytes) -> bytes:
    return text.replace(REPLACEMENT.encode(), b"")


def _top_by_token(tokens: list[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """The token itself and the most likely ones; of several with one text, all but the first by their bytes or ids."""
    logprobs: dict[str, float] = {}
    for token_id, token in (tokens[0], *sorted(tokens[1:], key=lambda item: int(item[1]["rank"]))):
        name = token["decoded_token"]
        if name in logprobs and "bytes" in token:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])
        if name in logprobs:
            name = f"token_id:{token_id}"
        logprobs[name] = token["logprob"]
    return logprobs
