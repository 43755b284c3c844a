# SPDX-License-Identifier: Apache-2.0
"""KV cache lanes: a sequence is padded to the longest of its lane, and has one slot number in all lanes together."""

import math
import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.runner import kv_lanes as lanes
from hf_triton.runner.decode import Decoder
from hf_triton.runner.forward import Forward
from hf_triton.runner.kv_cache import COLUMN_STEP, KVCache, buffer_tokens
from hf_triton.runner.kv_lanes import KVCacheLanes
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import BASE, build
from tests.support.engine import Client, token_ids
from tests.support.reference import solo_ids

MAX_PADDING = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return build("LlamaConfig", BASE | {"max_position_embeddings": 1024})


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 300) for _ in range(length)]


class Running:
    """Running sequences in lanes, and the tokens of each."""

    def __init__(self, model: Any, max_padding: float = MAX_PADDING) -> None:
        self.forward = Forward(model)
        self.decoder = Decoder(self.forward, "eager")
        self.lanes = KVCacheLanes(self.forward.device, max_padding)
        self.sequences: list[list[int]] = []

    @property
    def widths(self) -> list[tuple[int, int]]:
        return [(lane.num_rows, lane.width) for lane in self.lanes._lanes]

    @torch.inference_mode()
    def add(self, tokens: list[int]) -> None:
        prefilled, logits = self.forward.prefill(tokens)
        place = self.lanes.add(prefilled, 0, len(tokens))
        self.sequences.insert(place, [*tokens, int(logits.argmax())])

    def step(self) -> None:
        logits = self.lanes.step(self.decoder, torch.tensor([tokens[-1] for tokens in self.sequences]))
        for tokens, token in zip(self.sequences, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)

    @torch.inference_mode()
    def remove(self, row: int) -> list[int]:
        tokens, last = self.sequences[row], self.lanes.remove(row)
        self.sequences[row] = self.sequences[last]
        del self.sequences[last]
        return tokens


def test_a_long_sequence_beside_short_ones_has_a_lane_of_its_own(model: Any) -> None:
    running = Running(model)
    for length in (20, 25, 200, 22, 190, 30):
        running.add(prompt(length))
    assert running.widths == [(4, 30), (2, 200)]
    assert sum(rows for rows, _ in running.widths) == 6
    assert running.lanes.width == 200
    assert running.lanes.num_tokens < 6 * 256


