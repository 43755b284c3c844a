# SPDX-License-Identifier: Apache-2.0
"""Builds llguidance's tokenizer for a model: the bytes of each token. Knows no grammar."""

from __future__ import annotations

import json
from typing import Any, Final

from llguidance import LLTokenizer, TokenizerWrapper

SAMPLE: Final = '{"key": [1, -2.5e3, "two words"], "x_y": null}\n'


def build_guidance_tokenizer(tokenizer: Any, vocabulary_size: int) -> LLTokenizer | None:
    """Build llguidance's tokenizer; None if it would not decode tokens as the model's tokenizer does."""
    if not tokenizer.is_fast:  # slow tokenizers do not decode single tokens
        return None
    from llguidance.hf import from_tokenizer

    size = max(vocabulary_size, len(tokenizer))
    try:
        guidance = from_tokenizer(tokenizer, n_vocab=size)
    except ValueError:  # llguidance knows two ways in which tokens spell bytes
        if not _is_metaspace(tokenizer):
            return None
        guidance = LLTokenizer(TokenizerWrapper(_SpelledTokenizer(tokenizer)), n_vocab=size)
    sample = tokenizer(SAMPLE, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [token_id for token_id in sample if token_id != tokenizer.unk_token_id]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return guidance if guidance.decode_bytes(ids).decode("utf-8", "replace").strip() == text.strip() else None


class _SpelledTokenizer:
    """A tokenizer whose tokens are strings, spelled out for llguidance; it encodes greedily by the longest token."""

    def __init__(self, tokenizer: Any) -> None:
        self.eos_token_id: int = tokenizer.eos_token_id
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.special_token_ids: list[int] = tokenizer.all_special_ids
        self.tokens = _spelled(tokenizer)
        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        """Encode; bytes that no token begins with are skipped."""
        ids, start = [], 0
        while start < len(text):
            lengths = range(min(self._longest, len(text) - start), 0, -1)
            length = next((length for length in lengths if text[start : start + length] in self._ids), 0)
            if length:
                ids.append(self._ids[text[start : start + length]])
            start += max(1, length)
        return ids


def _spelled(tokenizer: Any) -> list[bytes]:
    """What each token adds behind another one; empty for special tokens and for those that change the one before."""
    special = frozenset(tokenizer.all_special_ids)
    ids = range(len(tokenizer))
    word = next(token_id for token_id in ids if tokenizer.decode([token_id]).strip().isalpha())
    pairs = [[word, token_id] for token_id in ids]
    before = tokenizer.decode(pairs[0][:1])
    texts = tokenizer.batch_decode(pairs, clean_up_tokenization_spaces=False)
    return [
        text[len(before) :].encode() if text.startswith(before) and token_id not in special else b""
        for token_id, text in enumerate(texts)
    ]


def _is_metaspace(tokenizer: Any) -> bool:
    """Whether each token always adds the same string: sentencepiece's spaces without byte tokens (T5)."""
    return "Metaspace" in str(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
