# SPDX-License-Identifier: Apache-2.0
"""The admitted sequences of an engine, by stage, and the memory as the scheduler uses it. Imports no torch."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Protocol

from hf_triton.engine.plan import PrefillBatch, PrefillRequest
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.errors import HfTritonError


class Memory(Protocol):
    """The KV cache and the prefix cache, as the scheduler uses them."""

    running: list[Sequence]
    """Sequences that have a slot, by slot."""
    prefills: list[PrefillBatch]
    """Batches that are being prefilled, the current one last; the scheduler adds and removes them."""

    @property
    def is_corrupt(self) -> bool:
        """Whether all sequences must be recomputed."""

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """A context manager for a change of all slots; an exception inside sets `is_corrupt`."""

    def reserve(self, contexts: list[list[Sequence]]) -> bool:
        """Make room for another token of every sequence and for prefilling these contexts; whether there is enough."""

    def insert(self, sequence: Sequence, batch: PrefillBatch, at: int) -> None:
        """Give a sequence a slot, with the KV of context `at` of a complete batch."""

    def free(self, slot: int) -> None:
        """Free a slot; another sequence may take it."""

    def reset(self) -> None:
        """Begin with new, empty slots."""

    def prefill_request(self, sequences: list[Sequence]) -> PrefillRequest:
        """The request to prefill the context of these sequences, with its cached prefix."""

    def store_prompt(self, batch: PrefillBatch, at: int, num_tokens: int) -> None:
        """Store the first tokens of context `at` in the prefix cache."""

    def no_memory_error(self, num_tokens: int) -> HfTritonError:
        """The error of a sequence of `num_tokens` tokens that does not fit."""


class Stages:
    """Admitted sequences: ready to be prefilled (admitted or preempted), prefilling, or running.

    Args:
        memory: Holds the prefilling and the running ones.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.admitting: deque[SequenceGroup] = deque()
        """Groups that have left the queue and have no sequences yet."""
        self.ready: deque[list[Sequence]] = deque()
        """Contexts to prefill, each as the sequences that continue it."""

    @property
    def is_busy(self) -> bool:
        """Whether there are admitted sequences."""
        return bool(self._memory.running or self._memory.prefills or self.ready)

    def prefilling(self) -> list[Sequence]:
        """Sequences whose contexts are being prefilled."""
        return [sequence for batch in list(self._memory.prefills) for sequence in batch.sequences]

    def in_memory(self) -> list[Sequence]:
        """Running sequences, and those being prefilled."""
        running = self._memory.running
        return [*running, *(sequence for sequence in self.prefilling() if sequence not in running)]

    def sequences(self) -> list[Sequence]:
        """All sequences; one that has just left prefill may be there twice."""
        return [
            *self._memory.running,
            *self.prefilling(),
            *(sequence for context in self.ready for sequence in context),
        ]

    def groups(self) -> list[SequenceGroup]:
        """The groups of all sequences."""
        return list({id(sequence.group): sequence.group for sequence in self.sequences()}.values())

    def unfinished(self) -> list[SequenceGroup]:
        """Admitted groups without an outcome."""
        return [*(group for group in self.groups() if not group.is_finished), *self.admitting]
