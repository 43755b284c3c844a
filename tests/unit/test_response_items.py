# SPDX-License-Identifier: Apache-2.0
"""Which tokens a text is made of, among those of a whole completion."""

from typing import Any

import pytest

from hf_triton_gateway.agents.response_items import split_at


def tokens(*texts: str) -> list[dict[str, Any]]:
    return [{"token": text} for text in texts]


@pytest.mark.parametrize(
    ("given", "text", "before", "of", "behind"),
    [
        (["Hm", "</think>", "\n", "Hel", "lo"], "Hello", ["Hm", "</think>", "\n"], ["Hel", "lo"], []),
        (["Hello", "<tool_call>", "{}"], "Hello", [], ["Hello"], ["<tool_call>", "{}"]),
        (["\n\nHel", "lo\n"], "Hello", [], ["\n\nHel", "lo\n"], []),
        (["a", "a"], "a", ["a"], ["a"], []),
        (["", "a", ""], "a", [""], ["a"], [""]),
        (["\ufffd", "\ufffd"], "é", [], ["\ufffd", "\ufffd"], []),
        (["Hm", "</think>", "\ufffd", "\ufffd"], "é", ["Hm", "</think>"], ["\ufffd", "\ufffd"], []),
        (
            ["</think>", "é ", "\ufffd", "\ufffd", "ok", "<end>"],
            "é 🎉ok",
            ["</think>"],
            ["é ", *"\ufffd\ufffd", "ok"],
            ["<end>"],
        ),
        (["a", "</think>", "a", "\ufffd", "\ufffd", ""], "a🎉", ["a", "</think>"], ["a", "\ufffd", "\ufffd"], [""]),
        ([], "a", [], [], []),
    ],
)
def test_tokens_are_split_where_they_spell_the_text(
    given: list[str], text: str, before: list[str], of: list[str], behind: list[str]
) -> None:
    parts = [[token["token"] for token in part] for part in split_at(tokens(*given), text)]
    assert parts == [before, of, behind]
