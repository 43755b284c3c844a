# SPDX-License-Identifier: Apache-2.0
"""Parts of OpenAI's responses, from the outputs of a model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from hf_triton_gateway.http.bodies import LARGE_BYTES
from hf_triton_gateway.triton.triton_messages import Outputs

FINISH_REASONS: Final[Mapping[str, str]] = {"stop": "stop", "length": "length", "deadline": "length"}
COUNTS: Final = ("num_input_tokens", "num_cached_tokens", "num_output_tokens")
"""Outputs that `usage_of` reads."""
NO_DELTAS: Final = ("", "{}")
DECODER: Final = json.JSONDecoder()
BETWEEN: Final = re.compile(r"[\s,]*")
"""Elements of an array."""


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


def stop_reason_of(outputs: Outputs, index: int) -> str | None:
    """The stop string that ended a completion, vLLM's `stop_reason`."""
    return (outputs["stop_string"][index] if "stop_string" in outputs else None) or None


def chat_finish_reason(reason: str, has_tool_calls: bool) -> str:
    """Why a chat's answer ended: an answer in which the model has chosen to call tools says so."""
    return "tool_calls" if has_tool_calls and reason == "stop" else reason


def usage_of(outputs: Outputs, num_choices: int = 1) -> dict[str, Any]:
    """Counts of tokens of a whole response; the `num_choices` completions of a prompt share its tokens."""
    return usage(
        sum(outputs["num_input_tokens"][::num_choices]),
        sum(outputs.get("num_output_tokens", ())),
        sum(outputs["num_cached_tokens"][::num_choices]) if "num_cached_tokens" in outputs else None,
        sum(outputs.get("num_reasoning_tokens", ())),
    )


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """OpenAI's `usage`; as vLLM's it has `cached_tokens` if they are known, and `reasoning_tokens` if there are any."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **({} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}),
        **({"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}} if reasoning_tokens else {}),
    }


def json_output(outputs: Outputs, name: str, index: int) -> Any:
    """An output that holds JSON; None if it is not filled."""
    values = outputs.get(name)
    return _read_json(values[index]) if values and values[index] else None


def _read_json(text: str) -> Any:
    """A value; a long array is read element by element, so that no call takes long."""
    if len(text) <= LARGE_BYTES or not text.startswith("["):
        return json.loads(text)
    elements, end = [], _next(text, 1)
    while text[end] != "]":
        element, end = DECODER.raw_decode(text, end)
        elements.append(element)
        end = _next(text, end)
    return elements


def _next(text: str, position: int) -> int:
    """The position of an array's next element, or of its end."""
    between = BETWEEN.match(text, position)
    return position if between is None else between.end()


class StreamedTokens:
    """The tokens of one choice of a stream, which come in its responses."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_prompt_tokens = self.num_tokens = 0
        self._token_ids: list[int] = []
        self._positions: list[Any] = []

    def read(self, outputs: Outputs) -> None:
        self.read_prompt(outputs)
        token_ids = json_output(outputs, "token_ids", self.index) or []
        self.num_tokens += len(token_ids)
        self._token_ids += token_ids
        self._positions += json_output(outputs, "logprobs", self.index) or []

    def read_prompt(self, outputs: Outputs) -> None:
        """Take the number of the prompt's tokens, if a response has it."""
        if counts := outputs.get("num_input_tokens"):
            self.num_prompt_tokens = counts[self.index]

    def take_ids(self) -> list[int]:
        """The token ids since the last call: those of the next chunk."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids

    def take_positions(self) -> list[Any]:
        """The log probabilities since the last call."""
        positions, self._positions = self._positions, []
        return positions

    def usage(self) -> dict[str, int]:
        return usage(self.num_prompt_tokens, self.num_tokens)


def now_s() -> int:
    return int(time.time())


def response_head(identity: str, kind: str, model: str) -> dict[str, Any]:
    """What OpenAI's responses begin with."""
    return {"id": identity, "object": kind, "created": now_s(), "model": model}