def test_a_lane_without_memory_is_not_added(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(model)
    running.add(prompt(20))
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "add", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(torch.OutOfMemoryError):
            running.add(prompt(200))
    assert running.widths == [(1, 20)]
    running.step()
    assert running.sequences == [[*prompt(20), *solo_ids(model, prompt(20), 2)]]


def test_unlimited_padding_needs_one_lane(model: Any) -> None:
    running = Running(model, math.inf)
    for length in (20, 200, 22):
        running.add(prompt(length))
    assert running.widths == [(3, 200)]


def test_empty_lanes_are_freed_but_for_the_last(model: Any) -> None:
    running = Running(model)
    for length in (20, 200):
        running.add(prompt(length))
    num_before = running.lanes.num_tokens
    running.remove(0)
    assert running.widths == [(1, 200)]
    assert running.lanes.num_tokens < num_before
    running.remove(0)
    assert running.lanes.num_tokens > 0  # kept for the next sequence
    running.add(prompt(10))
    assert running.widths == [(1, 10)]
    running.remove(0)
    running.lanes.release()
    assert running.lanes.num_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_sequences_in_any_lane_equal_generate(seed: int, model: Any) -> None:
    source, running, done, most = random.Random(seed), Running(model), [], 0
    lengths: dict[int, int] = {}  # of prompts, by their first token, which no other has
    for number in range(120):
        action = source.random()
        if action < 0.3 and len(running.sequences) < 8:
            tokens = [number + 3, *prompt(source.choice([3, 10, 40, 120, 200]) + source.randrange(10), seed=number)]
            lengths[number + 3] = len(tokens)
            running.add(tokens)
        elif action < 0.4 and running.sequences:
            done.append(running.remove(source.randrange(len(running.sequences))))
        elif running.sequences:
            running.step()
        most = max(most, len(running.widths))
    assert most > 1
    for tokens in [*done, *running.sequences]:
        length = lengths[tokens[0]]
        assert tokens[length:] == solo_ids(model, tokens[:length], len(tokens) - length)


def test_predicted_tokens_equal_the_allocated_ones(model: Any) -> None:
    source = random.Random(1)
    for _ in range(20):
        running = Running(model)
        running.lanes.limit([], 0)
        lengths = [source.choice([5, 60, 130, 300]) for _ in range(source.randrange(1, 7))]
        predicted = running.lanes.tokens_with(lengths)
        running.lanes.limit(lengths, running.lanes.most_with(lengths))
        for length in lengths:
            running.add(prompt(length))
        running.lanes.limit([], running.lanes.most_with([]))
        running.step()
        assert running.lanes.num_tokens == predicted
    assert running.lanes.tokens_with([]) == sum(buffer_tokens(rows, width + 1) for rows, width in running.widths)
    assert predicted % COLUMN_STEP == 0


def test_step_that_fails_between_two_lanes_marks_lanes_corrupt(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running, step, count = Running(model), Decoder.step, []

    def fail(self: Decoder, *arguments: Any) -> torch.Tensor:
        count.append(1)
        if len(count) == 2:
            raise RuntimeError("boom")
        return step(self, *arguments)

    for length in (20, 200):
        running.add(prompt(length))
    monkeypatch.setattr(Decoder, "step", fail)
    with pytest.raises(RuntimeError, match="boom"):
        running.step()
    assert running.lanes.is_corrupt


def test_step_without_memory_for_logits_marks_lanes_corrupt(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        """torch, except for one function."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def cat(self, *_: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

    running = Running(model)
    for length in (20, 200):
        running.add(prompt(length))
    monkeypatch.setattr(lanes, "torch", Torch())
    with pytest.raises(torch.OutOfMemoryError):
        running.step()
    assert running.lanes.is_corrupt


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_the_engine_continues_after_a_step_that_failed_between_lanes(
    failing: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step, count = ContinuousBatchingEngine(model, max_num_seqs=8), Decoder.step, [0]
    items = [(prompt(length, seed=length), 12) for length in (5, 300, 9, 280, 14, 100)]

    def fail(self: Decoder, memory: Any, *arguments: Any) -> torch.Tensor:
        count[0] += memory in engine.memory.lanes._lanes[1:]
        if count[0] == failing:
            count[0] += 1
            raise RuntimeError("boom")
        return step(self, memory, *arguments)

    monkeypatch.setattr(Decoder, "step", fail)
    client = Client(engine)
    try:
        for ids, max_new_tokens in items:
            client.submit(ids, SamplingParams(max_new_tokens))
        outcomes = client.outcomes()
    finally:
        engine.close()
    assert [token_ids(outcome) for outcome in outcomes] == [[solo_ids(model, *item)] for item in items]
    assert count[0] > failing


def test_lanes_stay_within_the_budget(model: Any) -> None:
    most, allowed = 0, 1536
    engine = ContinuousBatchingEngine(model, max_num_seqs=8, max_cache_tokens=allowed)
    items = [(prompt(length, seed=length), 10) for length in (5, 300, 9, 280, 14, 100, 310, 6, 290)]

    def watch(*_: object) -> bool:
        nonlocal most
        most = max(most, engine.memory.num_used_tokens)
        return False

    client = Client(engine)
    try:
        for ids, max_new_tokens in items:
            client.submit(ids, SamplingParams(max_new_tokens), on_token=watch)
        outcomes = client.outcomes()
    finally:
        engine.close()
    assert [token_ids(outcome) for outcome in outcomes] == [[solo_ids(model, *item)] for item in items]
    assert 0 < most <= allowed
