# SPDX-License-Identifier: Apache-2.0
"""Models that need whole prompts in one prefill: Mamba 1, if its scan starts again with every forward."""

import logging
import random
from typing import Any

import pytest
import torch

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.runner import state_scans
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.model_runner import ModelRunner
from hf_triton.runner.step import Step
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import BASE, CONTINUOUS, HEADS, WHOLE, build, requests
from tests.support.engine import Client, PreemptCounter, PrefixHits, check, start_engine, token_ids
from tests.support.reference import solo_ids


@pytest.fixture(autouse=True)
def _no_scan_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_scans, "cache_of_thread", lambda: None)


@pytest.fixture(params=[*WHOLE])
def model(request: pytest.FixtureRequest) -> Any:
    return build(*WHOLE[request.param])


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """The chunks of contexts, by their first and last token."""
    chunks: set[tuple[int, int]] = set()
    run = ModelRunner.run

    def noted(runner: ModelRunner, step: Step, *arguments: Any) -> torch.Tensor:
        chunks.update((part.start, part.end) for part in step.ranges if not part.is_decode)
        return run(runner, step, *arguments)

    monkeypatch.setattr(ModelRunner, "run", noted)
    return chunks


def prefills_whole(model: Any) -> bool | None:
    way = find_way(model).way
    return None if way is None else way.prefills_whole


def test_the_probe_finds_whole_prefill(model: Any) -> None:
    assert prefills_whole(model) is True
    assert prefills_whole(build(*CONTINUOUS["granite4"])) is False


def test_bidirectional_attention_needs_the_batch_engine() -> None:
    model = build("Gemma3TextConfig", BASE | HEADS | {"use_bidirectional_attention": True})
    assert find_way(model).way is None
    engine = start_engine(model, max_num_seqs=4, context_length=128)
    try:
        assert isinstance(engine, BatchEngine)
    finally:
        engine.close()


def test_a_long_prompt_is_prefilled_whole_beside_running_sequences(model: Any, prefills: set[tuple[int, int]]) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(16, 8))
    source = random.Random(1)
    items = [
        ([source.randrange(3, 300) for _ in range(length)], SamplingParams(num_new))
        for length, num_new in ((5, 60), (100, 20), (90, 5), (3, 30))
    ]
    engine = start_engine(model, max_num_seqs=4, context_length=256, config=config)
    try:
        prefills.clear()
        check(model, Client(engine), items)
    finally:
        engine.close()
    assert prefills == {(0, len(prompt)) for prompt, _ in items}


def test_prefix_caching_is_off_and_logged(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompt, shares = list(range(3, 60)), PrefixHits()
    with caplog.at_level(logging.INFO, logger="hf_triton"):
        engine = start_engine(model, max_num_seqs=4, context_length=256, observer=shares)
    assert "each prompt prefilled whole" in caplog.text
    assert "no prefix caching" in caplog.text
    try:
        client = Client(engine)
        for _ in range(3):
            assert token_ids(client.ask(prompt, SamplingParams(9))) == [solo_ids(model, prompt, 9)]
    finally:
        engine.close()
    assert not any(shares.counts)


@pytest.mark.full
def test_preempted_sequences_continue_unchanged() -> None:
    model = build(*WHOLE["jamba"])
    source, preempted = random.Random(3), PreemptCounter()
    config = EngineConfig(block_size=16)
    engine = start_engine(
        model, max_num_seqs=6, context_length=256, max_cache_tokens=300, observer=preempted, config=config
    )
    try:
        items = [(prompt[:40], SamplingParams(60)) for prompt, _ in requests(12, source)]
        check(model, Client(engine), items)
        assert isinstance(engine, ContinuousBatchingEngine)
    finally:
        engine.close()
    assert preempted.num_sequences > 0


def test_prompt_logprobs_and_sampling_share_one_prefill(model: Any) -> None:
    prompt = list(range(3, 40))
    params = SamplingParams(12, do_sample=True, seed=5, num_return_sequences=3, prompt_logprobs=1)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
    expected = [float(logits[place, token]) for place, token in enumerate(prompt[1:])]
    engine = start_engine(model, max_num_seqs=5, context_length=256)
    try:
        client = Client(engine)
        alone = client.ask(prompt, params)
        for other, other_params in requests(8, random.Random(2)):
            client.submit(other, other_params)
        beside = client.ask(prompt, params)
    finally:
        engine.close()
    assert token_ids(alone) == token_ids(beside)
    assert isinstance(alone, list)
    assert len({tuple(each.token_ids) for each in alone}) == 3
    logprobs = alone[0].prompt_logprobs
    assert logprobs is not None
    assert [each.logprob for each in logprobs] == pytest.approx(expected, abs=1e-4)
