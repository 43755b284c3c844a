# SPDX-License-Identifier: Apache-2.0
"""Prefill batches and decoding steps that run ahead in the continuous engine."""

import math
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hf_triton.engine.plan import PrefillRequest, is_worth_one_batch

from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.sequence import SequenceGroup
from hf_triton.engine.types import Observer
from hf_triton.runner.device import CHUNK_SIZES, ChunkSizes, DeviceContext
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import BASE, build
from tests.support.engine import PROMPT, Client, StartEngine, error_code, only, prompts, token_ids
from tests.support.reference import solo_ids

# --- prefill order ---------------------------------------------------------------------------------------------------


class Forwards:
    """The forwards of an engine: prefills, as contexts and columns, and `steps`."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self._model, self.seen = engine.forward.model, list[Any]()
        engine.forward.model = self

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        rows, columns = input_ids.shape
        if columns > 1 or self.seen[-1:] != ["steps"]:
            self.seen.append((rows, columns) if columns > 1 else "steps")
        return self._model(input_ids=input_ids, **arguments)

    @property
    def batch_sizes(self) -> list[int]:
        """Contexts of each prefill."""
        return [each[0] for each in self.seen if each != "steps"]


def test_later_prompts_do_not_delay_the_first(start: StartEngine) -> None:
    engine = start(max_num_seqs=16)
    client, forwards, params = Client(engine), Forwards(engine), SamplingParams(12)
    call = forwards.__call__

    def call_and_submit(*, input_ids: torch.Tensor, **arguments: Any) -> Any:
        if input_ids.shape[1] > 1 and len(forwards.batch_sizes) < 10:
            client.submit([5, 7, 11], params)
        return call(input_ids=input_ids, **arguments)

    engine.forward.model = call_and_submit
    client.submit([3, 5, 7], params)
    while len(forwards.batch_sizes) < 10:
        time.sleep(0.01)
    client.outcomes()
    assert forwards.seen.index("steps") <= 2


def submit_lengths(engine: ContinuousBatchingEngine, lengths: list[int]) -> threading.Semaphore:
    """Submit prompts at one moment; the semaphore is released for each outcome."""
    answered = threading.Semaphore(0)
    params = SamplingParams(12)
    engine.submit(
        [
            SequenceGroup([3 + number] * length, params, lambda _: answered.release())
            for number, length in enumerate(lengths)
        ]
    )
    return answered


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([60, 44, 58], [(3, 60), "steps"]),
        ([60, 20, 58, 21], [(1, 60), (1, 20), (1, 58), (1, 21), "steps"]),
        ([60, 61, 20, 21], [(2, 61), (2, 21), "steps"]),
        ([300, 20, 260], [(1, 300), (1, 20), "steps", (1, 256), "steps", (1, 4), "steps"]),
        # Longer than a chunk without decoding: short prompts overtake it after each of its chunks.
        ([900, 800, 20, 21], [(1, 512), (2, 21), "steps", (1, 256), "steps", (1, 132), "steps", (1, 256), "steps"]),
        ([900, 20, 300], [(1, 512), (1, 20), (1, 300), "steps", (1, 256), "steps", (1, 132), "steps"]),
        (
            [900, 20, 500],
            [(1, 512), (1, 20), "steps", (1, 256), "steps", (1, 256), "steps", (1, 244), "steps", (1, 132), "steps"],
        ),
    ],
)
def test_prompts_of_unlike_lengths_are_prefilled_one_after_another(
    lengths: list[int], expected: list[Any], start: StartEngine
) -> None:
    engine = start()
    forwards = Forwards(engine)
    answered = submit_lengths(engine, lengths)
    for _ in lengths:
        assert answered.acquire(timeout=60)
    assert forwards.seen[: len(expected)] == expected


def test_short_prompts_overtake_long_ones_that_are_prefilled_whole(start: StartEngine) -> None:
    engine = start(prefills_whole=True)
    forwards = Forwards(engine)
    answered = submit_lengths(engine, [900, 800, 20, 21])
    for _ in range(4):
        assert answered.acquire(timeout=60)
    assert forwards.seen == [(1, 900), "steps", (2, 21), "steps", (1, 800), "steps"]


def test_running_sequences_wait_for_one_chunk_at_most(start: StartEngine) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(512, 70, per_weights=16))
    engine = start(config=config)
    forwards, answered = Forwards(engine), list[threading.Semaphore]()

    def on_token(*_: object) -> bool:
        if not answered and "steps" in forwards.seen:
            answered.append(submit_lengths(engine, [40, 20, 2, 60]))
        return False

    Client(engine).ask([5] * 9, SamplingParams(40), on_token=on_token)
    for _ in range(4):
        assert answered[0].acquire(timeout=60)
    seen = forwards.seen[forwards.seen.index((1, 40)) :]
    assert seen[:5] == [(1, 40), (1, 20), (1, 2), "steps", (1, 60)]


def test_chunks_beside_decoding_shrink_with_the_context_on_a_cpu() -> None:
    cpu, cuda, other = (DeviceContext(torch.device(name)).chunk_sizes for name in ("cpu", "cuda:1", "xpu"))
    assert [cpu.size(is_decoding=True, num_cached=columns) for columns in (0, 2047, 2048, 8192)] == [256, 256, 128, 51]
    assert cpu.size(is_decoding=False, num_cached=8192) == 512
    assert cuda.size(is_decoding=True, num_cached=8192) == 512
    assert cuda.size(is_decoding=False) == 1024
    assert other == cuda


def test_contexts_with_little_padding_share_a_batch() -> None:
    cpu, cuda = CHUNK_SIZES["cpu"], CHUNK_SIZES["cuda"]

    def is_worth(requests: list[PrefillRequest], sizes: ChunkSizes) -> bool:
        return is_worth_one_batch(requests, sizes, math.inf)

    requests = [PrefillRequest([], [0] * 100), PrefillRequest([], [0] * 84)]
    assert is_worth(requests, cpu)
    requests[1] = PrefillRequest([], [0] * 83)
    assert not is_worth(requests, cpu)
    assert is_worth(requests, cuda)
    assert is_worth([replace(requests[0], num_cached=17), requests[1]], cpu)  # which leaves no padding
    assert not is_worth([PrefillRequest([], [0] * 513)] * 2, cuda)


# --- one step ahead --------------------------------------------------------------------------------------------------


class Events:
    """The order in which steps begin and tokens go out."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self._step, self.seen = engine.decoder.step, list[str]()
        engine.decoder.step = self.step  # type: ignore[method-assign]

    def step(self, *arguments: Any) -> torch.Tensor:
        self.seen.append("step")
        return self._step(*arguments)

    def token(self, *_: object) -> bool:
        self.seen.append("token")
        return False

    def ask(self, client: Client, **settings: Any) -> list[str]:
        self.seen.clear()
        only(client.ask(PROMPT, SamplingParams(5, **settings), on_token=self.token))
        return self.seen


