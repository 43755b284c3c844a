# SPDX-License-Identifier: Apache-2.0
"""How many blocks an engine may use now, and the errors of sequences that do not fit. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_triton.engine.block_pool import BlockPool
from hf_triton.engine.state_pool import StatePool
from hf_triton.errors import RequestError, UnavailableError
from hf_triton.sentence import param

if TYPE_CHECKING:
    from hf_triton.runner.budget import TokenBudget


class BlockMemory:
    """The block pool and its budget.

    Args:
        budget: Tokens that the device has memory for.
        slot_tokens: Tokens that take as much memory as the states of a sequence; 0: none, or they are not counted.
        is_fixed: Whether all memory is allocated at load; else it is shared with others on the device.
        states: The states that the prefix cache keeps; None: none.
        trim_states: Frees the memory of all of them.
    """

    def __init__(
        self,
        budget: TokenBudget,
        num_blocks: int,
        block_size: int,
        *,
        max_kept: int,
        slot_tokens: int = 0,
        is_fixed: bool = False,
        give_back: Callable[[list[int]], None] = lambda _: None,
        states: StatePool | None = None,
        trim_states: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = BlockPool(num_blocks, max_kept, states)
        self.block_size = block_size
        self.budget = budget
        self._slot_tokens = slot_tokens
        self._is_fixed = is_fixed
        self._give_back = give_back
        self._trim_states = trim_states
        self._num_slots = 0

    @property
    def num_used_tokens(self) -> int:
        return self.pool.num_held * self.block_size + self._num_slots * self._slot_tokens

    @property
    def max_used_tokens(self) -> int:
        """The most tokens that may be in use now."""
        return min(self.pool.num_blocks * self.block_size, self.budget.allowed)

    def refresh(self, num_slots: int, *, reads_states: bool = False) -> None:
        """Look at the budget, beside the states of `num_slots` sequences, and give back what exceeds it.

        Kept states take only what sequences leave: new ones no more than half of it, and if sequences need their memory
        all are given back, unless the next step `reads_states`.
        """
        self._num_slots = num_slots
        if self._is_fixed:
            return
        pool, size = self.pool, self.block_size
        states, kept = num_slots * self._slot_tokens, pool.states.num_touched * self._slot_tokens
        allowed = self.budget.tokens(pool.num_touched * size + states + kept) - states
        if pool.num_held * size + kept > allowed and not reads_states:
            self.drop_states()
            kept = pool.states.num_touched * self._slot_tokens
        if self._slot_tokens:
            pool.states.max_touched = max(0, allowed // 2 - pool.num_held * size) // self._slot_tokens
        pool.max_touched = max(0, allowed) // size
        most_blocks = max(0, allowed - kept) // size
        if pool.num_touched > most_blocks:
            self._give_back(pool.trim(most_blocks))

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room(self, num_blocks: int, num_slots: int) -> bool:
        """Whether so many more blocks fit, with the states of so many sequences in all."""
        new_states = max(0, num_slots - self._num_slots) * self._slot_tokens
        return num_blocks * self.block_size + new_states <= self.pool.num_free * self.block_size

    def rest(self) -> None:
        """Give back the memory of empty blocks, and of kept ones beyond `max_kept`, which a peak leaves."""
        if not self._is_fixed:
            num_kept = min(self.pool.num_kept, self.pool.max_kept)
            self._give_back(self.pool.trim(self.pool.num_held + num_kept))

    def forget(self) -> None:
        """All blocks and states lose what they keep, and their memory, which the caller frees; no sequence has any."""
        self.pool.clear()
        self.pool.trim(0)
        self.pool.states.give_back()

    def drop_states(self) -> None:
        """Give back the memory of kept states, unless a step in flight writes some."""
        if not self._is_fixed and self.pool.states.give_back():
            self._trim_states()

    def admission_error(self, num_prompt: int, num_new: int) -> RequestError | None:
        """The error of a prompt that can never run in this memory; None: it can."""
        needed = self.num_blocks(num_prompt + num_new) * self.block_size + self._slot_tokens
        most = min(self.pool.num_blocks * self.block_size + self._slot_tokens, self.budget.most)
        if needed <= most:
            return None
        most_tokens = (most - self._slot_tokens) // self.block_size * self.block_size
        return RequestError(
            "memory_exceeded",
            f"a prompt of {num_prompt} tokens and {param('max_new_tokens')} {num_new} need "
            f"{self.budget.words(needed)} of KV cache memory in blocks of {self.block_size} tokens, and there are "
            f"{self.budget.words(most)} (setting max_cache_tokens): ask for fewer tokens",
            sizes={"tokens": num_prompt, "new_tokens": num_new, "limit": most_tokens},
        )

    def no_memory_error(self, num_tokens: int) -> UnavailableError:
        """The error of a sequence that does not fit the memory that is free now."""
        return UnavailableError(
            "out_of_memory",
            f"a sequence of {num_tokens} tokens does not fit the KV cache memory that is free now, "
            f"{self.budget.words(self.max_used_tokens)} in all: send it again later, or ask for fewer tokens",
        )
