# SPDX-License-Identifier: Apache-2.0
"""Keys and values in blocks, states in slots, and the cache that has both."""

import errno
import mmap
import weakref
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from hf_triton.runner.kv_blocks import KVBlocks
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.paged_cache import PagedCache
from hf_triton.runner.state_slots import SlotStatesLayer, Turn
from hf_triton.runner.step import TokenRange
from hf_triton.runner.step_tensors import StepTensors
from tests.support.architectures import CONTINUOUS, build

CPU = torch.device("cpu")
SIZE = 4
"""Tokens of a block."""


def tokens(start: int, end: int, table: list[int], slot: int = -1) -> TokenRange:
    return TokenRange(0, start, end, list(range(end - start)), table, end, slot=slot)


def numbered(num_blocks: int = 6) -> KVBlocks:
    """Two key heads of one number; a token's key is its slot, its value the same negated."""
    first = torch.zeros(1, 2, 1, 1)
    blocks = KVBlocks(num_blocks, SIZE, first, first)
    slots = torch.arange(num_blocks * SIZE, dtype=torch.float32).view(num_blocks, 1, SIZE, 1)
    blocks.keys[:], blocks.values[:] = slots, -slots
    return blocks


def test_step_tensors_say_where_each_token_goes() -> None:
    parts = tokens(5, 6, [3, 1]), tokens(0, 2, [2]), tokens(3, 9, [4, 0, 5])
    step = StepTensors(parts, SIZE, CPU)
    assert (step.num_decodes, step.num_tokens, step.bounds) == (1, 9, [0, 1, 3, 9])
    assert step.positions.tolist() == [5, 0, 1, 3, 4, 5, 6, 7, 8]
    assert step.slots.tolist() == [5, 8, 9, 19, 0, 1, 2, 3, 20]
    assert step.tables.tolist() == [[3, 1, 0], [2, 0, 0], [4, 0, 5]]
    assert step.lengths.tolist() == [6, 2, 9]
    assert step.on(CPU, "slots") is step.slots


@pytest.mark.parametrize(("first", "length"), [(0, 1), (0, 4), (0, 9), (4, 5), (4, 8), (8, 9)])
def test_a_sequence_is_read_from_its_blocks(first: int, length: int) -> None:
    keys, values = numbered().read(torch.tensor([5, 0, 3]), length, first)
    slots = [*range(20, 24), *range(4), *range(12, 16)][first:length]
    assert keys.squeeze(2).tolist() == [slots, slots]
    assert values.squeeze(2).tolist() == [[-slot for slot in slots]] * 2


def test_blocks_are_finite_by_keys_and_values_of_any_size() -> None:
    blocks = KVBlocks(4, SIZE, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 3))
    blocks.keys[1, 0, 2, 7], blocks.values[2, 1, 0, 0] = torch.nan, torch.inf
    assert blocks.are_finite([0, 1, 2, 3, 0]).tolist() == [True, False, False, True, True]


def test_sequences_of_a_step_are_gathered_one_behind_the_other() -> None:
    keys, values = numbered().gather(StepTensors((tokens(4, 5, [5, 0]), tokens(0, 2, [3])), SIZE, CPU))
    assert keys.shape == values.shape == (1, 2, 7, 1)
    assert keys[0, 1, :, 0].tolist() == [20, 21, 22, 23, 0, 12, 13]


def test_all_blocks_are_read_before_one_is_overwritten() -> None:
    blocks = numbered()
    blocks.copy([(0, 1), (1, 2), (2, 0)])
    assert (blocks.keys[:, 0, 0, 0] / SIZE).tolist() == [2, 0, 1, 3, 4, 5]
    assert torch.equal(blocks.values, -blocks.keys)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_touched_as_blocks_are_written_and_given_back() -> None:
    first, mib = torch.zeros(1, 8, 1, 64), 1 << 20
    before = resident_bytes()
    blocks = KVBlocks(1 << 12, 64, first, first)  # 2 GiB of 128 KiB each, twice
    assert blocks.bytes_per_token == 2 * 8 * 64 * 4
    assert resident_bytes() < before + 32 * mib
    for number in range(1024, 2048):
        blocks.keys[number] = blocks.values[number] = 1.0
    assert resident_bytes() > before + 200 * mib
    blocks.give_back([*range(1024, 1500), *range(1501, 2048)])
    assert resident_bytes() < before + 64 * mib
    assert blocks.keys[1500].eq(1).all()
    assert blocks.values[1500].eq(1).all()
    assert not blocks.keys[[1024, 1499, 1501, 2047]].any()


def test_parts_of_pages_are_kept() -> None:
    blocks = numbered(2048)  # 32 bytes each
    kept = blocks.keys.clone()
    blocks.give_back([3, *range(100, 600)])
    kept[100:600] = blocks.keys[100:600]
    assert torch.equal(blocks.keys, kept)


def step_of(slots: list[int], *, is_new: bool) -> StepTensors:
    parts = [tokens(0, 2, [0], slot) if is_new else tokens(2, 3, [0], slot) for slot in slots]
    return StepTensors(parts, SIZE, CPU)


def advance(layer: SlotStatesLayer, slots: list[int], *, is_new: bool = False) -> list[float]:
    """The states that a forward of these slots finds; it adds 1 to the first, 2 to the second, and so on."""
    layer.begin(step_of(slots, is_new=is_new))
    if not layer.is_recurrent_states_initialized[0]:
        layer.lazy_initialization(recurrent_states=torch.ones(len(slots), 2))
    rows = layer.recurrent_states[0]
    found: list[float] = rows[:, 0].tolist()
    layer.update_recurrent_state(rows + torch.arange(1.0, len(slots) + 1)[:, None])
    layer.end()
    return found


