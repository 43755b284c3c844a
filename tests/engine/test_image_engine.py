# SPDX-License-Identifier: Apache-2.0
"""Prompts with images in an engine give what `model.generate` gives for each alone, whatever goes on beside them."""

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from hf_triton.engine.choose import build_engine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import Observer
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.image_inputs import ImageSample
from hf_triton.runner.images import as_tensors
from hf_triton.sampling.params import SamplingParams
from tests.support.engine import Client, error_code, only, token_ids
from tests.support.image_models import build_seeing, make_sample
from tests.support.marks import full
from tests.support.reference import solo_ids
from tests.support.waiting import wait_until

CONFIG = EngineConfig(block_size=8, chunk_sizes=ChunkSizes(20, 12))
NAMES = ("llava", "qwen2.5-vl", "gemma3", "qwen3.5")
"""Plain, positions of three axes, image tokens that attend to each other, states."""
MOST = 30
"""New tokens."""


class Eyes(Observer):
    """Counts what an engine tells of its images."""

    expects = False

    def __init__(self) -> None:
        self.num_towers = 0
        self.num_preempted = 0
        self.num_cached = 0

    def expect_images(self) -> None:
        self.expects = True

    def on_tower(self, seconds: float) -> None:
        assert seconds >= 0
        self.num_towers += 1

    def on_preempt(self, num_sequences: int) -> None:
        self.num_preempted += num_sequences

    def on_prefix_hit(self, num_tokens: int) -> None:
        self.num_cached += num_tokens


