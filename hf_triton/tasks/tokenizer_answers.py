# SPDX-License-Identifier: Apache-2.0
"""Answers of a model's tokenizer, the same for every task: in the names of vLLM's endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import RequestError, clip, panics_as_errors
from hf_triton.protocol.prompts import Limits, check_size
from hf_triton.protocol.tokenizer_request import TOKENIZER_REQUEST, TokenizerRequest
from hf_triton.protocol.validation import parse_json, validated
from hf_triton.sentence import param

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint

CONFIG: Final = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "clean_up_tokenization_spaces"),
    *("do_lower_case", "model_input_names", "model_max_length", "padding_side", "split_special_tokens"),
    *("strip_accents", "tokenize_chinese_chars", "truncation_side"),
)
"""The names of `tokenizer_config.json` that an answer has, beside special tokens."""


class TokenizerAnswers:
    """Answers `TokenizerRequest`s, one at a time."""

    def __init__(
        self, checkpoint: Checkpoint, context_length: int, limits: Limits, chat_template: str | None = None
    ) -> None:
        self._tokenizer: Any = checkpoint.tokenizer
        told = getattr(checkpoint.model.config.get_text_config(), "vocab_size", None)
        self._vocabulary_size = max(len(self._tokenizer), told or 0)
        self._context_length = context_length
        self._limits = limits
        self._chat_template = chat_template

    def answer(self, asked: object) -> str:
        """The answer to the parameter's value, as JSON; raises RequestError if it is none, or too long."""
        try:
            values = parse_json(asked) if isinstance(asked, str) else None
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise RequestError("invalid_parameter", f"{param(TOKENIZER_REQUEST)} must be a JSON object as a string")
        request = validated(TokenizerRequest, values)
        with panics_as_errors():
            if request.text is not None:
                return json.dumps(self._tokens(request.text, adds_special_tokens=request.add_special_tokens))
            if request.tokens is not None:
                return json.dumps({"prompt": self._text(request.tokens)})
            return json.dumps(self._config())

    def _tokens(self, text: str, *, adds_special_tokens: bool) -> dict[str, Any]:
        check_size(len(text.encode()), self._limits, param("text"))
        ids: list[int] = self._tokenizer(text, add_special_tokens=adds_special_tokens)["input_ids"]
        strings = self._tokenizer.convert_ids_to_tokens(ids)
        return {"count": len(ids), "max_model_len": self._context_length, "tokens": ids, "token_strs": strings}

    def _text(self, ids: list[int]) -> str:
        check_size(len(ids), self._limits, param("tokens"))
        if wrong := next((each for each in ids if not 0 <= each < self._vocabulary_size), None):
            sentence = f"{param('tokens')} holds {clip(wrong)}, and token ids are 0 to {self._vocabulary_size - 1}"
            raise RequestError("invalid_input", sentence, field="tokens")
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _config(self) -> dict[str, Any]:
        """What `tokenizer_config.json` has; what else the tokenizer keeps may be the host's."""
        kept = {name: value for name, value in self._tokenizer.init_kwargs.items() if name in CONFIG}
        config: dict[str, Any] = _plain({**kept, **self._tokenizer.special_tokens_map})
        config["tokenizer_class"] = type(self._tokenizer).__name__
        template = self._chat_template or self._tokenizer.chat_template
        return config if template is None else {**config, "chat_template": template}


def _plain(value: object) -> Any:
    """A value as JSON has it; a token by its text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