def test_a_forward_sees_and_changes_the_states_of_its_slots() -> None:
    layer = SlotStatesLayer()
    assert advance(layer, [1, 2], is_new=True) == [0, 0]
    assert advance(layer, [1, 2]) == [1, 2]  # a view
    assert advance(layer, [2, 1]) == [4, 2]  # copies
    assert advance(layer, [0, 2]) == [0, 5]
    assert advance(layer, [1]) == [4]
    assert advance(layer, [1], is_new=True) == [0]
    assert layer.has_previous_state[0] is False  # as transformers sees it, until the layer notes a state


@pytest.mark.parametrize(("slots", "is_view"), [([1], True), ([1, 2, 3], True), ([1, 3], False), ([2, 1], False)])
def test_rows_of_consecutive_slots_are_no_copies(slots: list[int], is_view: bool) -> None:
    layer = SlotStatesLayer()
    advance(layer, [0, 1, 2, 3], is_new=True)
    layer.begin(step_of(slots, is_new=False))
    is_shared = layer.recurrent_states[0].untyped_storage().data_ptr() == layer.states()[0].untyped_storage().data_ptr()
    assert is_shared is is_view


def test_copies_of_one_layer_are_kept_when_the_next_layer_has_its_turn() -> None:
    turn = Turn()
    layers = [SlotStatesLayer(turn=turn) for _ in range(2)]
    for layer in layers:
        advance(layer, [0, 1, 2], is_new=True)
        layer.begin(step_of([2, 0], is_new=False))
    layers[0].recurrent_states[0].fill_(7)
    assert layers[0].states()[0][:, 0].tolist() == [1, 2, 3]
    assert layers[1].recurrent_states[0][:, 0].tolist() == [3, 1]
    assert layers[0].states()[0][:, 0].tolist() == [7, 2, 7]
    assert not layers[0].recurrent_states._rows, "nothing holds the copies"


def test_buffers_grow_for_new_slots_and_keep_the_others() -> None:
    layer = SlotStatesLayer()
    advance(layer, [0, 1], is_new=True)
    assert advance(layer, [9], is_new=True) == [0]
    assert advance(layer, [0, 1, 9]) == [1, 2, 1]


def test_states_are_copied_to_slots_beyond_the_buffer() -> None:
    layer = SlotStatesLayer()
    advance(layer, [0], is_new=True)
    advance(layer, [1], is_new=True)
    advance(layer, [1])
    layer.copy([(0, 7)])
    layer.copy([(7, 3), (1, 7)])
    assert advance(layer, [3, 7]) == [1, 2]


def test_layers_are_those_of_the_model() -> None:
    cache = PagedCache(build(*CONTINUOUS["qwen3-next"]).config, 3, SIZE)
    assert (cache.has_states, cache.has_keys) == (True, True)
    assert not PagedCache(build(*CONTINUOUS["mamba2"]).config, 3, SIZE).has_keys
    assert not PagedCache(LlamaConfig(), 3, SIZE).has_states


def test_a_layer_writes_new_tokens_and_returns_them() -> None:
    cache = PagedCache(LlamaConfig(num_hidden_layers=1), 3, SIZE)
    keys, values = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 5)
    cache.begin(StepTensors((tokens(3, 6, [2, 0]),), SIZE, CPU))
    returned = cache.update(keys, values, 0)
    assert returned[0] is keys
    assert returned[1] is values
    assert cache.layer_of == {id(keys): cache.layers[0]}
    (blocks,) = cache.blocks()
    written = torch.cat([blocks.keys[2, :, 3:], blocks.keys[0, :, :2]], 1)
    assert torch.equal(written, keys[0])
    cache.end()
    assert not cache.layer_of
    cache.copy_blocks([(0, 1)])
    assert torch.equal(blocks.values[1, :, :2], values[0, :, 1:])


def test_no_other_tensor_gets_the_identity_of_keys_that_a_model_drops() -> None:
    """Attention finds its layer by it."""
    cache = PagedCache(LlamaConfig(num_hidden_layers=1), 3, SIZE)
    cache.begin(StepTensors((tokens(0, 3, [2]),), SIZE, CPU))
    keys, _ = cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), 0)
    kept = weakref.ref(keys)
    del keys
    assert kept() is not None
    cache.end()
    assert kept() is None


def test_blocks_for_which_there_are_no_addresses_are_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    first = torch.zeros(1, 2, 1, 1)
    with pytest.raises(MemoryError):
        KVBlocks(6, SIZE, first, first)


def test_a_gathering_cache_returns_the_tokens_of_whole_sequences() -> None:
    cache = PagedCache(LlamaConfig(num_hidden_layers=1), 3, SIZE, gathers=True)
    first, second = torch.randn(2, 1, 2, 3, 8)
    for start, keys in ((0, first), (3, second)):
        cache.begin(StepTensors((tokens(start, start + 3, [2, 0]),), SIZE, CPU))
        returned, _ = cache.update(keys, keys, 0)
    assert torch.equal(returned, torch.cat([first, second], 2))


@pytest.mark.parametrize(
    ("name", "per_token", "has_states"),
    [
        ("gemma", 2 * 2 * 2 * 8 * 4, False),  # layers, keys and values, heads, size, bytes
        ("lfm2", 2 * 2 * 8 * 4, True),
        ("mamba2", 8, True),  # the token's id
    ],
)
def test_memory_per_token(name: str, per_token: int, has_states: bool) -> None:
    bytes_per_token, slot_tokens = ModelRunner(build(*CONTINUOUS[name]), Way(), block_size=SIZE).memory_per_token()
    assert bytes_per_token == {CPU: per_token}
    assert (slot_tokens > 0) is has_states
