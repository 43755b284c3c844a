# SPDX-License-Identifier: Apache-2.0
"""The KV cache against a plain model of it: a list of sequences, each a list of numbered tokens."""

import random
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_triton.runner import kv_cache as cache
from hf_triton.runner import kv_layer as cache_layer
from hf_triton.runner.kv_cache import COLUMN_STEP, KVCache, buffer_tokens

NUM_LAYERS, HEADS, KEY_DIM, VALUE_DIM = 3, 2, 4, 6


def contents(tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[rows, heads, columns, head_dim]` of every layer that tell tokens `[rows, columns]` apart."""
    each = tokens[:, None, :, None].float()
    return [
        (each.expand(-1, HEADS, -1, KEY_DIM) + 0.5 * layer, -each.expand(-1, HEADS, -1, VALUE_DIM) - 0.5 * layer)
        for layer in range(NUM_LAYERS)
    ]


def prefilled(sequences: list[list[int]]) -> DynamicCache:
    longest = max(map(len, sequences))
    made = DynamicCache()
    for layer, pair in enumerate(contents(torch.tensor([[-7] * (longest - len(each)) + each for each in sequences]))):
        made.update(*pair, layer)
    return made


def update_layers(memory: KVCache, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Update every layer as a forward does; returns what each gives to its attention."""
    new = contents(torch.tensor(tokens)[:, None])
    return [memory.cache.update(*pair, layer) for layer, pair in enumerate(new)]


def check(memory: KVCache, sequences: list[list[int]]) -> None:
    """Every slot holds its sequence, and no other columns are visible."""
    assert memory.num_rows == len(sequences)
    assert memory.position_ids().flatten().tolist() == [len(each) for each in sequences]
    assert memory.clock_index.tolist() == [memory.clock]
    assert memory.num_tokens == memory.shape[0] * memory.shape[1]
    if sequences:
        assert memory.width == max(map(len, sequences))
    for slot, tokens in enumerate(sequences):
        for part in (len(tokens), len(tokens) // 2):
            for (keys, values), (its_keys, its_values) in zip(
                memory.read(slot, part).layers, contents(torch.tensor([tokens])), strict=True
            ):
                torch.testing.assert_close(keys, its_keys[0, :, :part])
                torch.testing.assert_close(values, its_values[0, :, :part])


def check_step(memory: KVCache, sequences: list[list[int]], new: list[int]) -> None:
    memory.make_column()
    mask = memory.attention_mask()
    assert mask.tolist() == [[0] * (memory.width - len(each)) + [1] * (len(each) + 1) for each in sequences]
    for keys, values in update_layers(memory, new):
        assert keys.shape == (len(sequences), HEADS, memory.width + 1, KEY_DIM)
        assert values.shape == (len(sequences), HEADS, memory.width + 1, VALUE_DIM)
    with memory.padded_to(*memory.shape):
        mask = memory.attention_mask()
        assert mask.sum(-1)[: len(sequences)].tolist() == [len(each) + 1 for each in sequences]
        assert mask[:, : memory.clock + 1].any(-1).all()  # every slot sees some column
        assert not mask[: len(sequences), memory.clock + 1 :].any()
        assert memory.position_ids()[len(sequences) :].eq(0).all()
        padded = update_layers(memory, new + [0] * (memory.shape[0] - len(new)))
        assert padded[0][0].shape == (memory.shape[0], HEADS, memory.shape[1], KEY_DIM)
    memory.advance()


@pytest.mark.parametrize("max_tokens", [None, 0])
@pytest.mark.parametrize("seed", range(6))
def test_slots_keep_their_sequences_as_others_come_and_go(
    seed: int, max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "COLUMN_STEP", 8)
    source = random.Random(seed)
    memory, sequences = KVCache(torch.device("cpu")), list[list[int]]()
    memory.max_tokens = max_tokens
    num_before = 0
    for _ in range(200):
        act = source.random()
        if act < 0.12 and len(sequences) < 6:
            batch = [[source.randrange(100) for _ in range(source.randrange(1, 30))] for _ in range(2)]
            needed = buffer_tokens(len(sequences) + 1, max(memory.width, len(batch[0])) + 1)
            memory.add(prefilled(batch), 0, len(batch[0]))
            sequences.append(batch[0])
            assert max_tokens is None or memory.num_tokens <= max(num_before, needed)
        elif act < 0.2 and sequences:
            slot = source.randrange(len(sequences))
            memory.remove(slot)
            last = sequences.pop()
            if slot < len(sequences):
                sequences[slot] = last
        elif sequences:
            new = [source.randrange(100) for _ in sequences]
            before, least = memory.shape, buffer_tokens(len(sequences), memory.width + 1)
            check_step(memory, sequences, new)
            if memory.shape != before and max_tokens is not None:
                assert memory.num_tokens == least
            for tokens, token in zip(sequences, new, strict=True):
                tokens.append(token)
        num_before = memory.num_tokens
        check(memory, sequences)


def test_buffers_grow_ahead_up_to_the_limit() -> None:
    memory, tokens = KVCache(torch.device("cpu")), list(range(10))
    for _ in range(3):
        memory.add(prefilled([tokens]), 0, 10)
    assert memory.shape == (4, COLUMN_STEP)
    memory.max_tokens = 7 * COLUMN_STEP
    for _ in range(2):
        memory.add(prefilled([tokens]), 0, 10)
    assert memory.shape == (5, COLUMN_STEP)  # and not 8
    assert buffer_tokens(5, 11) == memory.num_tokens
    assert buffer_tokens(6, COLUMN_STEP + 1) == 6 * 2 * COLUMN_STEP


def test_buffers_drop_unused_slots_to_stay_within_the_limit() -> None:
    memory, tokens = KVCache(torch.device("cpu")), list(range(10))
    for _ in range(5):
        memory.add(prefilled([tokens]), 0, 10)
    for _ in range(4):
        memory.remove(0)
    memory.max_tokens = 2 * COLUMN_STEP
    memory.add(prefilled([list(range(COLUMN_STEP))]), 0, COLUMN_STEP)
    assert memory.shape == (2, 2 * COLUMN_STEP)
    check(memory, [tokens, list(range(COLUMN_STEP))])


def test_columns_that_no_sequence_needs_are_dropped() -> None:
    memory, tokens = KVCache(torch.device("cpu")), list(range(3))
    memory.add(prefilled([list(range(COLUMN_STEP + 3))]), 0, COLUMN_STEP + 3)
    memory.add(prefilled([tokens]), 0, 3)
    memory.remove(0)
    assert memory.first == COLUMN_STEP
    check_step(memory, [tokens], [5])
    assert (memory.first, memory.clock) == (0, 4)
    check(memory, [[*tokens, 5]])


def test_sequences_are_moved_before_buffers_are_enlarged() -> None:
    memory, sequences = KVCache(torch.device("cpu")), [list(range(90)), [7] * 40]
    for tokens in sequences:
        memory.add(prefilled([tokens]), 0, len(tokens))
    for token in range(COLUMN_STEP - 90):
        check_step(memory, sequences, [token, token])
        for tokens in sequences:
            tokens.append(token)
    assert memory.clock == memory.shape[1]
    memory.remove(0)
    check_step(memory, sequences[1:], [5])
    assert memory.shape == (2, COLUMN_STEP)
    check(memory, [[*sequences[1], 5]])


def test_a_released_cache_holds_no_memory_and_can_be_used_again() -> None:
    memory, tokens = KVCache(torch.device("cpu")), list(range(10))
    memory.add(prefilled([tokens]), 0, 10)
    before = memory.allocation
    memory.remove(0)
    memory.release()
    assert memory.num_tokens == 0
    assert memory.allocation is not before
    memory.add(prefilled([tokens]), 0, 10)
    check(memory, [tokens])


def test_the_allocation_changes_with_the_addresses() -> None:
    memory, tokens = KVCache(torch.device("cpu")), list(range(10))
    memory.add(prefilled([tokens]), 0, 10)

    def addresses() -> list[int]:
        buffers = [each for layer in memory.layers() for each in (layer.key_rows, layer.value_rows)]
        return [
            each.data_ptr() for each in (*buffers, memory.clock_index, memory.attention_mask(), memory.position_ids())
        ]

    before, allocation = addresses(), memory.allocation
    for token in range(COLUMN_STEP - 10):
        check_step(memory, [tokens], [token])
        tokens.append(token)
    assert memory.clock == memory.shape[1]
    assert (addresses(), memory.allocation) == (before, allocation)
    memory.make_column()
    assert memory.allocation is not allocation


class Failing:
    """Runs out of memory after so many calls of `_moved`."""

    def __init__(self, num_moves: int) -> None:
        self._left, self._moved = num_moves, cache_layer._moved

    def __call__(self, *arguments: Any) -> torch.Tensor:
        if not self._left:
            raise torch.OutOfMemoryError
        self._left -= 1
        return self._moved(*arguments)


@pytest.mark.parametrize("num_moves", range(2 * NUM_LAYERS))
@pytest.mark.parametrize("grows_in_place", [True, False])
def test_out_of_memory_leaves_slots_whole_or_marked_corrupt(
    num_moves: int, grows_in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = KVCache(torch.device("cpu"))
    sequences = [list(range(COLUMN_STEP - 20)), [1, 2, 3]]
    for tokens in sequences:
        memory.add(prefilled([tokens]), 0, len(tokens))
    joining = list(range(COLUMN_STEP - 20 if grows_in_place else COLUMN_STEP + 5))
    if grows_in_place:
        memory.add(prefilled([sequences[1]]), 0, 3)
        sequences.append(list(sequences[1]))
        memory.add(prefilled([sequences[1]]), 0, 3)
        sequences.append(list(sequences[1]))
    allocation = memory.allocation
    with monkeypatch.context() as patch:
        patch.setattr(cache_layer, "_moved", Failing(num_moves))
        with pytest.raises(torch.OutOfMemoryError):
            memory.add(prefilled([joining]), 0, len(joining))
    assert memory.allocation is not allocation
    assert memory.is_corrupt is not grows_in_place
    if grows_in_place:
        check_step(memory, sequences, [9] * len(sequences))
        check(memory, [[*tokens, 9] for tokens in sequences])
        memory.add(prefilled([joining]), 0, len(joining))
        check(memory, [*([*tokens, 9] for tokens in sequences), joining])
