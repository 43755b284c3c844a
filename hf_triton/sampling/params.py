# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: what sampling and the engine are asked for one prompt, every value resolved. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How the engine picks tokens for one prompt, every value settled."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """End-of-sequence tokens are not picked before."""
    do_sample: bool = False
    temperature: float = 1.0
    """Above 0; 1 where `do_sample` is false."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""
    eos_ids: frozenset[int] | None = None
    """Tokens that end a text; None: the model's own."""
    num_return_sequences: int = 1
    best_of: int | None = None
    """Texts to write, of which the `num_return_sequences` likeliest are kept; None: just those."""
    logprobs: int | None = None
    """Log probabilities of every new token and of this many likeliest; None: none at all."""
    prompt_logprobs: int | None = None
    """The same of every prompt token."""

    @property
    def num_rows(self) -> int:
        """Texts that are written."""
        return self.best_of or self.num_return_sequences

    @property
    def num_top_logprobs(self) -> int | None:
        """Log probabilities that a sampler must give beside that of the token itself; None: none at all."""
        return 0 if self.logprobs is None and self.num_rows > self.num_return_sequences else self.logprobs
