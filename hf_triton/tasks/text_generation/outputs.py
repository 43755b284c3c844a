# SPDX-License-Identifier: Apache-2.0
"""Encodes completions, whole or in the pieces of a stream, as the outputs of a response. Knows no order of sends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

from hf_triton.engine.sequence import Completion, FinishReason
from hf_triton.protocol.declared_ports import MESSAGE, PROMPT_LOGPROBS
from hf_triton.protocol.names import JSON_OUTPUT, LEGACY_TEXT, TEXT
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.response_outputs import encode_output, outputs_to_fill
from hf_triton.protocol.tensor_values import Array
from hf_triton.sampling.types import TokenLogprobs
from hf_triton.tasks.text_generation.detokenizer import REPLACEMENT
from hf_triton.tasks.text_generation.prepare import PreparedPrompt, PromptPreparer
from hf_triton.tasks.text_generation.text_codec import TextCodec

FINISH_REASONS: Final[dict[FinishReason, str]] = {
    "eos": "stop",
    "stop_string": "stop",
    "length": "length",
    "deadline": "deadline",
}
"""The engine's finish reasons, and the clients' names for them."""
LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity; the number is OpenAI's
STREAMED: Final = frozenset({TEXT, LEGACY_TEXT, MESSAGE, "token_ids", "logprobs", PROMPT_LOGPROBS})
"""The outputs that each response of a stream has, the last only if a completion begins in it."""
FIRST_STREAMED: Final = STREAMED | {"num_input_tokens", "prompt_token_ids"}
"""The outputs that its first response has."""
UNFINISHED: Final = Completion([], "length", logprobs=[])


@dataclass
class Piece:
    """What one response has of a completion: in a stream what is new since the last one, otherwise all of it."""

    text: str = ""
    unread: str = ""
    """The same for the reader of its message."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    """The whole message's, known at its end."""
    stop_string: str = ""
    """The one that ended the completion, or ""."""
    completion: Completion = UNFINISHED


class OutputEncoder:
    def __init__(self, checked: GenerationRequest, output_names: list[str], preparer: PromptPreparer) -> None:
        self._checked = checked
        self._output_names = output_names
        self._preparer = preparer

    def encode(self, pieces: list[tuple[PreparedPrompt, Piece]]) -> dict[str, Array]:
        """The outputs of the final response, of pieces in row order, those of one prompt side by side."""
        return self._encode(self._names(pieces), pieces)

    def encode_deltas(self, pieces: list[tuple[PreparedPrompt, Piece]], *, is_first: bool) -> dict[str, Array]:
        streamed = FIRST_STREAMED if is_first else STREAMED
        return self._encode([name for name in self._names(pieces) if name in streamed], pieces)

    def _names(self, pieces: list[tuple[PreparedPrompt, Piece]]) -> list[str]:
        has_logprobs = any(piece.completion.prompt_logprobs is not None for _, piece in pieces)
        return outputs_to_fill(self._checked, self._output_names, has_prompt_logprobs=has_logprobs)

    def _encode(self, names: list[str], pieces: list[tuple[PreparedPrompt, Piece]]) -> dict[str, Array]:
        values = [self._values(names, *piece) for piece in pieces]
        return {name: encode_output(name, [each[name] for each in values], self._checked.shape) for name in names}

    def _values(self, names: list[str], prompt: PreparedPrompt, piece: Piece) -> dict[str, Any]:
        """What outputs have of a completion, or of its part in a stream's response."""
        completion = piece.completion
        values: dict[str, Callable[[], Any]] = {
            TEXT: lambda: piece.text,
            LEGACY_TEXT: lambda: piece.text,
            MESSAGE: lambda: json.dumps(piece.message),
            "finish_reason": lambda: "stop" if piece.stop_string else FINISH_REASONS[completion.finish_reason],
            "stop_string": lambda: piece.stop_string,
            "num_input_tokens": lambda: len(prompt.ids),
            "num_output_tokens": lambda: len(completion.token_ids),
            "num_cached_tokens": lambda: completion.num_cached,
            "num_reasoning_tokens": lambda: min(self._num_tokens(piece.reasoning), len(completion.token_ids)),
            "prompt_token_ids": lambda: json.dumps(prompt.ids),
            "token_ids": lambda: json.dumps(piece.token_ids),
            "cumulative_logprob": lambda: sum(each.logprob for each in completion.logprobs or ()),
            "logprobs": lambda: "" if completion.logprobs is None else self._logprobs_json(piece.logprobs),
            PROMPT_LOGPROBS: lambda: self._prompt_logprobs(completion),
            JSON_OUTPUT: lambda: self._json(prompt, piece.text),
        }
        return {name: values[name]() for name in names}

    def _num_tokens(self, text: str) -> int:
        return len(self._preparer.codec.encode(text, adds_special_tokens=False)) if text else 0

    def _json(self, prompt: PreparedPrompt, text: str) -> str:
        """The output `output`: a completion's text in MLServer's form, or a prompt's tokens."""
        value = {self._preparer.text_field: text}
        if self._checked.options.tokenize_only:
            value = self._preparer.describe_tokens(prompt)
        return json.dumps(value, ensure_ascii=False)

    def _prompt_logprobs(self, completion: Completion) -> str:
        logprobs = completion.prompt_logprobs
        return "null" if logprobs is None else self._logprobs_json([None, *logprobs])

    def _logprobs_json(self, logprobs: Iterable[TokenLogprobs | None]) -> str:
        """Log probabilities in the vLLM backend's form: for each position an object of tokens by their ids, or null.

        Position by position, because `json` lets no other thread run: a long prompt has a hundred thousand entries.
        """
        describe = cache(partial(_described, self._preparer.codec))
        return f"[{', '.join(json.dumps(each and _position(describe, each)) for each in logprobs)}]"


def _described(codec: TextCodec, token_id: int) -> dict[str, object]:
    text = codec.token_text(token_id)
    part = codec.part_of_character(token_id) if REPLACEMENT in text else None
    return {"decoded_token": text} | ({} if part is None else {"bytes": [*part]})


def _position(describe: Callable[[int], dict[str, object]], logprobs: TokenLogprobs) -> dict[int, dict[str, object]]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, start=1)}
    return {
        token_id: {
            "logprob": logprob if math.isfinite(logprob) else LEAST_LOGPROB,
            "rank": ranks.get(token_id),
            **describe(token_id),
        }
        for token_id, logprob in {logprobs.token_id: logprobs.logprob, **dict(logprobs.top)}.items()
    }
