# SPDX-License-Identifier: Apache-2.0
"""The tensors of a prefill batch. Knows no queue and no budget, and does not decide where a chunk ends."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_triton.engine.plan import PrefillBatch
from hf_triton.engine.sequence import adapters_of
from hf_triton.runner.contents import CacheContents, contents_of, fill
from hf_triton.runner.forward import Forward
from hf_triton.runner.padding import pad
from hf_triton.sampling.logprobs import token_logprobs
from hf_triton.sampling.types import TokenLogprobs


class Prefill:
    """Computes a batch of contexts, left-padded, chunk by chunk; cached prefixes are copied.

    Args:
        batch: What to compute.
        forward: The model's.
    """

    def __init__(self, batch: PrefillBatch, forward: Forward) -> None:
        self._requests = batch.requests
        self._lengths = [request.length for request in batch.requests]
        self._longest = batch.longest
        self._forward = forward
        self.cache = forward.new_cache()
        contexts = [request.context for request in batch.requests]
        self._input_ids, self._attention_mask = pad(contexts, 0, forward.device, at_left=True)  # [contexts, longest]
        self._prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in batch.requests]
        self._adapters = adapters_of(request.sequences[0] for request in batch.requests)
        self._copy_prefixes(batch.num_computed)
        batch.requests = self._requests

    def advance(self, start: int, end: int) -> torch.Tensor | None:
        """Compute the columns `[start:end]`.

        Returns:
            After the last chunk, the logits that follow the contexts, `[contexts, vocabulary]`.
        """
        is_scored = any(request.num_top_logprobs is not None for request in self._requests)
        logits = self._forward(
            self._input_ids[:, start:end],
            self._attention_mask[:, :end],
            self.cache,
            num_logits=end - start if is_scored else 1,
            num_context=self._longest,
            adapters=self._adapters,
        )
        if is_scored:
            self._score(start, logits)
        if end < self._longest:
            return None
        for request, logprobs in zip(self._requests, self._prompt_logprobs, strict=True):
            if request.num_top_logprobs is not None:
                request.sequences[0].group.prompt_logprobs = logprobs
        return logits[:, -1]

    def read(self, index: int, length: int) -> CacheContents:
        """Views of the contents of a context's first `length` tokens."""
        first = self._longest - self._lengths[index]
        return contents_of(self.cache, index, slice(first, first + length))

    def _copy_prefixes(self, num_columns: int) -> None:
        """Fill the first columns from cached prefixes, with zeros for padding."""
        gaps = [self._longest - length for length in self._lengths]
        prefixes = {
            index: request.prefix.read(num_columns - gap)
            for index, (request, gap) in enumerate(zip(self._requests, gaps, strict=True))
            if request.prefix is not None and gap < num_columns
        }
        fill(self.cache, prefixes, len(self._requests), num_columns)
        self._requests = [replace(request, prefix=None) for request in self._requests]  # releases their memory

    def _score(self, chunk_start: int, logits: torch.Tensor) -> None:
        """Note the logprobs of this chunk's prompt tokens, given the logits `[contexts, new, vocabulary]`."""
        for index, request in enumerate(self._requests):
            if request.num_top_logprobs is None:
                continue
            start = max(chunk_start, self._longest - request.length)
            end = min(chunk_start + logits.shape[1], self._longest - 1)
            if start < end:
                scores = logits[index, start - chunk_start : end - chunk_start]
                tokens = self._input_ids[index, start + 1 : end + 1].tolist()
                self._prompt_logprobs[index] += token_logprobs(scores, tokens, request.num_top_logprobs)