class Seeing:
    """A tiny model that sees, prompts for it, and what `generate` gives for each."""

    def __init__(self, name: str) -> None:
        self.name, self.model = name, build_seeing(name)
        self.sample = make_sample(name, self.model, (0, 1))

    def prompt(self, *seeds: int, text: int = 6) -> ImageSample:
        return make_sample(self.name, self.model, seeds, text)

    def expected(self, sample: ImageSample, max_new_tokens: int, **arguments: Any) -> list[int]:
        images = as_tensors(self.model, sample.images.arguments)
        return solo_ids(self.model, sample.prompt_ids, max_new_tokens, **images, **arguments)

    def start(self, engine: str = "continuous", **options: Any) -> Any:
        options = {"config": CONFIG, "max_num_seqs": 6, "image_sample": self.sample} | options
        return build_engine(self.model, engine, EngineOptions(**options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def seeing_of() -> Callable[[str], Seeing]:
    known: dict[str, Seeing] = {}

    def build(name: str) -> Seeing:
        if name not in known:
            known[name] = Seeing(name)
        return known[name]

    return build


@pytest.fixture(scope="module")
def llava(seeing_of: Callable[[str], Seeing]) -> Seeing:
    return seeing_of("llava")


@pytest.mark.parametrize("name", [NAMES[0], *full(*NAMES[1:])])
def test_company_chunks_prefixes_and_preemption_change_nothing(name: str, seeing_of: Callable[[str], Seeing]) -> None:
    """Mixed requests in a tiny cache, some of several sequences, some cancelled."""
    seeing, source, eyes = seeing_of(name), random.Random(1), Eyes()
    texts = [[source.randrange(3, 280) for _ in range(count)] for count in (4, 45)]
    prompts = [seeing.prompt(*seeds, text=text) for seeds, text in (((0,), 6), ((1, 2), 5), ((0, 2), 6), ((2,), 13))]
    expected = [solo_ids(seeing.model, text, MOST) for text in texts]
    expected += [seeing.expected(prompt, MOST) for prompt in prompts]
    plans = []
    with closing(seeing.start(max_cache_tokens=136, observer=eyes)) as engine:
        assert engine.images == "continuous", engine.image_obstacle
        client = Client(engine)
        for _ in range(16):
            at = source.randrange(6)
            params = SamplingParams(source.randrange(8, MOST), num_return_sequences=source.choice([1, 1, 2]))
            plans.append((at, params))
            is_cancelled = source.random() < 0.1
            ids, images = (texts[at], None) if at < 2 else (prompts[at - 2].prompt_ids, prompts[at - 2].images)
            client.submit(ids, params, lambda answer=is_cancelled: answer, images=images)
        outcomes = client.outcomes()
    for (at, params), outcome in zip(plans, outcomes, strict=True):
        if isinstance(outcome, list):
            assert token_ids(outcome) == [expected[at][: params.max_new_tokens]] * params.num_return_sequences
        else:
            assert error_code(outcome) == "cancelled"
    assert eyes.expects
    assert eyes.num_towers
    assert eyes.num_cached
    assert eyes.num_preempted


class Tower:
    """Counts the calls of a model's vision tower while it is entered, and fails some."""

    def __init__(self, model: Any, is_hit: Callable[[], bool] = lambda: False) -> None:
        self._owner, self._tower = model.base_model, model.base_model.get_image_features
        self._is_hit, self.num_calls = is_hit, 0
        self.__signature__ = inspect.signature(self._tower)  # `generate` gives it what it takes

    def __call__(self, **arguments: Any) -> Any:
        self.num_calls += 1
        if self._is_hit():
            raise RuntimeError("boom")
        return self._tower(**arguments)

    def __enter__(self) -> "Tower":
        self._owner.get_image_features = self
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.get_image_features = self._tower


def test_the_same_image_again_computes_neither_tower_nor_prefill(llava: Seeing) -> None:
    prompts = [llava.prompt(seed, text=12) for seed in (5, 5, 6)]
    expected = [llava.expected(prompt, 6) for prompt in prompts]
    eyes = Eyes()
    with closing(llava.start(observer=eyes)) as engine, Tower(llava.model) as tower:
        client = Client(engine)
        calls, cached = [], []
        for prompt, ids in zip(prompts, expected, strict=True):
            completion = only(client.ask(prompt.prompt_ids, SamplingParams(6), images=prompt.images))
            assert completion.token_ids == ids
            calls.append(tower.num_calls)
            cached.append(completion.num_cached)
    assert calls == [1, 1, 2]
    assert eyes.num_towers == 2
    assert cached == [0, 32, 0]  # of 40 tokens; what is left has none of the image


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_tower_that_raises_refuses_its_own_request_alone(llava: Seeing, *, recomputes: bool) -> None:
    text, good, bad = [5, 6, 7, 8], llava.prompt(1), llava.prompt(2)
    expected = [solo_ids(llava.model, text, 40), llava.expected(good, 12)]
    eyes = Eyes()
    with closing(llava.start(observer=eyes)) as engine:
        engine.scheduler._traits.__dict__["recomputes"] = recomputes
        client = Client(engine)
        client.submit(text, SamplingParams(40))
        client.submit(good.prompt_ids, SamplingParams(12), images=good.images)
        client.outcomes()
        with Tower(llava.model, lambda: True):
            client.submit(text, SamplingParams(40))
            client.submit(bad.prompt_ids, SamplingParams(12), images=bad.images)
            client.submit(good.prompt_ids, SamplingParams(12), images=good.images)
            outcomes = client.outcomes()
    assert [token_ids(outcomes[at]) for at in (0, 1, 2, 4)] == [[ids] for ids in expected * 2]
    assert error_code(outcomes[3]) == "generation_failed"
    assert eyes.num_preempted == 0


def test_log_probabilities_of_a_prompt_with_images(llava: Seeing) -> None:
    sample = llava.prompt(1, 2)
    images = as_tensors(llava.model, sample.images.arguments)
    with torch.inference_mode():
        logits = llava.model(input_ids=torch.tensor([sample.prompt_ids]), **images).logits[0].log_softmax(-1)
    expected = [logits[at, token].item() for at, token in enumerate(sample.prompt_ids[1:])]
    with closing(llava.start()) as engine, closing(llava.start("batch")) as batch:
        for each in (engine, batch):
            params = SamplingParams(1, prompt_logprobs=0)
            completion = only(Client(each).ask(sample.prompt_ids, params, images=sample.images))
            assert completion.prompt_logprobs is not None
            assert [score.logprob for score in completion.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.fixture(params=["continuous", "batch"])
def by_generate(request: pytest.FixtureRequest, llava: Seeing, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Engines that run prompts with images by `generate`."""
    kind = request.param
    if kind == "continuous":  # its trial fails
        monkeypatch.setattr("hf_triton.runner.image_probe.ImageProbe.compute", raise_error)
    with closing(llava.start(kind, max_num_seqs=4)) as engine:
        assert engine.images == "generate"
        yield engine


def raise_error(*_: object) -> None:
    raise ValueError("boom")


def test_by_generate_all_sampling_parameters_hold(llava: Seeing, by_generate: Any) -> None:
    """The continuous engine's own way is the reference, and text goes on beside them."""
    params = [
        SamplingParams(8),
        SamplingParams(8, do_sample=True, temperature=1.5, seed=3, num_return_sequences=3),
        SamplingParams(8, repetition_penalty=1.4, logprobs=2),
        SamplingParams(8, logit_bias=((7, 5.0),), eos_ids=frozenset([7])),
    ]
    prompts = [llava.prompt(seed) for seed in range(4)]
    outcomes = []
    for engine in (llava.start(), by_generate):
        client = Client(engine)
        for prompt, plan in zip(prompts, params, strict=True):
            client.submit(prompt.prompt_ids, plan, images=prompt.images)
            client.submit([5, 6, 7, 8], SamplingParams(20))
        outcomes.append([token_ids(outcome) for outcome in client.outcomes()])
        if engine is not by_generate:
            engine.close()
    assert outcomes[0] == outcomes[1]


def test_by_generate_a_failure_refuses_one_and_cancellation_ends_one(llava: Seeing, by_generate: Any) -> None:
    prompts, calls = [llava.prompt(seed) for seed in range(3)], iter([False, True, False])
    expected = llava.expected(prompts[0], 5)
    heard: list[int] = []

    def hear(_: int, token_id: int, __: object) -> bool:
        heard.append(token_id)
        return False

    with Tower(llava.model, lambda: next(calls)):
        client = Client(by_generate)
        client.submit(prompts[0].prompt_ids, SamplingParams(5), images=prompts[0].images, on_token=hear)
        client.submit(prompts[1].prompt_ids, SamplingParams(5), images=prompts[1].images)
        is_cancelled = lambda: len(heard) > 7  # noqa: E731
        client.submit(prompts[2].prompt_ids, SamplingParams(400), is_cancelled, images=prompts[2].images, on_token=hear)
        outcomes = client.outcomes()
    assert token_ids(outcomes[0]) == [expected]
    assert error_code(outcomes[1]) == "generation_failed"
    assert error_code(outcomes[2]) == "cancelled"
    assert len(heard) < 20


def test_closing_ends_what_generate_runs(llava: Seeing, by_generate: Any) -> None:
    prompt, client = llava.prompt(0), Client(by_generate)
    client.submit(prompt.prompt_ids, SamplingParams(400), images=prompt.images)
    client.submit(prompt.prompt_ids, SamplingParams(400), images=prompt.images)
    by_generate.close()
    assert {error_code(outcome) for outcome in client.outcomes()} == {"shutting_down"}


def test_beams_see_images(llava: Seeing) -> None:
    prompt = llava.prompt(1, 2)
    expected = llava.expected(prompt, 6, num_beams=3)
    with closing(llava.start("batch")) as engine:
        params = SamplingParams(6, num_beams=3)
        assert token_ids(Client(engine).ask(prompt.prompt_ids, params, images=prompt.images)) == [expected]


def test_a_model_without_the_trial_refuses_images(llava: Seeing) -> None:
    prompt = llava.prompt(1)
    for kind in ("continuous", "batch"):
        with closing(llava.start(kind, image_sample=None)) as engine:
            assert error_code(Client(engine).ask(prompt.prompt_ids, SamplingParams(3), images=prompt.images)) == (
                "invalid_parameter"
            )


def test_memory_of_features_is_given_back_when_the_engine_rests(llava: Seeing) -> None:
    config = EngineConfig(block_size=8, idle_release_s=0.05)
    with closing(llava.start(config=config)) as engine:
        client = Client(engine)
        for seed in range(3):
            prompt = llava.prompt(seed)
            client.ask(prompt.prompt_ids, SamplingParams(2), images=prompt.images)
        wait_until(lambda: len(engine.runner.images) == 0)
