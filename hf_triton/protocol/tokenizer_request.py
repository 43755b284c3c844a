# SPDX-License-Identifier: Apache-2.0
"""Questions to a model's tokenizer, of whatever task: tokens of a text, the text of tokens, and what it is itself.

A request with the parameter `tokenizer_request`, JSON text of a `TokenizerRequest`, is answered with JSON in the output
`output`, outside the counts of requests.
"""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

TOKENIZER_REQUEST: Final = "tokenizer_request"
"""The parameter."""


class TokenizerRequest(BaseModel):
    """What is asked: `text`, or `tokens`, or, without either, the tokenizer's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text: str | None = None
    """A text, whose tokens are asked for."""

    tokens: list[int] | None = None
    """Token ids, whose text is asked for."""

    add_special_tokens: bool = True
    """Whether the text's tokens have special ones."""
