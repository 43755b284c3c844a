# SPDX-License-Identifier: Apache-2.0
"""The syntaxes of values in tool calls: JSON, dialects of it, and Python. Knows no tags around them.

transformers' content parsers read each of them, but for some of what chat templates write: keys of a dialect that are
no words, `None`, and line ends and backslashes in the strings of Python. That is written here as they read it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, Final

from hf_triton.tasks.text_generation.message import JsonDepth

PYTHON: Final = "python-call-list"
"""transformers' name of the content that is a list of calls in Python."""
STRING: Final = re.compile(r"'(?:\\.|[^'\\])*(?:'|\\?\Z)|\"(?:\\.|[^\"\\])*(?:\"|\\?\Z)", re.DOTALL)
"""One of Python; the last may be cut off, or each quote in it would be tried as the beginning of one."""
ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)|[\n\r]", re.DOTALL)
BARE: Final = (
    r'"(?:\\.|[^"\\])*(?:"|(?P<cut>\\?\Z))|'
    r'(?<=[{,])\s*(?P<key>[^\s{}\[\],:"][^{}\[\],:"]{0,256})(?=:)|\b(?P<name>True|False|None)\b'
)
"""A string of JSON, perhaps cut off, a key without quotes, and what Python calls otherwise than JSON."""
PYTHON_TOKEN: Final = re.compile(
    rf"{STRING.pattern}|(?<![\w.])(?:(?P<number>-?[0-9]{{16,400}}(?![\w.]))|(?P<float>-?[0-9]+(?:\.[0-9]+)?[eE]\+?[0-9]{{3,9}}))",
    re.DOTALL,
)
MAX_NUMBER: Final = 2**53 - 1
"""The largest whole number that transformers reads in Python."""
LINE_ENDS: Final = {"\n": "\\n", "\r": "\\r", "\\\n": ""}
PLAIN: Final = {"True": "true", "False": "false", "None": "null"}


def depth_of(field: Any) -> JsonDepth | None:
    """What finds the end of a region's value; None: it is not known before the value is parsed."""
    if field.content == PYTHON:
        return JsonDepth((("'", "'"), ('"', '"')))
    if field.content != "json" or "allow_non_json" in field.content_args:
        return None
    delims = field.content_args.get("string_delims")
    return JsonDepth([(start, end) for start, end in delims], escape="") if delims else JsonDepth()


def plain_text(field: Any, text: str) -> str:
    """A region's value as transformers' content parser reads it.

    Raises:
        ValueError: A string never ends, which that parser takes quadratic time to find.
    """
    if field.content == PYTHON:
        return PYTHON_TOKEN.sub(_python_token, text)
    if field.content == "json" and (delims := field.content_args.get("string_delims")):
        strings = "|".join(f"{re.escape(start)}(.*?){re.escape(end)}" for start, end in delims)
        return re.sub(f"{strings}|{BARE}", _plain_token, text, flags=re.DOTALL)
    return text


def _python_token(match: re.Match[str]) -> str:
    """A string; a float, the largest one at most; or a whole number, as text if it is too large for transformers.

    The schema makes such a text a number again.
    """
    if match["float"]:
        return repr(finite(float(match["float"])))
    if match["number"] is None:
        return ESCAPE.sub(_escape, match[0])
    return match[0] if abs(int(match[0])) <= MAX_NUMBER else f'"{match[0]}"'


def _plain_token(match: re.Match[str]) -> str:
    if match["cut"] is not None:
        raise ValueError("a string that never ends")
    if match["name"]:
        return PLAIN[match["name"]]
    string = next((string for string in match.groups() if string is not None), None)
    return match[0] if string is None else json.dumps(string.rstrip() if match["key"] else string)


def _escape(match: re.Match[str]) -> str:
    """What a line end or a backslash in a string of Python means, as transformers reads it."""
    if (meant := LINE_ENDS.get(match[0])) is not None:
        return meant
    return match[0] if match[1][0] in "\\'\"/bfnrt" or len(match[1]) > 1 else f"\\\\{match[1]}"


def finite(number: float) -> float:
    """A number, the largest one in place of infinity: JSON has none."""
    return math.copysign(sys.float_info.max, number) if math.isinf(number) else number


def read_python(text: str) -> Any:
    """An object or array in Python's syntax; another text as it is."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    try:
        [call] = parse_content(f"[value(it={text})]", PYTHON, {})
    except ValueError:
        return text
    value = call["arguments"].get("it")
    return value if isinstance(value, dict | list) and len(call["arguments"]) == 1 else text