TOKEN_BY_TOKEN = ["token", *["step", "token"] * 4]  # the prefill gives the first one


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "seed": 3}], ids=str)
def test_static_steps_run_ahead_of_the_host(
    settings: dict[str, Any], start: StartEngine, request: pytest.FixtureRequest
) -> None:
    engine = start()
    seen = Events(engine).ask(Client(engine), **settings)
    if "static" in request.node.callspec.params.values():
        assert seen == ["token", "step", "step", "token", "step", "token", "step", "token", "token"]
    else:
        assert seen == TOKEN_BY_TOKEN


@pytest.mark.parametrize(
    "settings", [{"logprobs": 1}, {"repetition_penalty": 1.3}, {"logit_bias": ((7, 2.0),)}], ids=str
)
def test_sequences_that_need_the_host_are_decoded_token_by_token(settings: dict[str, Any], start: StartEngine) -> None:
    engine = start()
    assert Events(engine).ask(Client(engine), **settings) == TOKEN_BY_TOKEN


def test_mixed_sequences_equal_each_alone(model: Any, start: StartEngine) -> None:
    source, engine = random.Random(31), start(max_num_seqs=5)
    client = Client(engine)
    items = [
        (prompt, SamplingParams(source.randrange(1, 40), repetition_penalty=source.choice([1.0, 1.0, 1.4])))
        for prompt in prompts(40, seed=32)
    ]
    for item in items:
        client.submit(*item)
        time.sleep(source.choice([0, 0, 0.02]))
    for (prompt, params), outcome in zip(items, client.outcomes(), strict=True):
        expected = solo_ids(model, prompt, params.max_new_tokens, repetition_penalty=params.repetition_penalty)
        assert only(outcome).token_ids == expected


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")], ids=repr)
@pytest.mark.parametrize("failing", [2, 3, 9])
def test_failed_step_ahead_changes_no_output(
    error: Exception, failing: int, model: Any, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, count = start(max_num_seqs=8), [0]
    step = engine.decoder.step

    def fail(*arguments: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] == failing:
            raise error
        return step(*arguments)

    monkeypatch.setattr(engine.decoder, "step", fail)
    client = Client(engine)
    tokens: dict[int, list[int]] = {}
    items = prompts(6, seed=33)
    for number, prompt in enumerate(items):
        listen = tokens.setdefault(number, []).append
        client.submit(
            prompt, SamplingParams(12), on_token=lambda _, token_id, *__, listen=listen: bool(listen(token_id))
        )
    for number, (prompt, outcome) in enumerate(zip(items, client.outcomes(), strict=True)):
        assert only(outcome).token_ids == solo_ids(model, prompt, 12) == tokens[number]
    assert count[0] > failing


class Steps(Observer):
    """Notes the sequences of each step."""

    def __init__(self) -> None:
        self.num_sequences: list[int] = []

    def on_step(self, num_sequences: int) -> None:
        self.num_sequences.append(num_sequences)


def test_step_ahead_of_finished_sequences_is_not_counted(start: StartEngine) -> None:
    observer = Steps()
    engine = start(observer=observer)
    client = Client(engine)
    tokens: list[int] = []

    def listen(_: int, token_id: int, *__: object) -> bool:
        tokens.append(token_id)
        return len(tokens) == 4

    client.ask(PROMPT, SamplingParams(20), on_token=listen)
    client.ask(PROMPT, SamplingParams(1))
    assert observer.num_sequences == [1, 1, 1]  # the first token is the prefill's


def test_failed_step_ahead_keeps_nothing_of_its_sequence(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, count = start(), [0]
    step = engine.decoder.step

    def fail(*arguments: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] > 4:
            raise RuntimeError("boom")
        return step(*arguments)

    monkeypatch.setattr(engine.decoder, "step", fail)
    outcome = Client(engine).ask(PROMPT, SamplingParams(20))
    assert error_code(outcome) == "generation_failed"
    engine.close()
    assert engine.scheduler._inflight is None


@pytest.mark.parametrize("is_running", [False, True])
def test_nan_of_a_sequence_enters_no_shared_prefix(is_running: bool) -> None:
    model, source = build("LlamaConfig", BASE), random.Random(1)
    beginning = [source.randrange(3, 290) for _ in range(30)]
    prompts = [[*beginning, number, 60, 70] for number in (50, 51, 52)]
    expected = [solo_ids(model, prompt, 6) for prompt in prompts]
    with torch.no_grad():
        model.get_input_embeddings().weight[299] = torch.nan
    engine = ContinuousBatchingEngine(model, max_num_seqs=4)
    client = Client(engine)
    try:
        client.submit([*beginning, 299, 7, 8], SamplingParams(60 if is_running else 3))
        if not is_running:
            client.outcomes()
        assert [token_ids(client.ask(prompt, SamplingParams(6))) for prompt in prompts] == [[ids] for ids in expected]
    finally:
        engine.close()
