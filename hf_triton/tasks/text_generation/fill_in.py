# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 (DeepSeek's own vertical lines)
"""How models of code fill in the middle: the special tokens around what is before it and what is behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class FillIn:
    """One family's form; the tokens are its own, so that none of them can be part of the middle."""

    prefix: str
    suffix: str
    middle: str = ""
    """Empty: the middle follows without one."""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()
    """More tokens behind the middle, those of them that a tokenizer has."""

    def end_ids(self, vocabulary: Mapping[str, int]) -> frozenset[int]:
        names = (self.prefix, self.suffix, self.middle, *self.ends)
        return frozenset(vocabulary[name] for name in names if name in vocabulary)


FORMS: Final = (
    # Qwen2.5-Coder's README (QwenLM/Qwen3-Coder, examples/Qwen2.5-Coder-fim.py), with its end tokens; CodeGemma's model
    # card has the same three and <|file_separator|>, Granite 4's tokenizer the same three and <|fim_pad|>.
    FillIn(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder's and StarCoder2's model cards; Granite Code and StableCode have its tokens.
    FillIn("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<repo_name>", "<file_sep>")),
    # SantaCoder's model card.
    FillIn("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),
    # CodeLlama: `infilling_prompt_tokens` of facebookresearch/codellama, llama/generation.py.
    FillIn("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # DeepSeek-Coder's README, "Code Insertion"; its base model ends with its end-of-sequence token.
    FillIn("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),
    # Codestral: `encode_fim` of mistral-common, tokens/tokenizers/instruct.py.
    FillIn("[PREFIX]", "[SUFFIX]", suffix_first=True, ends=("[MIDDLE]",)),
)
"""The names that llama.cpp knows too (src/llama-vocab.cpp), and Codestral's. GLM's <|code_prefix|> is left out: its
order is not published for models without a chat."""


def find_form(vocabulary: Mapping[str, int]) -> FillIn | None:
    """The form whose tokens a tokenizer has."""
    return next((form for form in FORMS if {form.prefix, form.suffix, form.middle} - {""} <= vocabulary.keys()), None)
