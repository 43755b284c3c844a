# SPDX-License-Identifier: Apache-2.0
"""The rows of key/value memory against a plain model of them: a dict of texts, each a list of numbered tokens."""

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


def prefilled(texts: list[list[int]]) -> DynamicCache:
    longest = max(map(len, texts))
    made = DynamicCache()
    for layer, pair in enumerate(contents(torch.tensor([[-7] * (longest - len(each)) + each for each in texts]))):
        made.update(*pair, layer)
    return made


def put_newest(rows: KVCache, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a forward does; what every layer gives to its attention."""
    new = contents(torch.tensor(tokens)[:, None])
    return [rows.cache.update(*pair, layer) for layer, pair in enumerate(new)]


def check(rows: KVCache, texts: list[list[int]]) -> None:
    """Every row holds its text and nothing else is seen."""
    assert rows.num_rows == len(texts)
    assert rows.position_ids().flatten().tolist() == [len(each) for each in texts]
    assert rows.clock_index.tolist() == [rows.clock]
    assert rows.num_tokens == rows.shape[0] * rows.shape[1]
    if texts:
        assert rows.width == max(map(len, texts))
    for row, text in enumerate(texts):
        for part in (len(text), len(text) // 2):
            for (keys, values), (its_keys, its_values) in zip(
                rows.read(row, part).layers, contents(torch.tensor([text])), strict=True
            ):
                torch.testing.assert_close(keys, its_keys[0, :, :part])
                torch.testing.assert_close(values, its_values[0, :, :part])


def check_step(rows: KVCache, texts: list[list[int]], new: list[int]) -> None:
    rows.make_column()
    mask = rows.attention_mask()
    assert mask.tolist() == [[0] * (rows.width - len(each)) + [1] * (len(each) + 1) for each in texts]
    for keys, values in put_newest(rows, new):
        assert keys.shape == (len(texts), HEADS, rows.width + 1, KEY_DIM)
        assert values.shape == (len(texts), HEADS, rows.width + 1, VALUE_DIM)
    with rows.padded_to(*rows.shape):
        mask = rows.attention_mask()
        assert mask.sum(-1)[: len(texts)].tolist() == [len(each) + 1 for each in texts]
        assert mask[:, : rows.clock + 1].any(-1).all()  # no row without anything to see
        assert not mask[: len(texts), rows.clock + 1 :].any()
        assert rows.position_ids()[len(texts) :].eq(0).all()
        padded = put_newest(rows, new + [0] * (rows.shape[0] - len(new)))
        assert padded[0][0].shape == (rows.shape[0], HEADS, rows.shape[1], KEY_DIM)
    rows.advance()


@pytest.mark.parametrize("max_tokens", [None, 0])
@pytest.mark.parametrize("seed", range(6))
def test_rows_hold_their_texts_whoever_joins_and_leaves(
    seed: int, max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "COLUMN_STEP", 8)
    source = random.Random(seed)
    rows, texts = KVCache(torch.device("cpu")), list[list[int]]()
    rows.max_tokens = max_tokens
    held = 0
    for _ in range(200):
        act = source.random()
        if act < 0.12 and len(texts) < 6:
            batch = [[source.randrange(100) for _ in range(source.randrange(1, 30))] for _ in range(2)]
            needed = buffer_tokens(len(texts) + 1, max(rows.width, len(batch[0])) + 1)
            rows.add(prefilled(batch), 0, len(batch[0]))
            texts.append(batch[0])
            assert max_tokens is None or rows.num_tokens <= max(held, needed)
        elif act < 0.2 and texts:
            row = source.randrange(len(texts))
            rows.remove(row)
            last = texts.pop()
            if row < len(texts):
                texts[row] = last
        elif texts:
            new = [source.randrange(100) for _ in texts]
            before, least = rows.shape, buffer_tokens(len(texts), rows.width + 1)
            check_step(rows, texts, new)
            if rows.shape != before and max_tokens is not None:
                assert rows.num_tokens == least
            for text, token in zip(texts, new, strict=True):
                text.append(token)
        held = rows.num_tokens
        check(rows, texts)


def test_buffers_grow_ahead_as_far_as_the_limit_lets_them() -> None:
    rows, text = KVCache(torch.device("cpu")), list(range(10))
    for _ in range(3):
        rows.add(prefilled([text]), 0, 10)
    assert rows.shape == (4, COLUMN_STEP)
    rows.max_tokens = 7 * COLUMN_STEP
    for _ in range(2):
        rows.add(prefilled([text]), 0, 10)
    assert rows.shape == (5, COLUMN_STEP)  # and not 8
    assert buffer_tokens(5, 11) == rows.num_tokens
    assert buffer_tokens(6, COLUMN_STEP + 1) == 6 * 2 * COLUMN_STEP


def test_a_growth_that_fits_only_without_what_nobody_uses_gives_that_up() -> None:
    rows, text = KVCache(torch.device("cpu")), list(range(10))
    for _ in range(5):
        rows.add(prefilled([text]), 0, 10)
    for _ in range(4):
        rows.remove(0)
    rows.max_tokens = 2 * COLUMN_STEP
    rows.add(prefilled([list(range(COLUMN_STEP))]), 0, COLUMN_STEP)
    assert rows.shape == (2, 2 * COLUMN_STEP)
    check(rows, [text, list(range(COLUMN_STEP))])


def test_columns_that_no_row_needs_are_dropped() -> None:
    rows, text = KVCache(torch.device("cpu")), list(range(3))
    rows.add(prefilled([list(range(COLUMN_STEP + 3))]), 0, COLUMN_STEP + 3)
    rows.add(prefilled([text]), 0, 3)
    rows.remove(0)
    assert rows.first == COLUMN_STEP
    check_step(rows, [text], [5])
    assert (rows.first, rows.clock) == (0, 4)
    check(rows, [[*text, 5]])


def test_rows_are_moved_rather_than_the_buffers_enlarged() -> None:
    rows, texts = KVCache(torch.device("cpu")), [list(range(90)), [7] * 40]
    for text in texts:
        rows.add(prefilled([text]), 0, len(text))
    for token in range(COLUMN_STEP - 90):
        check_step(rows, texts, [token, token])
        for text in texts:
            text.append(token)
    assert rows.clock == rows.shape[1]
    rows.remove(0)
    check_step(rows, texts[1:], [5])
    assert rows.shape == (2, COLUMN_STEP)
    check(rows, [[*texts[1], 5]])


def test_released_rows_hold_nothing_and_can_be_used_again() -> None:
    rows, text = KVCache(torch.device("cpu")), list(range(10))
    rows.add(prefilled([text]), 0, 10)
    before = rows.allocation
    rows.remove(0)
    rows.release()
    assert rows.num_tokens == 0
    assert rows.allocation is not before
    rows.add(prefilled([text]), 0, 10)
    check(rows, [text])


def test_the_allocation_tells_whether_addresses_are_the_same() -> None:
    rows, text = KVCache(torch.device("cpu")), list(range(10))
    rows.add(prefilled([text]), 0, 10)

    def addresses() -> list[int]:
        held = [each for layer in rows.layers() for each in (layer.key_rows, layer.value_rows)]
        return [each.data_ptr() for each in (*held, rows.clock_index, rows.attention_mask(), rows.position_ids())]

    before, allocation = addresses(), rows.allocation
    for token in range(COLUMN_STEP - 10):
        check_step(rows, [text], [token])
        text.append(token)
    assert rows.clock == rows.shape[1]
    assert (addresses(), rows.allocation) == (before, allocation)
    rows.make_column()
    assert rows.allocation is not allocation


class Failing:
    """Lets `_moved` work a few times and then run out of memory."""

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
    rows = KVCache(torch.device("cpu"))
    texts = [list(range(COLUMN_STEP - 20)), [1, 2, 3]]
    for text in texts:
        rows.add(prefilled([text]), 0, len(text))
    joining = list(range(COLUMN_STEP - 20 if grows_in_place else COLUMN_STEP + 5))
    if grows_in_place:
        rows.add(prefilled([texts[1]]), 0, 3)
        texts.append(list(texts[1]))
        rows.add(prefilled([texts[1]]), 0, 3)
        texts.append(list(texts[1]))
    allocation = rows.allocation
    with monkeypatch.context() as patch:
        patch.setattr(cache_layer, "_moved", Failing(num_moves))
        with pytest.raises(torch.OutOfMemoryError):
            rows.add(prefilled([joining]), 0, len(joining))
    assert rows.allocation is not allocation
    assert rows.is_corrupt is not grows_in_place
    if grows_in_place:
        check_step(rows, texts, [9] * len(texts))
        check(rows, [[*text, 9] for text in texts])
        rows.add(prefilled([joining]), 0, len(joining))
        check(rows, [*([*text, 9] for text in texts), joining])
