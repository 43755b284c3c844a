# SPDX-License-Identifier: Apache-2.0
"""Parts of OpenAI's responses, from the outputs of a model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

from hf_triton.openai.triton_messages import Outputs

FINISH_REASONS: Final[Mapping[str, str]] = {"stop": "stop", "length": "length", "deadline": "length"}
NO_DELTAS: Final = ("", "{}")


def text_of(outputs: Outputs, index: int) -> str:
    """A completion's text, or the delta of it."""
    return str(outputs["text_output"][index])


def message_of(outputs: Outputs, index: int) -> dict[str, Any]:
    """The assistant's message: `content`, and `reasoning_content` and `tool_calls` if there are any."""
    if "message" in outputs:
        message: dict[str, Any] = json.loads(outputs["message"][index])
        return {"role": "assistant", "content": None, **message}
    return {"role": "assistant", "content": text_of(outputs, index)}


def delta_of(outputs: Outputs, index: int) -> str:
    """The delta of an assistant's message as JSON, empty if there is none."""
    if "message" in outputs:
        delta = str(outputs["message"][index])
        return "" if delta in NO_DELTAS else delta
    text = text_of(outputs, index)
    return f'{{"content": {json.dumps(text)}}}' if text else ""


def finish_reason_of(outputs: Outputs, index: int) -> str:
    """Why a completion ended."""
    return FINISH_REASONS.get(outputs["finish_reason"][index], "stop")


def chat_finish_reason(reason: str, has_tool_calls: bool) -> str:
    """Why a chat's answer ended: an answer in which the model has chosen to call tools says so."""
    return "tool_calls" if has_tool_calls and reason == "stop" else reason


def usage_of(outputs: Outputs, num_choices: int = 1) -> dict[str, int]:
    """Counts of tokens.

    Args:
        outputs: Of a whole response.
        num_choices: Completions per prompt, which share its tokens.
    """
    prompt_tokens = sum(outputs["num_input_tokens"][::num_choices])
    completion_tokens = sum(outputs["num_output_tokens"])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def json_output(outputs: Outputs, name: str, index: int) -> Any:
    """An output that holds JSON; None if it is not filled."""
    values = outputs.get(name)
    return json.loads(values[index]) if values and values[index] else None


def now_s() -> int:
    """Seconds since 1970."""
    return int(time.time())
