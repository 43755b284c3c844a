# SPDX-License-Identifier: Apache-2.0
"""What it costs to read messages: `python benchmarks/response_parser.py` prints a table of microseconds per token.

Texts are read four characters at a time, about a token each, as in a stream. A cost per token that grows with the
length would be quadratic time.
"""

from __future__ import annotations

import json
import time
from typing import Any

from hf_triton.protocol.chat import parse_chat
from hf_triton.tasks.text_generation.response_template import MessageFormat, shipped_template

TOKEN = 4
LENGTHS = (5_000, 50_000, 500_000)
TOOLS = [{"type": "function", "function": {"name": "write"}}]
WORDS = "the quick brown fox <b>jumps</b> over the lazy dog;\n"
WHITE_SPACE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}
"""The patterns begin with white space, as in transformers' own response templates."""


def cases(length: int) -> dict[str, tuple[Any, str]]:
    """Template and text, by name."""
    text = (WORDS * (length // len(WORDS) + 1))[:length]
    call = json.dumps({"name": "write", "arguments": {"text": text}})
    qwen3, gpt_oss = shipped_template("qwen3"), shipped_template("gpt-oss")
    return {
        "no response template, content": (None, text),
        "qwen3, content": (qwen3, text),
        "qwen3, reasoning": (qwen3, f"<think>{text}"),
        "qwen3, one tool call": (qwen3, f"<tool_call>{call}</tool_call>"),
        "qwen3, newlines": (qwen3, "\n" * length),
        "gpt-oss, reasoning": (gpt_oss, f"<|channel|>analysis<|message|>{text}"),
        "white space patterns, content": (WHITE_SPACE_TEMPLATE, text),
        "white space patterns, newlines": (WHITE_SPACE_TEMPLATE, "\n" * length),
    }


def main() -> None:
    """Print the table."""
    chat = parse_chat('[{"role": "user", "content": "x"}]', {"tools": TOOLS}, 10_000)
    print(f"{'':34}{'characters':>12}{'us/token':>10}{'s in all':>10}{'s at once':>11}")
    for length in LENGTHS:
        for name, (template, text) in cases(length).items():
            plan = MessageFormat(template, {}).plan(chat, "", is_constrained=False)
            times_s = []
            for step in (TOKEN, len(text)):
                reader = plan.build_reader()
                start_s = time.perf_counter()
                for begin in range(0, len(text), step):
                    reader.feed(text[begin : begin + step])
                    if step == TOKEN:
                        reader.take()
                reader.finish()
                times_s.append(time.perf_counter() - start_s)
            per_token_us = times_s[0] / (len(text) / TOKEN) * 1e6
            print(f"{name:34}{len(text):>12}{per_token_us:>10.1f}{times_s[0]:>10.3f}{times_s[1]:>11.3f}")


if __name__ == "__main__":
    main()
