# SPDX-License-Identifier: Apache-2.0
"""Short texts of regular expressions."""

import re
import time

import pytest

from hf_triton.grammar.regex_example import sample

SAMPLES = {
    "": "",
    "river": "river",
    "[a-z]+x": "ax",
    "[^a]b": "bb",
    "[^a-y]": "z",
    r"\d{3}-\D\s\S\w\W": "000-a a0!",
    "(yes|no), sir": "no, sir",
    "(?:ab){2,}?c*": "abab",
    "(?i)a|(?P<word>bc)": "a",
    "(?>ab)c*+": "ab",
    r"^.*\n$": "\n",
    "[é-ü]🙂": "é🙂",
    "a{3,}": "aaa",
    "a(?=b)b": "ab",
}


@pytest.mark.parametrize("pattern", SAMPLES)
def test_a_short_text_is_made(pattern: str) -> None:
    text = sample(pattern)
    assert text is not None
    assert re.search(pattern, text)
    assert len(text) == len(SAMPLES[pattern])


def test_classes_of_unicode_are_guessed() -> None:
    assert sample(r"[\p{L} ]+\p{Nd}") == "a0"


@pytest.mark.parametrize(
    "pattern",
    ["(", r"\p", r"(a)\1", "(a{1000}){1000}", "a{99999999999}", "(" * 5000 + ")" * 5000, "a" * 20_000, "[^\\s\\S]"],
)
def test_none_is_made_of_what_is_wrong_or_too_large(pattern: str) -> None:
    assert sample(pattern) is None


@pytest.mark.parametrize("pattern", ["[^" + "é-ü" * 3000 + "]", "(" * 90 + "a{9}" + "){9}" * 90, "|".join("ab" * 3000)])
def test_a_hostile_pattern_takes_no_long_time(pattern: str) -> None:
    start_s = time.thread_time()
    sample(pattern)
    assert time.thread_time() - start_s < 5.0  # of what takes a tenth
