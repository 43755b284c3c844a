# SPDX-License-Identifier: Apache-2.0
"""KVCacheLanes of rows: a text is as wide as those beside it in its lane, and every row is found by its number."""

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
    """Rows in lanes, and the text of each."""

    def __init__(self, model: Any, max_padding: float = MAX_PADDING) -> None:
        self.forward = Forward(model)
        self.decoder = Decoder(self.forward, "eager")
        self.lanes = KVCacheLanes(self.forward.device, max_padding)
        self.texts: list[list[int]] = []

    @property
    def widths(self) -> list[tuple[int, int]]:
        return [(lane.num_rows, lane.width) for lane in self.lanes._lanes]

    @torch.inference_mode()
    def join(self, text: list[int]) -> None:
        prefilled, logits = self.forward.prefill(text)
        place = self.lanes.add(prefilled, 0, len(text))
        self.texts.insert(place, [*text, int(logits.argmax())])

    def step(self) -> None:
        logits = self.lanes.step(self.decoder, torch.tensor([text[-1] for text in self.texts]))
        for text, token in zip(self.texts, logits.argmax(-1).tolist(), strict=True):
            text.append(token)

    @torch.inference_mode()
    def leave(self, row: int) -> list[int]:
        text, last = self.texts[row], self.lanes.remove(row)
        self.texts[row] = self.texts[last]
        del self.texts[last]
        return text


def test_a_long_text_beside_short_ones_has_a_lane_of_its_own(model: Any) -> None:
    running = Running(model)
    for length in (20, 25, 200, 22, 190, 30):
        running.join(prompt(length))
    assert running.widths == [(4, 30), (2, 200)]
    assert sum(rows for rows, _ in running.widths) == 6
    assert running.lanes.width == 200
    assert running.lanes.num_tokens < 6 * 256


def test_a_new_lane_for_which_there_is_no_memory_is_not_there(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(model)
    running.join(prompt(20))
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "add", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(torch.OutOfMemoryError):
            running.join(prompt(200))
    assert running.widths == [(1, 20)]
    running.step()
    assert running.texts == [[*prompt(20), *solo_ids(model, prompt(20), 2)]]


def test_one_lane_where_padding_does_not_matter(model: Any) -> None:
    running = Running(model, math.inf)
    for length in (20, 200, 22):
        running.join(prompt(length))
    assert running.widths == [(3, 200)]


def test_a_lane_that_is_empty_is_given_back_but_for_the_last(model: Any) -> None:
    running = Running(model)
    for length in (20, 200):
        running.join(prompt(length))
    held = running.lanes.num_tokens
    running.leave(0)
    assert running.widths == [(1, 200)]
    assert running.lanes.num_tokens < held
    running.leave(0)
    assert running.lanes.num_tokens > 0  # kept for the next text
    running.join(prompt(10))
    assert running.widths == [(1, 10)]
    running.leave(0)
    running.lanes.release()
    assert running.lanes.num_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_of_generate_whatever_lane_they_are_in(seed: int, model: Any) -> None:
    source, running, done, most = random.Random(seed), Running(model), [], 0
    lengths: dict[int, int] = {}  # of prompts, by their first token, which is a number of their own
    for number in range(120):
        act = source.random()
        if act < 0.3 and len(running.texts) < 8:
            text = [number + 3, *prompt(source.choice([3, 10, 40, 120, 200]) + source.randrange(10), seed=number)]
            lengths[number + 3] = len(text)
            running.join(text)
        elif act < 0.4 and running.texts:
            done.append(running.leave(source.randrange(len(running.texts))))
        elif running.texts:
            running.step()
        most = max(most, len(running.widths))
    assert most > 1
    for text in [*done, *running.texts]:
        length = lengths[text[0]]
        assert text[length:] == solo_ids(model, text[:length], len(text) - length)


def test_what_it_says_it_needs_is_what_it_takes(model: Any) -> None:
    source = random.Random(1)
    for _ in range(20):
        running = Running(model)
        running.lanes.limit([], 0)
        lengths = [source.choice([5, 60, 130, 300]) for _ in range(source.randrange(1, 7))]
        told = running.lanes.tokens_with(lengths)
        running.lanes.limit(lengths, running.lanes.most_with(lengths))
        for length in lengths:
            running.join(prompt(length))
        running.lanes.limit([], running.lanes.most_with([]))
        running.step()
        assert running.lanes.num_tokens == told
    assert running.lanes.tokens_with([]) == sum(buffer_tokens(rows, width + 1) for rows, width in running.widths)
    assert told % COLUMN_STEP == 0


def test_a_step_that_breaks_off_between_two_lanes_tears_the_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running, step, count = Running(model), Decoder.step, []

    def fail(self: Decoder, *arguments: Any) -> torch.Tensor:
        count.append(1)
        if len(count) == 2:
            raise RuntimeError("boom")
        return step(self, *arguments)

    for length in (20, 200):
        running.join(prompt(length))
    monkeypatch.setattr(Decoder, "step", fail)
    with pytest.raises(RuntimeError, match="boom"):
        running.step()
    assert running.lanes.is_corrupt


def test_step_without_memory_for_logits_marks_lanes_corrupt(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        """torch, but for one function."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def cat(self, *_: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

    running = Running(model)
    for length in (20, 200):
        running.join(prompt(length))
    monkeypatch.setattr(lanes, "torch", Torch())
    with pytest.raises(torch.OutOfMemoryError):
        running.step()
    assert running.lanes.is_corrupt


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_the_engine_goes_on_after_such_a_step(failing: int, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step, count = ContinuousBatchingEngine(model, max_num_seqs=8), Decoder.step, [0]
    items = [(prompt(length, seed=length), 12) for length in (5, 300, 9, 280, 14, 100)]

    def fail(self: Decoder, memory: Any, newest: torch.Tensor) -> torch.Tensor:
        count[0] += memory in engine.memory.lanes._lanes[1:]
        if count[0] == failing:
            count[0] += 1
            raise RuntimeError("boom")
        return step(self, memory, newest)

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


def test_a_budget_is_kept_with_lanes(model: Any) -> None:
    most, allowed = 0, 1536
    engine = ContinuousBatchingEngine(model, max_num_seqs=8, max_cache_tokens=allowed)
    items = [(prompt(length, seed=length), 10) for length in (5, 300, 9, 280, 14, 100, 310, 6, 290)]

    def watch(_copy: int, _token_id: int) -> bool:
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
