# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: how the tokens of one prompt's completions are sampled, every value resolved. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How the engine samples the completions of one prompt."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """End-of-sequence tokens are banned before so many."""
    do_sample: bool = False
    temperature: float = 1.0
    """It is above 0, and 1 if `do_sample` is false."""
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
    """Token ids and the bias added to their logits."""
    eos_ids: frozenset[int] | None = None
    """End-of-sequence tokens; None: the model's own."""
    num_return_sequences: int = 1
    best_of: int | None = None
    """Sequences to generate, of which the `num_return_sequences` likeliest are returned; None: only those."""
    logprobs: int | None = None
    """Return the log probability of every new token and of this many likeliest tokens; None: no log probabilities."""
    prompt_logprobs: int | None = None
    """The same for every prompt token."""
    num_beams: int = 1
    """Hypotheses that beam search keeps, at least `num_return_sequences`; 1: no beam search. `do_sample` is false
    then."""
    length_penalty: float | None = None
    """The power of a hypothesis's length that divides its log probability; None: the checkpoint's own."""
    early_stopping: bool | None = None
    """Whether a beam search ends once it has `num_beams` finished hypotheses; None: the checkpoint's own."""
    first_id: int | None = None
    """The token that an encoder-decoder's completion begins with; None: as the checkpoint's own settings say."""

    @property
    def num_sequences(self) -> int:
        return self.best_of or self.num_return_sequences

    @property
    def num_rows(self) -> int:
        """Rows of a batch that decode for the prompt."""
        return max(self.num_sequences, self.num_beams)

    @property
    def num_top_logprobs(self) -> int | None:
        """Log probabilities that sampling returns beside the token's own; None: not even that."""
        return 0 if self.logprobs is None and (self.best_of or 0) > self.num_return_sequences else self.logprobs
