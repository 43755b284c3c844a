# SPDX-License-Identifier: Apache-2.0
"""Log probabilities in OpenAI's two forms, from the outputs `logprobs` and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

from hf_triton.openai.answers import json_output
from hf_triton.openai.triton_messages import Outputs

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


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
    text = token["decoded_token"]
    # A part of a character has no text of its own, so its bytes are not known here.
    return {
        "token": text,
        "logprob": token["logprob"],
        "bytes": None if REPLACEMENT in text else list(text.encode(errors="replace")),
    }


def _top(tokens: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted((token for token in tokens if token["rank"] is not None), key=lambda token: int(token["rank"]))


def completion_logprobs(positions: list[Mapping[str, Any] | None], text: str, start: int = 0) -> dict[str, Any]:
    """The `logprobs` of a completion's choice, or of a piece of it.

    Args:
        positions: One for each token; None for the first token of a prompt, which has no probability.
        text: The choice's text. The first token of a prompt is what the other tokens leave of it.
        start: Where the first token begins in the choice's text.
    """
    listed = [list(position.values()) if position else [] for position in positions]
    tokens = [tokens[0]["decoded_token"] if tokens else "" for tokens in listed]
    if positions and positions[0] is None and (rest := "".join(tokens)) and text.endswith(rest):
        tokens[0] = text.removesuffix(rest)
    return {
        "tokens": tokens,
        "token_logprobs": [tokens[0]["logprob"] if tokens else None for tokens in listed],
        "top_logprobs": [_top_by_token(tokens) if tokens else None for tokens in listed],
        "text_offset": [*accumulate(map(len, tokens), initial=start)][:-1],
    }


def _top_by_token(tokens: list[Mapping[str, Any]]) -> dict[str, float]:
    """The most likely tokens and the token itself; of two with the same text, the more likely one."""
    return {token["decoded_token"]: token["logprob"] for token in (tokens[0], *reversed(_top(tokens)))}
