# SPDX-License-Identifier: Apache-2.0
"""The continuous engine alone: it writes what `generate` writes, whoever joins, leaves, fails or gives up meanwhile."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_triton.engine import executor
from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.types import Completion, Outcome, SequenceGroup
from hf_triton.errors import CancelledError, CheckpointError, GenerationError, HfTritonError, UnavailableError
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.kv_cache import KVCache
from hf_triton.runner.kv_lanes import KVCacheLanes
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import ARCHITECTURES, build_tiny_checkpoint
from tests.support.architectures import BASE, CONTINUOUS, HEADS, WINDOWS, build
from tests.support.engine import NOT_CONTINUOUS, WAIT_S, Client, Faulty, prompts, slow_down, start_engine, token_ids
from tests.support.reference import load_reference, solo_ids

LLAMA4 = CONTINUOUS["llama4"][1]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    models: dict[str, Any] = {}

    def load(architecture: str) -> Any:
        if architecture not in models:
            folder: Path = tmp_path_factory.mktemp("checkpoints") / architecture
            build_tiny_checkpoint(folder, architecture, eos_token_id=None)
            models[architecture] = load_reference(folder).model
        return models[architecture]

    return load


@pytest.fixture(params=["eager", "static"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., ContinuousBatchingEngine]]:
    engines: list[ContinuousBatchingEngine] = []

    def start(model: Any, **options: Any) -> ContinuousBatchingEngine:
        engines.append(ContinuousBatchingEngine(model, **{"max_num_seqs": 7, "decoding": request.param, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def reference(model: Any, prompt: list[int], plan: SamplingParams) -> list[int]:
    """What transformers writes, greedy and alone."""
    return solo_ids(model, prompt, plan.max_new_tokens, repetition_penalty=plan.repetition_penalty)


def test_a_seed_gives_the_same_texts_alone_and_in_company(
    load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    model, source = load("llama"), random.Random(6)
    company, alone = Client(start(model)), Client(start(model))
    items = [
        (
            prompt,
            SamplingParams(
                source.randrange(1, 30),
                do_sample=True,
                temperature=source.choice([0.5, 1.0, 2.0]),
                top_p=source.choice([0.5, 0.9, 1.0]),
                top_k=source.choice([0, 5, 50]),
                seed=source.randrange(99),
                num_return_sequences=source.choice([1, 2, 3]),
            ),
        )
        for prompt in prompts(40, seed=2)
    ]
    for item in items:
        company.submit(*item)
    for item, outcome in zip(items, company.outcomes(), strict=True):
        texts = token_ids(outcome)
        assert len(texts) == item[1].num_return_sequences
        assert token_ids(alone.ask(*item)) == texts
    several = next(token_ids(outcome) for outcome in company.outcomes() if len(token_ids(outcome)) == 3)
    assert len({tuple(text) for text in several}) > 1


def test_long_prompts_are_read_in_pieces_and_running_texts_go_on(
    load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(16, 16, per_weights=16))
    model = load("llama")
    client = Client(start(model, config=config))
    items = [(prompt, SamplingParams(20)) for prompt in prompts(20, seed=3, longest=100)]
    for item in items:
        client.submit(*item)
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        assert token_ids(outcome) == [reference(model, prompt, plan)]


def test_eos_ends_a_text_and_is_not_part_of_it(
    load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    model = load("llama")
    prompt, plan = [5, 6, 7], SamplingParams(20)
    whole = reference(model, prompt, plan)
    engine = start(model)
    engine._eos_ids = frozenset([whole[4]])
    end = whole.index(whole[4])
    assert Client(engine).ask(prompt, plan) == [Completion(whole[:end], "eos")]


POISON = 377


def test_only_the_guilty_is_refused(load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]) -> None:
    model = load("llama")
    engine = start(model)
    faulty = Faulty(engine, lambda _, ids: POISON in ids, RuntimeError("boom"))
    client = Client(engine)
    clean = [[each for each in prompt if each != POISON] + [4] for prompt in prompts(12, seed=4)]
    plans = [SamplingParams(1 + index) for index in range(12)]
    for index, (prompt, plan) in enumerate(zip(clean, plans, strict=True)):
        client.submit([POISON, *prompt] if index == 6 else prompt, plan)
    outcomes = client.outcomes()
    assert faulty.num_hits > 0
    for index, (prompt, plan) in enumerate(zip(clean, plans, strict=True)):
        wanted = reference(model, prompt, plan)
        if index == 6 or POISON in wanted[:-1]:
            assert isinstance(outcomes[index], GenerationError)
        else:
            assert token_ids(outcomes[index]) == [wanted]
    assert engine.is_healthy()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_out_of_memory_changes_nobodys_text(
    limit: int, load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    model = load("falcon")
    engine = start(model)
    faulty = Faulty(engine, lambda num_rows, _: num_rows > limit, torch.OutOfMemoryError("CUDA out of memory"))
    client = Client(engine)
    items = [(prompt, SamplingParams(1 + index % 17)) for index, prompt in enumerate(prompts(20, seed=5))]
    for item in items:
        client.submit(*item)
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        assert token_ids(outcome) == [reference(model, prompt, plan)]
    assert faulty.num_hits > 0


@pytest.mark.parametrize("place", ["add", "_lay_out"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")], ids=str)
def test_a_failure_while_rows_are_laid_in_loses_nobody(
    place: str, error: Exception, load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    model = load("llama")
    engine = start(model)
    failures = [error] * 3

    class Failing(KVCache):
        """Fails now and then in the middle of its work, as an allocation does."""

    def fail(self: KVCache, *arguments: Any) -> None:
        if self.num_rows and failures:
            self.is_corrupt = place == "_lay_out"
            raise failures.pop()
        getattr(KVCache, place)(self, *arguments)

    setattr(Failing, place, fail)
    engine.memory.lanes._lanes = [Failing(engine.forward.device)]
    client = Client(engine)
    items = [(prompt, SamplingParams(5 + index)) for index, prompt in enumerate(prompts(20, seed=12))]
    for item in items:
        client.submit(*item)
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        assert token_ids(outcome) == [reference(model, prompt, plan)]
    assert len(failures) < 3


@pytest.mark.parametrize("piece", [16, 512])
@pytest.mark.parametrize("seed", range(6))
def test_faults_at_random_change_nobodys_text(
    seed: int, piece: int, load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    """Every failure of many rows together is survived by each of them; a row alone never fails here."""
    config = EngineConfig(chunk_sizes=ChunkSizes(piece, piece // 2, per_weights=16))
    model, source = load("falcon"), random.Random(seed)
    engine = start(model, config=config)
    kinds = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")]
    faulty = Faulty(engine, lambda num_rows, _: num_rows > 1 and source.random() < 0.08, kinds[seed % 2])
    client = Client(engine)
    items = [
        (
            prompt,
            SamplingParams(source.randrange(1, 25), do_sample=True, seed=index, num_return_sequences=1 + index % 3),
        )
        for index, prompt in enumerate(prompts(30, seed=13))
    ]
    for item in items:
        client.submit(*item)
        time.sleep(source.choice([0, 0.002]))
    outcomes = client.outcomes()
    assert faulty.num_hits > 0
    calm = Client(start(model, config=config))
    for item, outcome in zip(items, outcomes, strict=True):
        assert token_ids(calm.ask(*item)) == token_ids(outcome)
    assert engine.is_healthy()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("boom")], ids=str)
def test_a_failure_before_contexts_are_read_loses_nobody(
    error: Exception,
    load: Callable[[str], Any],
    start: Callable[..., ContinuousBatchingEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, source = load("llama"), random.Random(3)
    engine = start(model)
    make, num_failed = executor.Prefill, 0

    def make_or_fail(*arguments: Any, **options: Any) -> Any:
        nonlocal num_failed
        if source.random() < 0.2 and num_failed < 5:
            num_failed += 1
            raise error
        return make(*arguments, **options)

    monkeypatch.setattr(executor, "Prefill", make_or_fail)
    client = Client(engine)
    items = [(prompt, SamplingParams(4)) for prompt in prompts(12, seed=5)]
    for item in items:
        client.submit(*item)
    outcomes = client.outcomes()
    assert num_failed > 0
    assert engine.is_healthy()
    assert all(isinstance(outcome, (list, HfTritonError)) for outcome in outcomes)
    found = [outcome for outcome in outcomes if isinstance(outcome, list)]
    assert len(found) >= len(items) - num_failed


def test_a_prompt_that_never_fits_is_refused_and_the_next_one_runs(
    load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    model = load("llama")
    engine = start(model)
    Faulty(engine, lambda _, ids: len(ids) > 50, torch.OutOfMemoryError("CUDA out of memory"))
    client = Client(engine)
    refused = client.ask(list(range(3, 70)), SamplingParams(4))
    assert isinstance(refused, UnavailableError)
    assert refused.code == "out_of_memory"
    assert token_ids(client.ask([5, 6], SamplingParams(4))) == [reference(model, [5, 6], SamplingParams(4))]


def test_a_fatal_error_answers_everyone(load: Callable[[str], Any]) -> None:
    ended = threading.Event()
    engine = ContinuousBatchingEngine(load("llama"), max_num_seqs=3, on_fatal=ended.set)
    Faulty(engine, lambda num_rows, _: num_rows == 3, RuntimeError("CUDA error: device-side assert triggered"))
    client = Client(engine)
    for prompt in prompts(9, seed=6):
        client.submit(prompt, SamplingParams(30))
    assert {getattr(outcome, "code", outcome) for outcome in client.outcomes()} == {"engine_failed"}
    assert ended.wait(WAIT_S)
    assert not engine.is_healthy()
    late = client.ask([5], SamplingParams(1))
    assert isinstance(late, UnavailableError)


def test_cancelled_texts_leave_and_the_others_go_on(
    load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    model = load("llama")
    engine = start(model, max_num_seqs=4)
    slow_down(engine)
    client = Client(engine)
    given_up = threading.Event()
    for prompt in prompts(6, seed=7):
        client.submit(prompt, SamplingParams(190), given_up.is_set)
    kept = [(prompt, SamplingParams(150)) for prompt in prompts(3, seed=8)]
    for item in kept:
        client.submit(*item)
    time.sleep(0.15)
    given_up.set()
    outcomes = client.outcomes()
    assert any(isinstance(outcome, CancelledError) for outcome in outcomes[:6])
    for (prompt, plan), outcome in zip(kept, outcomes[6:], strict=True):
        assert token_ids(outcome) == [reference(model, prompt, plan)]


def test_a_cancel_check_that_raises_refuses_its_own_text_only(
    load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    def is_cancelled() -> bool:
        raise RuntimeError("no answer from Triton")

    model = load("llama")
    engine = start(model)
    slow_down(engine)
    client = Client(engine)
    client.submit([5, 6], SamplingParams(190), is_cancelled)
    client.submit([5, 6], SamplingParams(150))
    refused, kept = client.outcomes()
    assert isinstance(refused, HfTritonError)
    assert refused.code == "internal"
    assert token_ids(kept) == [reference(model, [5, 6], SamplingParams(150))]


def test_closing_answers_everyone(load: Callable[[str], Any]) -> None:
    engine = ContinuousBatchingEngine(load("llama"), max_num_seqs=2)
    slow_down(engine)
    client = Client(engine)
    for prompt in prompts(8, seed=9):
        client.submit(prompt, SamplingParams(190))
    engine.close()
    codes = {getattr(outcome, "code", "done") for outcome in client.outcomes()}
    assert "shutting_down" in codes
    assert codes <= {"shutting_down", "done"}


def test_an_idle_engine_holds_no_rows(
    load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    config = EngineConfig(idle_release_s=0.01)
    engine = start(load("llama"), config=config)
    Client(engine).ask([5, 6, 7], SamplingParams(30))
    deadline = time.monotonic() + WAIT_S
    while engine.memory.lanes.num_tokens:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_is_chosen_by_trying(architecture: str, load: Callable[[str], Any]) -> None:
    engine = start_engine(load(architecture), max_num_seqs=4, context_length=256)
    engine.close()
    assert isinstance(engine, ContinuousBatchingEngine) is (architecture not in NOT_CONTINUOUS)


def test_a_model_whose_positions_depend_on_its_company_runs_alone(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    build_tiny_checkpoint(tmp_path, "llama", eos_token_id=None, rope_parameters=rope, max_position_embeddings=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    engine = start_engine(model, max_num_seqs=8, context_length=128)
    client = Client(engine)
    items = [(prompt, SamplingParams(30)) for prompt in prompts(6, seed=11, longest=50)]
    for item in items:
        client.submit(*item)
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        assert token_ids(outcome) == [reference(model, prompt, plan)]
    engine.close()


@pytest.mark.parametrize("settings", [{"stop_strings": ["."]}, {"penalty_alpha": 0.6, "top_k": 4}], ids=str)
def test_a_model_that_cannot_generate_is_refused_at_load(tmp_path: Path, settings: dict[str, object]) -> None:
    build_tiny_checkpoint(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    model.generation_config.update(**settings)
    with pytest.raises(CheckpointError, match=r"unsupported_model: transformers cannot generate with this model \("):
        start_engine(model, max_num_seqs=4, context_length=128)


def test_a_panic_in_a_listener_ends_nobody_elses_text(
    load: Callable[[str], Any], start: Callable[..., ContinuousBatchingEngine]
) -> None:
    class PanicException(BaseException):
        """As the tokenizer's Rust code raises."""

    def panic(_: Outcome) -> None:
        raise PanicException

    engine = start(load("llama"))
    engine.submit([SequenceGroup([5, 6], SamplingParams(3), panic)])
    assert token_ids(Client(engine).ask([5, 6], SamplingParams(3)))
    assert engine.is_healthy()


