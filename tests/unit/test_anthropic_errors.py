# SPDX-License-Identifier: Apache-2.0
"""Errors in Anthropic's form."""

import re

import pytest

from hf_triton_gateway.http.api_errors import ApiError, triton_error
from hf_triton_gateway.http.client_names import OWN_NAMES

ROOM = "messages has 9146 tokens, which leaves room for max_tokens <= 31814 in the context of 40960, got 32000"
TOO_LONG = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)


def told(**sizes: int) -> str:
    error = ApiError(400, ROOM, sizes=sizes)
    assert error.body("/v1/chat/completions")["error"]["message"] == ROOM
    return str(error.body("/v1/messages")["error"]["message"])


def test_claude_code_finds_its_words_where_max_tokens_does_not_fit() -> None:
    """Claude Code 2.1 looks for these words, and asks again with what is left."""
    words = "input length and `max_tokens` exceed context limit: 9146 + 32000 > 40960"
    assert told(tokens=9146, new_tokens=32000, limit=40960) == f"{ROOM}: {words}"


@pytest.mark.parametrize("more", [{}, {"new_tokens": 5}])
def test_and_where_the_prompt_alone_does_not(more: dict[str, int]) -> None:
    """It compacts the conversation then."""
    assert told(tokens=513, limit=512, **more) == "prompt is too long: 513 tokens > 512 maximum"


@pytest.mark.parametrize(("num_bytes", "limit"), [(65_537, 65_536), (8193, 8192), (17, 16), (10**9, 1000)])
def test_and_where_bytes_are_counted(num_bytes: int, limit: int) -> None:
    found = TOO_LONG.match(told(bytes=num_bytes, limit=limit))
    assert found
    assert int(found[1]) > int(found[2])


def test_other_errors_keep_their_sentence() -> None:
    assert told() == told(tokens=3, limit=8) == ROOM
    other = triton_error('context_exceeded: {"sentence": "audio has 9 s", "field": null, "sizes": {}}', OWN_NAMES)
    assert other.body("/v1/messages")["error"]["message"] == "audio has 9 s"
