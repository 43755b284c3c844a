# SPDX-License-Identifier: Apache-2.0
"""Steps of the continuous engine: what they compute, and those that run ahead of the host."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import Observer
from hf_triton.runner.device import ChunkSizes, DeviceContext
from hf_triton.runner.step import Step
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import BASE, build
from tests.support.engine import PROMPT, Client, StartEngine, error_code, only, prompts, token_ids
from tests.support.reference import solo_ids


class Steps:
    """The engine's runner, which notes each step and asks `before` first."""

    def __init__(self, engine: ContinuousBatchingEngine, before: Callable[[Step], None] = lambda _: None) -> None:
        self._run, self._before = engine.runner.run, before
        self.seen: list[Step] = []
        engine.runner.run = self  # type: ignore[assignment]

    def __call__(self, step: Step, *arguments: Any) -> torch.Tensor:
        self.seen.append(step)
        self._before(step)
        return self._run(step, *arguments)

    @property
    def sizes(self) -> list[list[int]]:
        return [[part.num_tokens for part in step.ranges] for step in self.seen]


def test_a_step_has_chunks_of_prompts_beside_decoding_sequences(model: Any, start: StartEngine) -> None:
    engine = start(config=EngineConfig(chunk_sizes=ChunkSizes(64, 32)))
    items = [prompt * 100 for prompt in prompts(3, seed=5, longest=2)]
    lengths = (20, 100, 30)
    client = Client(engine)
    with engine.queue.changed:  # it admits none meanwhile
        steps = Steps(engine)
        for prompt, length in zip(items, lengths, strict=True):
            client.submit(prompt[:length], SamplingParams(5))
    for prompt, length, outcome in zip(items, lengths, client.outcomes(), strict=True):
        assert only(outcome).token_ids == solo_ids(model, prompt[:length], 5)
    assert steps.sizes == [[20, 44], [1, 30], [1, 1, 30], [1, 1, 26], [1, 1, 1], [1, 1], [1], [1]]


def test_chunks_beside_decoding_shrink_with_the_context_on_a_cpu() -> None:
    cpu, cuda, other = (DeviceContext(torch.device(name)).chunk_sizes for name in ("cpu", "cuda:1", "xpu"))
    shares = [cpu.share(is_decoding=True, num_cached=num_cached) for num_cached in (0, 2047, 2048, 8192)]
    assert [cpu.budget(6) * share for share in shares] == [250, 250, 125, 50]
    assert cpu.budget(0) * cpu.share(is_decoding=False, num_cached=8192) == 512
    assert cpu.budget(1000) == 64
    assert cuda.budget(12) * cuda.share(is_decoding=True, num_cached=8192) == 500
    assert cuda.budget(0) == 1024
    assert other == cuda


def test_a_cuda_device_runs_more_sequences() -> None:
    contexts = [DeviceContext(None), *(DeviceContext(torch.device(name)) for name in ("cpu", "cuda:1", "xpu"))]
    assert [context.max_num_seqs for context in contexts] == [32, 32, 256, 32]


def run_ahead(engine: ContinuousBatchingEngine) -> ContinuousBatchingEngine:
    engine.scheduler._traits = replace(engine.scheduler._traits, runs_ahead=True)
    return engine


class Events:
    """The order in which steps begin and tokens go out."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self.seen = list[str]()
        Steps(engine, lambda _: self.seen.append("step"))

    def token(self, *_: object) -> bool:
        self.seen.append("token")
        return False

    def ask(self, client: Client, **settings: Any) -> list[str]:
        only(client.ask(PROMPT, SamplingParams(5, **settings), on_token=self.token))
        return self.seen


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "seed": 3}], ids=str)
def test_a_step_begins_before_the_tokens_of_the_last_one_are_read(settings: dict[str, Any], start: StartEngine) -> None:
    engine = run_ahead(start())
    assert Events(engine).ask(Client(engine), **settings) == ["step", *["step", "token"] * 4, "token"]


def fail_at(engine: ContinuousBatchingEngine, is_hit: Callable[[int], bool], error: Exception) -> Steps:
    """Let the steps fail whose numbers are hit."""

    def fail(_: Step) -> None:
        if is_hit(len(steps.seen)):
            raise error

    steps = Steps(engine, fail)
    return steps


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")], ids=repr)
@pytest.mark.parametrize("failing", [2, 3, 9])
def test_failed_step_ahead_changes_no_output(error: Exception, failing: int, model: Any, start: StartEngine) -> None:
    engine = run_ahead(start(max_num_seqs=8))
    steps = fail_at(engine, lambda number: number == failing, error)
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
    assert len(steps.seen) > failing


class StepSizes(Observer):
    def __init__(self) -> None:
        self.num_sequences: list[int] = []

    def on_step(self, num_sequences: int) -> None:
        self.num_sequences.append(num_sequences)


def test_step_ahead_of_finished_sequences_is_not_counted(start: StartEngine) -> None:
    observer = StepSizes()
    client = Client(run_ahead(start(observer=observer)))
    tokens: list[int] = []

    def listen(_: int, token_id: int, *__: object) -> bool:
        tokens.append(token_id)
        return len(tokens) == 4

    client.ask(PROMPT, SamplingParams(20), on_token=listen)
    client.ask(PROMPT, SamplingParams(1))
    assert observer.num_sequences == [1] * 5


def test_failed_step_ahead_keeps_nothing_of_its_sequence(start: StartEngine) -> None:
    engine = run_ahead(start())
    fail_at(engine, lambda number: number > 4, RuntimeError("boom"))
    outcome = Client(engine).ask(PROMPT, SamplingParams(20))
    assert error_code(outcome) == "generation_failed"
    engine.close()
    assert engine.executor._inflight is None


@pytest.mark.parametrize("is_running", [False, True])
def test_nan_of_a_sequence_enters_no_shared_prefix(is_running: bool) -> None:
    model, source = build("LlamaConfig", BASE), random.Random(1)
    beginning = [source.randrange(3, 290) for _ in range(30)]
    prompts = [[*beginning, number, 60, 70] for number in (50, 51, 52)]
    expected = [solo_ids(model, prompt, 6) for prompt in prompts]
    with torch.no_grad():
        model.get_input_embeddings().weight[299] = torch.nan
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=4, config=EngineConfig(block_size=8)))
    client = Client(engine)
    try:
        client.submit([*beginning, 299, 7, 8], SamplingParams(60 if is_running else 3))
        if not is_running:
            client.outcomes()
        assert [token_ids(client.ask(prompt, SamplingParams(6))) for prompt in prompts] == [[ids] for ids in expected]
    finally:
        engine.close()
