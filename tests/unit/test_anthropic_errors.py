# SPDX-License-Identifier: Apache-2.0
"""Errors in Anthropic's form."""

from hf_triton.openai.errors import ApiError

ROOM = "messages has 9146 tokens, which leaves room for max_tokens <= 31814 in the context of 40960, got 32000"


def test_claude_code_finds_its_words_where_max_tokens_does_not_fit() -> None:
    """Claude Code 2.1 looks for these words, and asks again with what is left."""
    error = ApiError(400, ROOM)
    words = "input length and `max_tokens` exceed context limit: 9146 + 32000 > 40960"
    assert error.body("/v1/messages")["error"]["message"] == f"{ROOM}: {words}"
    assert error.body("/v1/chat/completions")["error"]["message"] == ROOM