@pytest.mark.parametrize(
    "settings",
    [{"forced_eos_token_id": 0}, {"forced_eos_token_id": 1}, {"max_time": 1.0}, {"remove_invalid_values": True}],
    ids=str,
)
def test_what_only_generate_does_is_done_by_generate(settings: dict[str, object], tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama", eos_token_id=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    model.generation_config.update(**settings)
    engine = start_engine(model, max_num_seqs=4, context_length=128)
    engine.close()
    assert not isinstance(engine, ContinuousBatchingEngine)


INKLING = (
    BASE
    | HEADS
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_hidden_layers": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 16,
        "rel_extent": 32,
        "d_rel": 4,
        "log_scaling_n_floor": 32,
    }
)
MOSHI = BASE | HEADS | {"ffn_dim": 64, "audio_vocab_size": 300}


@pytest.mark.parametrize(
    ("name", "context_length", "is_continuous"),
    [
        (("Gemma3TextConfig", BASE | HEADS | WINDOWS | {"use_bidirectional_attention": True}), 256, False),
        (("Llama4TextConfig", LLAMA4 | {"floor_scale": 32}), 256, False),
        (("Llama4TextConfig", LLAMA4 | {"floor_scale": 32}), 31, True),
        (("InklingTextConfig", INKLING), 33, False),
        (("InklingTextConfig", INKLING), 32, True),
        (("MoshiConfig", MOSHI | {"sliding_window": 32}), 33, False),
        (("MoshiConfig", MOSHI | {"sliding_window": 32}), 32, True),
    ],
    ids=[
        *("bidirectional", "llama4 beyond its floor_scale", "llama4 below it"),
        *("inkling beyond its floor", "inkling below it"),
        *("moshi beyond its window", "moshi within it"),
    ],
)
def test_rows_that_would_feel_each_other_are_not_rolled(name: Any, context_length: int, is_continuous: bool) -> None:
    engine = start_engine(build(*name), max_num_seqs=4, context_length=context_length)
    engine.close()
    assert isinstance(engine, ContinuousBatchingEngine) is is_continuous


def test_whoever_is_put_back_when_the_device_is_lost_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, add, num_added = ContinuousBatchingEngine(build("LlamaConfig", BASE), max_num_seqs=4), KVCacheLanes.add, [0]

    def fail_at_the_second(self: KVCacheLanes, *arguments: Any) -> int:
        num_added[0] += 1
        if num_added[0] == 2:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
        return add(self, *arguments)

    def fail(self: KVCacheLanes, row: int) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(KVCacheLanes, "add", fail_at_the_second)
    monkeypatch.setattr(KVCacheLanes, "remove", fail)
    outcomes: dict[str, Any] = {}
    plan = SamplingParams(30)
    try:
        engine.submit([SequenceGroup([5] * 6, plan, partial(outcomes.__setitem__, name)) for name in "ab"])
        deadline_s = time.monotonic() + 20
        while len(outcomes) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    finally:
        engine.close()
    assert [outcome.code for outcome in outcomes.values()] == ["engine_failed"] * 2
