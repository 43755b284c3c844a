# SPDX-License-Identifier: Apache-2.0
"""The KV cache memory of an engine: slots of running sequences, prefill batches and the prefix cache in one budget.

Knows no queue: who gets a slot and who is preempted is the scheduler's decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from hf_triton.engine.hybrid_prefix_cache import HybridPrefixCache
from hf_triton.engine.plan import PrefillBatch, PrefillRequest
from hf_triton.engine.prefix_cache import Prefix, PrefixCache
from hf_triton.engine.sequence import Sequence
from hf_triton.errors import RequestError, UnavailableError
from hf_triton.runner.budget import TokenBudget
from hf_triton.runner.contents import CacheContents
from hf_triton.runner.faults import is_fatal
from hf_triton.runner.forward import Forward
from hf_triton.runner.kv_cache import buffer_tokens
from hf_triton.runner.kv_lanes import KVCacheLanes

logger = logging.getLogger(__name__)


class KVMemory:
    """The scheduler's view of memory, see `stages.Memory`, and the executor's slots.

    Args:
        forward: The model's.
        max_tokens: The setting `max_cache_tokens`; None: what the device has free.
        padding_bytes: Of padding that a sequence may bring into a lane.
        prefix_tokens: The fewest tokens of a cached prefix, for a model whose prefixes are prefilled alone.
        prefix_fraction: The most of the memory that the prefix cache takes; 0: prefixes are not cached.
    """

    def __init__(
        self,
        forward: Forward,
        max_tokens: int | None,
        *,
        padding_bytes: float,
        prefix_tokens: int,
        prefix_fraction: float,
    ) -> None:
        self._forward = forward
        if max_tokens is not None and not forward.has_keys:
            logger.warning("the setting max_cache_tokens does nothing for a model without keys and values")
            max_tokens = None
        bytes_per_token, slot_tokens = forward.memory_per_token()
        self._slot_tokens = slot_tokens if max_tokens is None else 0  # the setting limits keys and values
        self.budget = TokenBudget(bytes_per_token, max_tokens)
        self._max_padding = padding_bytes / sum(bytes_per_token.values())
        self._prefix_fraction = prefix_fraction
        self.prefixes = PrefixCache()
        if forward.is_recurrent:
            completions = forward.recomputes
            self.prefixes = HybridPrefixCache(prefix_tokens, slot_tokens, stores_completions=completions)
            room = int(self.budget.most * prefix_fraction)
            if prefix_fraction and room < prefix_tokens + slot_tokens:
                logger.warning(
                    "the prefix cache stays empty: it may take %d tokens, and one sequence takes %d besides its own",
                    room,
                    slot_tokens,
                )
        self.running: list[Sequence] = []
        """The running sequences, by slot."""
        self.prefills: list[PrefillBatch] = []
        """Batches that are being prefilled, the current one last."""
        self.reset()

    def reset(self) -> None:
        """Begin with new, empty slots."""
        self.lanes = KVCacheLanes(self._forward.device, self._max_padding, self._slot_tokens)
        self.running = []

    @property
    def num_used_tokens(self) -> int:
        """Tokens in use, padding counted."""
        return self.lanes.num_tokens + self.prefixes.num_tokens + self._num_prefill_tokens()

    @property
    def is_corrupt(self) -> bool:
        """Whether a failure broke off a change of the slots, so that all sequences must be recomputed."""
        return self.lanes.is_corrupt

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """For a change of all slots: an exception inside sets `is_corrupt`."""
        self.lanes.is_corrupt = True
        yield
        self.lanes.is_corrupt = False

    # --- room --------------------------------------------------------------------------------------------------------

    def reserve(self, contexts: list[list[Sequence]]) -> bool:
        """Make room for one more token of every sequence in memory and for prefilling more, at the prefix cache's cost.

        Args:
            contexts: To prefill, in one batch: the sequences of each.

        Returns:
            Whether there is enough memory. If the model cannot recompute a sequence: also whether every sequence fits
            to its end.
        """
        new = [sequence for sequences in contexts for sequence in sequences]
        in_prefill = [sequence for batch in self.prefills for sequence in batch.sequences]
        lengths = [sequence.num_tokens for sequence in (*in_prefill, *new)]
        num_prefill = self._num_prefill_tokens()
        if new:
            num_prefill += self._prefill_tokens(len(contexts), max(sequence.num_tokens for sequence in new))
        allowed = self.budget.tokens(self.num_used_tokens) - num_prefill
        if self.lanes.tokens_with(lengths) > allowed:
            return False
        if new and not self._forward.recomputes:
            in_memory = [*self.running, *in_prefill, *new]
            longest = max(sequence.max_tokens for sequence in in_memory)
            if buffer_tokens(len(in_memory), longest, self._slot_tokens) > allowed:
                return False
        if self.lanes.most_with(lengths) > allowed:
            self.lanes.trim()
        self.prefixes.shrink(allowed - self.lanes.most_with(lengths))
        self.lanes.limit(lengths, allowed - self.prefixes.num_tokens)
        return True

    def admission_error(self, num_prompt: int, num_new: int) -> RequestError | None:
        """The error of a prompt that can never run in this memory; None: it can."""
        needed = 2 * buffer_tokens(1, num_prompt + num_new, self._slot_tokens)  # prefill's copy and the slot
        if needed <= self.budget.most:
            return None
        return RequestError(
            "memory_exceeded",
            f"a prompt of {num_prompt} tokens and max_new_tokens {num_new}, rounded up and held twice, need "
            f"{self.budget.words(needed)} of KV cache memory, and there are "
            f"{self.budget.words(self.budget.most)} (setting max_cache_tokens): ask for fewer tokens",
        )

    def no_memory_error(self, num_tokens: int) -> UnavailableError:
        """The error of a sequence that does not fit the memory that is free now."""
        allowed = self.budget.words(self.budget.tokens(self.num_used_tokens))
        return UnavailableError(
            "out_of_memory",
            f"a sequence of {num_tokens} tokens does not fit the KV cache memory that is free now, {allowed} in all: "
            "send it again later, or ask for fewer tokens",
        )

    def release(self) -> None:
        """Free all slots' memory; no sequence may be running."""
        self.lanes.release()

    def _num_prefill_tokens(self) -> int:
        return sum(self._prefill_tokens(len(batch.requests), batch.longest) for batch in list(self.prefills))

    def _prefill_tokens(self, num_contexts: int, longest: int) -> int:
        return num_contexts * (longest + self._slot_tokens)

    # --- slots -------------------------------------------------------------------------------------------------------

    def insert(self, sequence: Sequence, batch: PrefillBatch, at: int) -> None:
        """Give a sequence a slot, with the KV of context `at` of a complete prefill batch."""
        slot = self.lanes.add(batch.state.cache, at, batch.requests[at].length)
        self.running.insert(slot, sequence)

    def free(self, slot: int) -> None:
        """Free a slot; a finished sequence goes to the prefix cache. The last sequence of its lane takes the slot."""
        sequence = self.running[slot]
        if sequence.finish_reason:
            num_computed = self.lanes.length(slot)
            # Not the last token, nor those that a constraint added at a deadline: the model has not computed them.
            token_ids = sequence.context()[:num_computed]
            if sequence.num_tokens == self._forward.recompute_length:
                token_ids = token_ids[: sequence.num_tokens - 1]  # a step that ran ahead computed the last one's KV
            if self.prefixes.can_store(len(token_ids), num_computed):
                self._store(sequence, token_ids, partial(self.lanes.read, slot))
        last = self.lanes.remove(slot)
        self.running[slot] = self.running[last]
        del self.running[last]

    # --- prefix cache ------------------------------------------------------------------------------------------------

    def prefill_request(self, sequences: list[Sequence]) -> PrefillRequest:
        """The request to prefill a context, with its cached prefix.

        Args:
            sequences: Those that continue it.
        """
        request = PrefillRequest(sequences, sequences[0].context())
        cache = self.prefixes
        if not self._prefix_fraction or request.num_top_logprobs is not None or request.length <= cache.min_tokens:
            return request
        key = self._forward.cache_key(request.context, sequences[0].group.adapter)
        head = request.context[: cache.min_tokens]
        similar = (slot for slot, sequence in enumerate(self.running) if sequence.begins_with(head))
        match = cache.find(key, map(self._running_prefix, similar))
        if match and not match[1].read(match[0]).is_finite():
            cache.clear()
            match = None
        num_cached, prefix = match or (0, None)
        pause = cache.pause(key, num_cached)
        is_alone = cache.is_alone and (prefix is not None or pause is not None)
        return PrefillRequest(sequences, request.context, num_cached, prefix, pause, is_alone)

    def store_prompt(self, batch: PrefillBatch, at: int, num_tokens: int) -> None:
        """Store the first tokens of context `at` of a prefill batch in the prefix cache."""
        request = batch.requests[at]
        self._store(request.sequences[0], request.context[:num_tokens], partial(batch.state.read, at))

    def _running_prefix(self, slot: int) -> Prefix:
        sequence = self.running[slot]
        token_ids = self._forward.cache_key(sequence.context()[:-1], sequence.group.adapter)
        return Prefix(np.array(token_ids), partial(self.lanes.read, slot))

    def _store(self, sequence: Sequence, token_ids: list[int], read: Callable[[int], CacheContents]) -> None:
        if not self._prefix_fraction or len(token_ids) < self.prefixes.min_tokens or self.is_corrupt:
            return
        key = self._forward.cache_key(token_ids, sequence.group.adapter)
        if self.prefixes.touch(key):
            return
        num_tokens = len(token_ids) + self.prefixes.slot_tokens
        allowed = self.budget.tokens(self.num_used_tokens)
        free = allowed - self.num_used_tokens + self.prefixes.num_tokens
        room = min(int(allowed * self._prefix_fraction), free)
        if num_tokens > room:
            return
        self.prefixes.shrink(room - num_tokens)
        try:
            contents = read(len(token_ids)).clone()
        except Exception as error:
            if is_fatal(error):
                raise
            self.prefixes.clear()  # there is no memory to spare
        else:
            self.prefixes.add(key, contents)
