# SPDX-License-Identifier: Apache-2.0
"""The plain engine alone: what it answers is transformers' own solo text, and everyone is answered exactly once."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_triton.engine.batch import BatchEngine
from hf_triton.engine.interface import Completion, Outcome, Sequence
from hf_triton.engine.probe import Sharing, probe_sharing
from hf_triton.errors import CancelledError, GenerationError, HfTritonError, UnavailableError
from hf_triton.generation import SamplingPlan
from hf_triton.testing import ARCHITECTURES, build_tiny_checkpoint
from hf_triton.testing.checkpoints import VOCAB_SIZE
from tests.reference import load_reference, solo_ids

TIMEOUT_S = 60.0
FIRST_PLAIN_ID = 3  # below are special tokens
SHARED_BY = {"rwkv": "alone"}
"""What the probe finds; `padded` for all others."""


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    @cache
    def load(architecture: str) -> Any:
        folder = build_tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture)
        return load_reference(folder).model

    return load


@pytest.fixture
def llama(model_of: Callable[[str], Any]) -> Any:
    return model_of("llama")


class Spy:
    """A model that shows every call of `generate` to a function, which may raise."""

    def __init__(self, model: Any, look: Callable[[torch.Tensor], None] = lambda input_ids: None) -> None:
        self._model = model
        self._look = look
        self.widths: list[int] = []
        """Rows of each call, oldest first."""

    def generate(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        self.widths.append(len(input_ids))
        self._look(input_ids)
        return self._model.generate(input_ids=input_ids, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass
class Asked:
    """One sequence given to an engine, and what came back: a list, so that a second answer would be seen."""

    prompt_ids: list[int]
    plan: SamplingPlan
    outcomes: list[Outcome] = field(default_factory=list)
    is_done: threading.Event = field(default_factory=threading.Event)

    def finish(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.is_done.set()

    def sequence(self, is_cancelled: Callable[[], bool] = lambda: False) -> Sequence:
        return Sequence(self.prompt_ids, self.plan, self.finish, is_cancelled)

    @property
    def outcome(self) -> Outcome:
        assert self.is_done.wait(TIMEOUT_S), "no answer"
        assert len(self.outcomes) == 1, "more than one answer"
        return self.outcomes[0]

    @property
    def token_ids(self) -> list[list[int]]:
        outcome = self.outcome
        assert not isinstance(outcome, HfTritonError), outcome
        return [completion.token_ids for completion in outcome]


class Bench:
    """An engine that is held still until its queue is filled, so that what can share a batch does."""

    def __init__(self, model: Any, sharing: Sharing = "padded", **arguments: Any) -> None:
        self.engine = BatchEngine(model, **({"max_rows": 32, "context_length": 4096, "sharing": sharing} | arguments))

    def run(self, asked: list[Asked]) -> None:
        with self.engine._wake:  # the engine's thread takes nothing before all are queued
            for each in asked:
                self.engine.submit(each.sequence())
        for each in asked:
            assert each.is_done.wait(TIMEOUT_S), "no answer"

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def draw_prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    source = random.Random(seed)
    return [
        [source.randrange(FIRST_PLAIN_ID, VOCAB_SIZE) for _ in range(source.randint(1, longest))] for _ in range(count)
    ]


def mixed(count: int, seed: int = 0) -> list[Asked]:
    """Prompts and lengths of all kinds, some with a repetition penalty."""
    source = random.Random(seed)
    return [
        Asked(ids, SamplingPlan(source.randint(1, 16), repetition_penalty=(1.0, 0.2, 1.3, 1.0)[place % 4]))
        for place, ids in enumerate(draw_prompts(count, seed))
    ]


def expected(model: Any, asked: Asked) -> list[int]:
    plan = asked.plan
    return solo_ids(model, asked.prompt_ids, plan.max_new_tokens, repetition_penalty=plan.repetition_penalty)


# --- the same text as alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_transformers_own_whatever_the_company(
    architecture: str, model_of: Callable[[str], Any]
) -> None:
    model = model_of(architecture)
    asked = mixed(12)
    wanted = [expected(model, each) for each in asked]
    sharing = probe_sharing(model)
    assert sharing == SHARED_BY.get(architecture, "padded")
    spy = Spy(model)
    with Bench(spy, sharing) as bench:
        bench.run(asked)
    assert [each.token_ids for each in asked] == [[ids] for ids in wanted]
    assert (max(spy.widths) > 1) == (sharing != "alone")


@pytest.mark.parametrize("sharing", ["padded", "equal_length", "alone"])
def test_every_kind_of_sharing_gives_the_same_text(sharing: Sharing, llama: Any) -> None:
    prompts = [*draw_prompts(6, longest=3), *([[7, 8, 9]] * 2)]
    asked = [Asked(ids, SamplingPlan(8)) for ids in prompts]
    spy = Spy(llama)
    with Bench(spy, sharing) as bench:
        bench.run(asked)
    assert [each.token_ids for each in asked] == [[solo_ids(llama, ids, 8)] for ids in prompts]
    assert {"padded": len(spy.widths) == 1, "equal_length": 1 < len(spy.widths) < 8, "alone": len(spy.widths) == 8}[
        sharing
    ]


@pytest.mark.parametrize("penalty", [0.1, 1.5])
def test_a_repetition_penalty_does_not_see_the_padding(penalty: float, llama: Any) -> None:
    """Below 1 it draws in what a row holds already: in short prompts beside a long one that would be the padding."""
    plan = SamplingPlan(6, repetition_penalty=penalty)
    asked = [Asked(ids, plan) for ids in [*draw_prompts(1), *([token] for token in range(10, 40))]]
    wanted = [[expected(llama, each)] for each in asked]
    with Bench(llama) as bench:
        bench.run(asked)
    assert [each.token_ids for each in asked] == wanted


def test_max_rows_bounds_every_batch(llama: Any) -> None:
    asked = [Asked(ids, SamplingPlan(4)) for ids in draw_prompts(11)]
    spy = Spy(llama)
    with Bench(spy, max_rows=4) as bench:
        bench.run(asked)
    assert spy.widths == [4, 4, 3]


CHECKPOINT_DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no_repeat_ngram_size": ("llama", {"no_repeat_ngram_size": 2}),
    "min_length": ("llama", {"min_length": 30}),
    "min_new_tokens": ("llama", {"min_new_tokens": 8}),
    "bad_words_ids": ("llama", {"bad_words_ids": [[0, 7, 338], [9]]}),
    "sequence_bias": ("llama", {"sequence_bias": [[[0, 7, 50], 100.0]]}),
    "suppress_tokens": ("llama", {"suppress_tokens": list(range(3, 200))}),
    "begin_suppress_tokens": ("llama", {"begin_suppress_tokens": list(range(3, 200))}),
    "exponential_decay_length_penalty": ("llama", {"exponential_decay_length_penalty": (3, 1.8)}),
    "forced_eos_token_id": ("llama", {"forced_eos_token_id": 1}),
    "forced_bos_token_id": ("bart", {"forced_bos_token_id": 9}),
    "encoder_no_repeat_ngram_size": ("bart", {"encoder_no_repeat_ngram_size": 1}),
    "encoder_repetition_penalty": ("bart", {"encoder_repetition_penalty": 3.0}),
    "several eos ids": ("llama", {"eos_token_id": [1, *range(100, 140)]}),
    "no eos id": ("llama", {"eos_token_id": None}),
    "beams": ("llama", {"num_beams": 3}),
    "max_length": ("llama", {"max_length": 5}),
    "return_dict_in_generate": ("llama", {"return_dict_in_generate": True, "output_scores": True}),
    "sampling": ("llama", {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
}


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")  # transformers' own, of one short row
@pytest.mark.parametrize("name", CHECKPOINT_DEFAULTS)
def test_what_the_checkpoint_asks_of_generate_holds_for_each_row_alone(
    name: str, model_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, defaults = CHECKPOINT_DEFAULTS[name]
    model = model_of(architecture)
    for key, value in defaults.items():
        monkeypatch.setattr(model.generation_config, key, value)
    asked = [Asked(each.prompt_ids, SamplingPlan(each.plan.max_new_tokens)) for each in mixed(10)]
    asked.append(Asked([7], SamplingPlan(8)))
    wanted = [expected(model, each) for each in asked]
    with Bench(model) as bench:
        bench.run(asked)
    assert [each.token_ids for each in asked] == [[ids] for ids in wanted]


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["falcon", "llama", "mamba", "rwkv", "t5"])
def test_a_seed_decides_the_text_whatever_the_company(architecture: str, model_of: Callable[[str], Any]) -> None:
    model = model_of(architecture)
    prompts = draw_prompts(4)
    plans = [
        SamplingPlan(8, do_sample=True, temperature=1.5, top_p=0.9, top_k=50, seed=place)
        for place in range(len(prompts))
    ]
    wanted = []
    for ids, plan in zip(prompts, plans, strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed or 0)
            wanted.append(solo_ids(model, ids, 8, do_sample=True, temperature=1.5, top_p=0.9, top_k=50))
    unseeded = SamplingPlan(8, do_sample=True, temperature=1.5, top_p=0.9, top_k=50)
    asked = [Asked(ids, plan) for ids, plan in zip(prompts, plans, strict=True)]
    company = [Asked(ids, unseeded) for ids in prompts] + mixed(4)
    before = torch.random.get_rng_state()
    with Bench(model, probe_sharing(model)) as bench:
        bench.run([each for pair in zip(asked, company, strict=False) for each in pair])
    assert [each.token_ids for each in asked] == [[ids] for ids in wanted]
    assert not torch.equal(before, torch.random.get_rng_state()), "unseeded rows draw from the process's own stream"


SHARP: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1e-6},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
}


@pytest.mark.parametrize("name", SHARP)
def test_rows_sample_with_their_own_settings(name: str, llama: Any) -> None:
    """A row that is greedy in all but name, among rows that take any of 384 tokens: each keeps to its own."""
    sharp = SamplingPlan(12, do_sample=True, **({"temperature": 100.0} | SHARP[name]))
    hot = SamplingPlan(12, do_sample=True, temperature=100.0)
    prompts = draw_prompts(8)
    asked = [Asked(ids, plan) for ids in prompts for plan in (hot, sharp)]
    with Bench(llama) as bench:
        bench.run(asked)
    wanted = [[solo_ids(llama, ids, 12)] for ids in prompts]
    assert [each.token_ids for each in asked if each.plan is sharp] == wanted
    assert all(each.token_ids != own for each, own in zip(asked[::2], wanted, strict=True))


def test_seeded_work_leaves_the_global_random_state(llama: Any) -> None:
    before = torch.random.get_rng_state()
    with Bench(llama) as bench:
        bench.run([Asked([5, 6], SamplingPlan(4, do_sample=True, seed=3))])
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("sharing", ["padded", "alone"])
def test_sequences_of_one_prompt_differ_and_repeat_with_their_seed(sharing: Sharing, llama: Any) -> None:
    plan = SamplingPlan(8, do_sample=True, temperature=2.0, seed=5, num_return_sequences=4)
    first, second = Asked([9, 10, 11], plan), Asked([9, 10, 11], plan)
    with Bench(llama, sharing, max_rows=3) as bench:  # more sequences than rows: one prompt is never refused for it
        bench.run([first, second])
    assert first.token_ids == second.token_ids
    assert len({tuple(ids) for ids in first.token_ids}) == 4


# --- one row's trouble -----------------------------------------------------------------------------------------------


def test_cancelled_rows_are_given_up_and_nobody_else_notices(llama: Any) -> None:
    others = mixed(6)
    wanted = [expected(llama, each) for each in others]
    given_up = Asked([5, 6, 7], SamplingPlan(200))
    with Bench(llama) as bench:
        with bench.engine._wake:
            bench.engine.submit(given_up.sequence(lambda: True))
            for each in others:
                bench.engine.submit(each.sequence())
        assert isinstance(given_up.outcome, CancelledError)
        assert [each.token_ids for each in others] == [[ids] for ids in wanted]


def test_a_cancel_is_seen_while_the_row_runs(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.generation_config, "eos_token_id", None)
    cancelled = threading.Event()
    asked = Asked([5, 6, 7], SamplingPlan(100_000))
    with Bench(llama) as bench:
        bench.engine.submit(asked.sequence(cancelled.is_set))
        assert not asked.is_done.wait(0.3)
        cancelled.set()
        assert isinstance(asked.outcome, CancelledError)


@pytest.mark.parametrize("most_rows", [1, 3, 5])
def test_out_of_memory_splits_the_batch_and_changes_no_text(most_rows: int, llama: Any) -> None:
    def look(input_ids: torch.Tensor) -> None:
        if len(input_ids) > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    asked = mixed(12)
    wanted = [expected(llama, each) for each in asked]
    with Bench(Spy(llama, look)) as bench:
        bench.run(asked)
        assert bench.engine.is_healthy()
    assert [each.token_ids for each in asked] == [[ids] for ids in wanted]


OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 18014398509481984 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    "python": MemoryError(),
    "cuda outside the allocator": torch.AcceleratorError("CUDA error: out of memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_a_row_too_large_by_itself_is_refused_as_out_of_memory(kind: str, llama: Any) -> None:
    def look(input_ids: torch.Tensor) -> None:
        if input_ids.shape[1] > 40:
            raise OUT_OF_MEMORY[kind]

    large, small = Asked([5] * 41, SamplingPlan(4)), Asked([5, 6], SamplingPlan(4))
    with Bench(Spy(llama, look)) as bench:
        bench.run([large, small])
    assert isinstance(large.outcome, UnavailableError)
    assert large.outcome.code == "out_of_memory"
    assert small.token_ids == [solo_ids(llama, [5, 6], 4)]


def test_a_real_allocation_that_cannot_be_had_is_out_of_memory(llama: Any) -> None:
    def look(input_ids: torch.Tensor) -> None:
        torch.empty(1 << 52)

    asked = Asked([5, 6], SamplingPlan(4))
    with Bench(Spy(llama, look)) as bench:
        bench.run([asked])
    assert isinstance(asked.outcome, UnavailableError)


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_row_that_makes_the_model_raise_is_refused_alone(place: int, llama: Any) -> None:
    poison = 2

    def look(input_ids: torch.Tensor) -> None:
        if (input_ids[:, -1] == poison).any():
            raise ValueError("secret prompt text")

    asked = mixed(12)
    asked[place] = Asked([5, poison], asked[place].plan)
    wanted = [expected(llama, each) for each in asked]
    with Bench(Spy(llama, look)) as bench:
        bench.run(asked)
        assert bench.engine.is_healthy()
    refused = asked[place].outcome
    assert isinstance(refused, GenerationError)
    assert "secret" not in str(refused)
    others = [at for at in range(12) if at != place]
    assert [asked[at].token_ids for at in others] == [[wanted[at]] for at in others]


def test_a_cancel_check_that_raises_refuses_its_own_row_only(llama: Any) -> None:
    def fail() -> bool:
        raise OSError("the pipe is gone")

    others, broken = mixed(4), Asked([5, 6], SamplingPlan(4))
    wanted = [expected(llama, each) for each in others]
    with Bench(llama) as bench:
        with bench.engine._wake:
            bench.engine.submit(broken.sequence(fail))
            for each in others:
                bench.engine.submit(each.sequence())
        assert isinstance(broken.outcome, GenerationError)
        assert [each.token_ids for each in others] == [[ids] for ids in wanted]


def test_a_listener_that_raises_does_not_end_the_loop(llama: Any) -> None:
    def listen(outcome: Outcome) -> None:
        raise RuntimeError("the sender is gone")

    asked = mixed(3)
    with Bench(llama) as bench:
        with bench.engine._wake:
            for each in asked:
                bench.engine.submit(Sequence(each.prompt_ids, each.plan, listen))
        bench.run(later := mixed(3))
        assert bench.engine.is_healthy()
    assert all(isinstance(each.outcome, list) for each in later)


# --- the end ---------------------------------------------------------------------------------------------------------


FATAL = {
    "cuda error": RuntimeError("CUDA error: device-side assert triggered"),
    "accelerator": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "interpreter": SystemExit(1),
}


@pytest.mark.parametrize("kind", FATAL)
def test_a_fatal_error_answers_everyone_and_is_told_once(kind: str, llama: Any) -> None:
    def look(input_ids: torch.Tensor) -> None:
        if (input_ids[:, -1] == 2).any():
            raise FATAL[kind]

    told: list[int] = []
    before, running, waiting = mixed(4), [Asked([5, 2], SamplingPlan(4)), *mixed(3)], mixed(8)
    with Bench(Spy(llama, look), max_rows=4, on_fatal=lambda: told.append(len(done()))) as bench:

        def done() -> list[Asked]:
            return [each for each in [*before, *running, *waiting] if each.is_done.is_set()]

        bench.run(before)
        bench.run([*running, *waiting])
        assert not bench.engine.is_healthy()
        bench.run([late := Asked([5], SamplingPlan(1))])
    assert all(isinstance(each.outcome, list) for each in before)
    refused = [each.outcome for each in [*running, *waiting, late]]
    assert [each.code for each in refused if isinstance(each, UnavailableError)] == ["engine_failed"] * len(refused)
    assert told == [4 + 4 + 8], "told once, after everyone had an answer"


def test_close_answers_everyone_and_whoever_comes_later(llama: Any) -> None:
    told: list[int] = []
    asked = [Asked(ids, SamplingPlan(200)) for ids in draw_prompts(20)]
    with Bench(llama, max_rows=4, on_fatal=lambda: told.append(1)) as bench:
        for each in asked:
            bench.engine.submit(each.sequence())
        bench.engine.close()
        assert all(each.is_done.is_set() for each in asked)
        assert not bench.engine.is_healthy()
        bench.engine.submit((late := Asked([5], SamplingPlan(1))).sequence())
        bench.engine.close()
    for each in [*asked, late]:
        assert isinstance(each.outcome, UnavailableError)
        assert each.outcome.code == "shutting_down"
    assert told == []


def test_one_answer_each_when_the_engine_closes_amid_submits(llama: Any) -> None:
    """Submits from many threads while it closes: each is answered once, with its text or a refusal."""
    crowds = [[Asked(each.prompt_ids, each.plan) for each in mixed(30, seed)] for seed in range(4)]
    bench = Bench(llama)

    def submit_all(crowd: list[Asked]) -> None:
        for each in crowd:
            bench.engine.submit(each.sequence())

    threads = [threading.Thread(target=submit_all, args=(crowd,)) for crowd in crowds]
    for thread in threads:
        thread.start()
    crowds[0][0].is_done.wait(TIMEOUT_S)
    bench.engine.close()
    for thread in threads:
        thread.join()
    for each in [each for crowd in crowds for each in crowd]:
        assert isinstance(each.outcome, UnavailableError | list)


def test_a_finished_row_says_why_it_ended(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = solo_ids(llama, [5, 6, 7], 6)
    end = max(ids.index(each) for each in ids)  # the last token that is new
    monkeypatch.setattr(llama.generation_config, "eos_token_id", [ids[end]])
    stopped, cut = Asked([5, 6, 7], SamplingPlan(6)), Asked([5, 6, 7], SamplingPlan(end))
    with Bench(llama) as bench:
        bench.run([stopped, cut])
    assert stopped.outcome == [Completion(ids[:end], "stop")]
    assert cut.outcome == [Completion(ids[:end], "length")]


def test_no_row_leaves_the_context_while_the_longest_is_written(tmp_path: Path) -> None:
    spy = Spy(load_reference(build_tiny_checkpoint(tmp_path, "gpt2", n_positions=64)).model)
    with Bench(spy, context_length=64) as bench:
        asked = [Asked([5] * 60, SamplingPlan(4)), Asked([6] * 4, SamplingPlan(60)), Asked([7] * 50, SamplingPlan(4))]
        bench.run(asked)
    assert spy.widths == [2, 1]  # the two long prompts together, the long text alone; nobody twice
    assert all(isinstance(each.outcome, list) for each in asked)
