# SPDX-License-Identifier: Apache-2.0
"""The plain engine alone: what it answers is transformers' own solo text, and everyone is answered exactly once."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WatermarkingConfig

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.choose import UNSUPPORTED_SETTINGS, build_engine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.types import Completion, Outcome, SequenceGroup
from hf_triton.errors import (
    CancelledError,
    CheckpointError,
    GenerationError,
    HfTritonError,
    RequestError,
    UnavailableError,
)
from hf_triton.hub.checkpoint import Checkpoint
from hf_triton.protocol.parameters import parse_parameters
from hf_triton.runner.probe import Sharing, probe_batching
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import TokenLogprobs
from hf_triton.tasks.text_generation.resolve import resolve_sampling_params
from hf_triton.testing import ARCHITECTURES, build_tiny_checkpoint
from hf_triton.testing.checkpoints import VOCAB_SIZE
from tests.support.architectures import BASE, build
from tests.support.reference import load_reference, solo_ids

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

    def __call__(self, **arguments: Any) -> Any:
        return self._model(**arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass
class Asked:
    """One sequence given to an engine, and what came back: a list, so that a second answer would be seen."""

    prompt_ids: list[int]
    plan: SamplingParams
    on_token: Callable[["Asked"], bool] = lambda asked: False
    """Called after a token was taken down in `told`."""
    told: list[tuple[int, int]] = field(default_factory=list)
    """Copy and token of each call of the engine."""
    outcomes: list[Outcome] = field(default_factory=list)
    is_done: threading.Event = field(default_factory=threading.Event)

    def finish(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.is_done.set()

    def sequence(self, is_cancelled: Callable[[], bool] = lambda: False, **arguments: Any) -> SequenceGroup:
        return SequenceGroup(self.prompt_ids, self.plan, self.finish, is_cancelled, self._tell, **arguments)

    def _tell(self, copy: int, token_id: int) -> bool:
        self.told.append((copy, token_id))
        return self.on_token(self)

    @property
    def outcome(self) -> Outcome:
        assert self.is_done.wait(TIMEOUT_S), "no answer"
        assert len(self.outcomes) == 1, "more than one answer"
        return self.outcomes[0]

    @property
    def completions(self) -> list[Completion]:
        outcome = self.outcome
        assert not isinstance(outcome, HfTritonError), outcome
        return outcome

    @property
    def token_ids(self) -> list[list[int]]:
        return [completion.token_ids for completion in self.completions]

    @property
    def told_ids(self) -> list[list[int]]:
        """What listeners heard, text by text."""
        return [[token_id for at, token_id in self.told if at == copy] for copy in range(self.plan.num_sequences)]


class Bench:
    """An engine that is held still until its queue is filled, so that what can share a batch does."""

    def __init__(self, model: Any, sharing: Sharing = "padded", **arguments: Any) -> None:
        self.engine = BatchEngine(
            model, **({"max_num_seqs": 32, "context_length": 4096, "sharing": sharing} | arguments)
        )

    def run(self, asked: list[Asked]) -> None:
        with self.engine.queue.changed:  # the engine's thread takes nothing before all are queued
            for each in asked:
                self.engine.submit([each.sequence()])
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
        Asked(ids, SamplingParams(source.randint(1, 16), repetition_penalty=(1.0, 0.2, 1.3, 1.0)[place % 4]))
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
    sharing = probe_batching(model)
    assert sharing == SHARED_BY.get(architecture, "padded")
    spy = Spy(model)
    with Bench(spy, sharing) as bench:
        bench.run(asked)
    assert [each.token_ids for each in asked] == [[ids] for ids in wanted]
    assert (max(spy.widths) > 1) == (sharing != "alone")


@pytest.mark.parametrize("sharing", ["padded", "equal_length", "alone"])
def test_every_kind_of_sharing_gives_the_same_text(sharing: Sharing, llama: Any) -> None:
    prompts = [*draw_prompts(6, longest=3), *([[7, 8, 9]] * 2)]
    asked = [Asked(ids, SamplingParams(8)) for ids in prompts]
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
    plan = SamplingParams(6, repetition_penalty=penalty)
    asked = [Asked(ids, plan) for ids in [*draw_prompts(1), *([token] for token in range(10, 40))]]
    wanted = [[expected(llama, each)] for each in asked]
    with Bench(llama) as bench:
        bench.run(asked)
    assert [each.token_ids for each in asked] == wanted


def test_max_rows_bounds_every_batch(llama: Any) -> None:
    asked = [Asked(ids, SamplingParams(4)) for ids in draw_prompts(11)]
    spy = Spy(llama)
    with Bench(spy, max_num_seqs=4) as bench:
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
    "encoder_repetition_penalty": ("t5", {"encoder_repetition_penalty": 1000.0}),
    "several eos ids": ("llama", {"eos_token_id": [1, *range(100, 140)]}),
    "min_new_tokens and min_length": (
        "llama",
        {"min_new_tokens": 3, "min_length": 60, "eos_token_id": [1, *range(100, 240)]},
    ),
    "no eos id": ("llama", {"eos_token_id": None}),
    "beams": ("llama", {"num_beams": 3}),
    "max_length": ("llama", {"max_length": 5}),
    "return_dict_in_generate": ("llama", {"return_dict_in_generate": True, "output_scores": True}),
    "sampling": ("llama", {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
    "prompt lookup": ("llama", {"prompt_lookup_num_tokens": 3}),
    "min_length, encoder-decoder": ("bart", {"min_length": 12, "no_repeat_ngram_size": 2}),
    "repetition_penalty": ("llama", {"repetition_penalty": 0.7}),
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
    own = Checkpoint(None, model, 4096).generation_defaults()
    asked = [
        Asked(ids, resolve_sampling_params(parse_parameters({"max_new_tokens": length, "do_sample": False}), own))
        for ids, length in [*((each.prompt_ids, each.plan.max_new_tokens) for each in mixed(10)), ([7], 8)]
    ]
    wanted = [solo_ids(model, each.prompt_ids, each.plan.max_new_tokens) for each in asked]
    with Bench(model) as bench:
        bench.run(asked)
    assert [each.token_ids for each in asked] == [[ids] for ids in wanted]


def test_a_request_can_switch_off_what_the_checkpoint_asks_for(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = draw_prompts(6)
    wanted = [[solo_ids(llama, ids, 12)] for ids in prompts]
    neutral: dict[str, object] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0}
    for name, value in {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "min_new_tokens": 11}.items():
        monkeypatch.setattr(llama.generation_config, name, value)
    own = Checkpoint(None, llama, 4096).generation_defaults()
    plans = [resolve_sampling_params(parse_parameters({"max_new_tokens": 12, **off}), own) for off in (neutral, {})]
    asked = [Asked(ids, plan) for plan in plans for ids in prompts]
    with Bench(llama) as bench:
        bench.run(asked)
    assert [each.token_ids for each in asked[:6]] == wanted
    assert [each.token_ids for each in asked[6:]] == [[solo_ids(llama, ids, 12)] for ids in prompts]
    assert [each.token_ids for each in asked[6:]] != wanted


# --- sampling --------------------------------------------------------------------------------------------------------


def random_plans(count: int) -> list[SamplingParams]:
    """Greedy and drawn, short and long, seeded where drawn."""
    source = random.Random(count)
    drawn = [
        SamplingParams(
            source.randint(1, 14),
            do_sample=True,
            temperature=source.choice([0.7, 1.5, 5.0]),
            top_p=source.choice([0.5, 0.9, 1.0]),
            top_k=source.choice([0, 5, 50]),
            seed=source.randrange(100),
            repetition_penalty=source.choice([1.0, 1.3]),
            num_return_sequences=source.choice([1, 1, 2, 3]),
        )
        for _ in range(count)
    ]
    greedy = [SamplingParams(source.randint(1, 14), repetition_penalty=source.choice([1.0, 0.5])) for _ in range(count)]
    return [plan for pair in zip(drawn, greedy, strict=True) for plan in pair]


@pytest.mark.parametrize("architecture", ["falcon", "llama", "mamba", "rwkv", "t5", "bart"])
def test_settings_and_a_seed_decide_the_text_whatever_the_company(
    architecture: str, model_of: Callable[[str], Any]
) -> None:
    model = model_of(architecture)
    sharing = probe_batching(model)
    plans = random_plans(5)
    together = [Asked(ids, plan) for ids, plan in zip(draw_prompts(10), plans, strict=True)]
    alone = [Asked(each.prompt_ids, each.plan) for each in together]
    spy = Spy(model)
    before = torch.random.get_rng_state()
    with Bench(spy, sharing) as bench:
        bench.run(together)
        assert (len(spy.widths) == 1) == (sharing == "padded"), "whatever can share a batch does"
        for each in alone:
            bench.run([each])
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert len({tuple(ids) for each in together for ids in each.token_ids}) > len(together), "copies differ"
    assert torch.equal(before, torch.random.get_rng_state()), "nobody touches the process's own stream"


@pytest.mark.parametrize("architecture", ["falcon", "llama"])
def test_both_engines_write_the_same(architecture: str, model_of: Callable[[str], Any]) -> None:
    model = model_of(architecture)
    plans = random_plans(5)
    asked, again = ([Asked(ids, plan) for ids, plan in zip(draw_prompts(10), plans, strict=True)] for _ in range(2))
    with Bench(model) as bench:
        bench.run(asked)
    continuous = ContinuousBatchingEngine(model, max_num_seqs=8)
    continuous.submit([each.sequence() for each in again])
    assert [each.completions for each in asked] == [each.completions for each in again]
    continuous.close()


def test_unseeded_texts_differ(llama: Any) -> None:
    asked = [Asked([5, 6], SamplingParams(12, do_sample=True, temperature=5.0)) for _ in range(2)]
    with Bench(llama) as bench:
        bench.run(asked)
    assert asked[0].token_ids != asked[1].token_ids  # equal once in 10^20 times


SHARP: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1e-6},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
}


@pytest.mark.parametrize("name", SHARP)
def test_rows_sample_with_their_own_settings(name: str, llama: Any) -> None:
    """A row that is greedy in all but name, among rows that take any of 384 tokens: each keeps to its own."""
    sharp = SamplingParams(12, do_sample=True, **({"temperature": 100.0} | SHARP[name]))
    hot = SamplingParams(12, do_sample=True, temperature=100.0)
    prompts = draw_prompts(8)
    asked = [Asked(ids, plan) for ids in prompts for plan in (hot, sharp)]
    with Bench(llama) as bench:
        bench.run(asked)
    wanted = [[solo_ids(llama, ids, 12)] for ids in prompts]
    assert [each.token_ids for each in asked if each.plan is sharp] == wanted
    assert all(each.token_ids != own for each, own in zip(asked[::2], wanted, strict=True))


@pytest.mark.parametrize("sharing", ["padded", "alone"])
def test_sequences_of_one_prompt_differ_and_repeat_with_their_seed(sharing: Sharing, llama: Any) -> None:
    plan = SamplingParams(8, do_sample=True, temperature=2.0, seed=5, num_return_sequences=4)
    first, second = Asked([9, 10, 11], plan), Asked([9, 10, 11], plan)
    spy = Spy(llama)
    with Bench(spy, sharing, max_num_seqs=3) as bench:  # more sequences than rows: one prompt is never refused for it
        bench.run([first, second])
    assert spy.widths == ([1] * 8 if sharing == "alone" else [3, 1, 3, 1])
    assert first.token_ids == second.token_ids
    assert len({tuple(ids) for ids in first.token_ids}) == 4


def test_of_the_best_the_likeliest_are_kept(llama: Any) -> None:
    drawn = {"do_sample": True, "temperature": 3.0, "seed": 1, "logprobs": 0}
    every = Asked([9, 10, 11], SamplingParams(6, num_return_sequences=5, **drawn))
    best = Asked([9, 10, 11], SamplingParams(6, num_return_sequences=2, best_of=5, **drawn))
    with Bench(llama) as bench:
        bench.run([every, best])

    def likelihood(completion: Completion) -> float:
        return sum(each.logprob for each in completion.logprobs or []) / max(1, len(completion.token_ids))

    assert best.completions == sorted(every.completions, key=likelihood, reverse=True)[:2]


# --- what a row is told, and when it ends ----------------------------------------------------------------------------


def test_listeners_hear_every_token_of_every_text_once(llama: Any) -> None:
    asked = [Asked(ids, plan) for ids, plan in zip(draw_prompts(10), random_plans(5), strict=True)]
    with Bench(llama, max_num_seqs=4) as bench:
        bench.run(asked)
    assert [each.told_ids for each in asked] == [each.token_ids for each in asked]


def test_a_listener_ends_its_text_and_no_other(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.generation_config, "eos_token_id", None)
    plan = SamplingParams(9, do_sample=True, seed=4, num_return_sequences=3)
    stopped = Asked([5, 6, 7], plan, on_token=lambda asked: asked.told[-1][0] == 1 and len(asked.told_ids[1]) == 4)
    free = Asked([5, 6, 7], plan)
    with Bench(llama) as bench:
        bench.run([stopped, free])
    assert [each.finish_reason for each in stopped.completions] == ["length", "stop_string", "length"]
    wanted = free.token_ids
    assert stopped.token_ids == [wanted[0], wanted[1][:4], wanted[2]]


def test_rows_have_their_own_ends(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own end, another one, none at all: in one batch, and also where `generate` must know of them."""
    ids = solo_ids(llama, [5, 6, 7], 12)
    assert len(ids) == 12
    own, other = ids[3], next(token for token in ids[5:] if token not in ids[:5])
    monkeypatch.setattr(llama.generation_config, "eos_token_id", own)
    for setting in (None, [[300, 301]]):
        monkeypatch.setattr(llama.generation_config, "bad_words_ids", setting)
        ends = [None, frozenset([other]), frozenset[int](), frozenset([own, other])]
        asked = [Asked([5, 6, 7], SamplingParams(12, eos_ids=each)) for each in ends]
        spy = Spy(llama)
        with Bench(spy) as bench:
            bench.run(asked)
        lengths = [ids.index(own), ids.index(other), 12, ids.index(own)]
        assert [each.token_ids for each in asked] == [[ids[:length]] for length in lengths]
        assert [each.completions[0].finish_reason for each in asked] == ["eos", "eos", "length", "eos"]
        assert (len(spy.widths) == 1) == (setting is None)


def log_softmax(model: Any, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]`: of every token that is read, the log probabilities of the one that comes next."""
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            start = model.generation_config.decoder_start_token_id
            decoder_ids = torch.tensor([[start, *token_ids[:-1]]])
            logits = model(input_ids=torch.tensor([prompt_ids]), decoder_input_ids=decoder_ids).logits
        else:
            logits = model(input_ids=torch.tensor([[*prompt_ids, *token_ids]])).logits
    return torch.as_tensor(logits[0].log_softmax(-1))


def check_logprobs(found: list[TokenLogprobs] | None, wanted: torch.Tensor, token_ids: list[int], count: int) -> None:
    assert found is not None
    assert [each.token_id for each in found] == token_ids
    for each, row in zip(found, wanted, strict=True):
        assert each.logprob == pytest.approx(row[each.token_id].item(), abs=1e-4)
        assert [logprob for _, logprob in each.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert [logprob for _, logprob in each.top] == pytest.approx([row[at].item() for at, _ in each.top], abs=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mamba", "rwkv", "t5"])
def test_logprobs_are_those_of_the_model_alone(architecture: str, model_of: Callable[[str], Any]) -> None:
    model = model_of(architecture)
    reads_apart = model.config.is_encoder_decoder
    plan = SamplingParams(7, do_sample=True, seed=3, temperature=2.0, top_k=9, repetition_penalty=1.3, logprobs=3)
    asked = [
        Asked(ids, replace(plan, prompt_logprobs=None if reads_apart or place % 2 else 2))
        for place, ids in enumerate(draw_prompts(4))
    ]
    with Bench(model, probe_batching(model)) as bench:
        bench.run([*asked, *(quiet := mixed(3))])
    for each in asked:
        (completion,) = each.completions
        wanted = log_softmax(model, each.prompt_ids, completion.token_ids)
        first = 0 if reads_apart else len(each.prompt_ids) - 1
        new = wanted[first : first + len(completion.token_ids)]
        check_logprobs(completion.logprobs, new, completion.token_ids, 3)
        if each.plan.prompt_logprobs is None:
            assert completion.prompt_logprobs is None
        else:
            check_logprobs(completion.prompt_logprobs, wanted[:first], each.prompt_ids[1:], 2)
    assert all(completion.logprobs is None for each in quiet for completion in each.completions)


def test_an_encoder_decoder_has_no_logprobs_of_its_prompt(model_of: Callable[[str], Any]) -> None:
    with Bench(model_of("t5")) as bench:
        bench.run([asked := Asked([5, 6], SamplingParams(4, prompt_logprobs=0))])
    assert isinstance(asked.outcome, RequestError)
    assert asked.outcome.code == "invalid_parameter"


# --- time and the queue ----------------------------------------------------------------------------------------------


class Clock:
    """The time, which a test can put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        read = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: read() + self._ahead_s)

    def advance(self) -> None:
        self._ahead_s += 100_000.0

    def deadline_s(self) -> float:
        """Passed by the next `advance` and not before."""
        return time.monotonic() + 50_000.0


def test_a_deadline_ends_a_text_with_what_it_has(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.generation_config, "eos_token_id", None)
    clock = Clock(monkeypatch)

    def hear(asked: Asked) -> bool:
        if len(asked.told) == 3:
            clock.advance()
        assert len(others[0].told) < 4 or late.is_done.is_set(), "answered at once, not with the batch"
        return False

    late, others = (
        Asked([5, 6, 7], SamplingParams(500), hear),
        [Asked(ids, SamplingParams(8)) for ids in draw_prompts(3)],
    )
    others[0].on_token = hear
    with Bench(llama) as bench:
        with bench.engine.queue.changed:
            bench.engine.submit([late.sequence(deadline_s=clock.deadline_s())])
            for each in others:
                bench.engine.submit([each.sequence()])
        assert late.completions == [Completion(solo_ids(llama, [5, 6, 7], 3), "deadline")]
        assert [each.token_ids for each in others] == [[solo_ids(llama, each.prompt_ids, 8)] for each in others]


def test_whoever_waits_too_long_is_told_while_others_run(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.generation_config, "eos_token_id", None)
    clock = Clock(monkeypatch)
    answered: list[bool] = []

    def hear(asked: Asked) -> bool:
        if len(asked.told) == 3:
            clock.advance()
        answered.append(waiting.is_done.is_set())
        return False

    running, waiting = Asked([5, 6, 7], SamplingParams(5), hear), Asked([5, 6], SamplingParams(5))
    with Bench(llama, max_num_seqs=1) as bench:
        with bench.engine.queue.changed:
            bench.engine.submit([running.sequence()])
            bench.engine.submit([waiting.sequence(deadline_s=clock.deadline_s())])
        assert len(running.token_ids[0]) == 5
    assert isinstance(waiting.outcome, UnavailableError)
    assert waiting.outcome.code == "deadline_exceeded"
    assert answered == [False, False, False, True, True]


@pytest.mark.parametrize("failure", [None, OSError("the pipe is gone")])
def test_a_cancel_is_seen_within_one_step(
    failure: Exception | None, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.generation_config, "eos_token_id", None)

    def is_cancelled() -> bool:
        if failure and len(asked.told) >= 4:
            raise failure
        return len(asked.told) >= 4

    asked, other = Asked([5, 6, 7], SamplingParams(100_000)), Asked([5, 6], SamplingParams(20))
    with Bench(llama, context_length=200_000) as bench:
        with bench.engine.queue.changed:
            bench.engine.submit([asked.sequence(is_cancelled)])
            bench.engine.submit([other.sequence()])
        assert isinstance(asked.outcome, HfTritonError if failure else CancelledError)
        assert other.token_ids == [solo_ids(llama, [5, 6], 20)]
    assert len(asked.told) == 4


def test_the_lower_priority_number_goes_first(llama: Any) -> None:
    order: list[int] = []
    places = [5, 0, 5, -1, 0]
    asked = [Asked([5, 6], SamplingParams(1), lambda _, place=place: bool(order.append(place))) for place in range(5)]
    with Bench(llama, max_num_seqs=1) as bench:
        with bench.engine.queue.changed:
            for each, priority in zip(asked, places, strict=True):
                bench.engine.submit([each.sequence(priority=priority)])
        for each in asked:
            assert each.completions
    assert order == [3, 1, 4, 0, 2]


def test_a_checkpoint_that_limits_the_time_ends_texts_with_it(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.generation_config, "eos_token_id", None)
    monkeypatch.setattr(llama.generation_config, "max_time", 1e-9)
    asked = [Asked(ids, SamplingParams(8)) for ids in draw_prompts(3)]
    with Bench(llama) as bench:
        bench.run(asked)
    assert [each.completions[0].finish_reason for each in asked] == ["deadline"] * 3
    assert [len(each.token_ids[0]) for each in asked] == [1] * 3


# --- which engine ----------------------------------------------------------------------------------------------------

CHOICE = {
    "max_num_seqs": 4,
    "max_cache_tokens": None,
    "enable_prefix_caching": True,
    "decoding": "auto",
    "context_length": 4096,
    "on_fatal": lambda: None,
}


@pytest.mark.parametrize(
    ("name", "value", "engine"),
    [
        ("min_new_tokens", 5, ContinuousBatchingEngine),
        ("min_p", 0.1, ContinuousBatchingEngine),
        ("prompt_lookup_num_tokens", 3, ContinuousBatchingEngine),
        ("repetition_penalty", 0.01, ContinuousBatchingEngine),
        ("suppress_tokens", [9], BatchEngine),
        ("encoder_repetition_penalty", 2.0, BatchEngine),
        ("min_length", 50, BatchEngine),
    ],
)
def test_a_setting_that_only_generate_has_makes_the_choice(
    name: str, value: object, engine: type, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.generation_config, name, value)
    built = build_engine(llama, "auto", **CHOICE)
    assert isinstance(built, engine)
    built.close()


@pytest.mark.parametrize("name", UNSUPPORTED_SETTINGS)
def test_what_no_engine_does_is_refused_at_load(name: str, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    value = WatermarkingConfig() if name == "watermarking_config" else 0.1
    monkeypatch.setattr(llama.generation_config, name, value)
    for wanted in ("auto", "batch"):
        with pytest.raises(CheckpointError, match=name):
            build_engine(llama, wanted, **CHOICE)


def test_graphs_without_a_gpu_are_refused_at_load(llama: Any) -> None:
    with pytest.raises(CheckpointError, match="decoding cuda_graphs needs a GPU"):
        build_engine(llama, "continuous", **(CHOICE | {"decoding": "cuda_graphs"}))


# --- one row's trouble -----------------------------------------------------------------------------------------------


def test_cancelled_rows_are_given_up_and_nobody_else_notices(llama: Any) -> None:
    others = mixed(6)
    wanted = [expected(llama, each) for each in others]
    given_up = Asked([5, 6, 7], SamplingParams(200))
    with Bench(llama) as bench:
        with bench.engine.queue.changed:
            bench.engine.submit([given_up.sequence(lambda: True)])
            for each in others:
                bench.engine.submit([each.sequence()])
        assert isinstance(given_up.outcome, CancelledError)
        assert [each.token_ids for each in others] == [[ids] for ids in wanted]


class Failing:
    """While entered, the model raises in a forward pass for which `is_wrong(input_ids)` holds."""

    def __init__(self, model: Any, is_wrong: Callable[[torch.Tensor], bool], error: Exception) -> None:
        self._model, self._is_wrong, self._error = model, is_wrong, error

    def _check(self, _: object, __: object, arguments: dict[str, Any]) -> None:
        if self._is_wrong(arguments["input_ids"]):
            raise self._error

    def __enter__(self) -> None:
        self._handle = self._model.register_forward_pre_hook(self._check, with_kwargs=True)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


ERRORS = {"memory": torch.OutOfMemoryError("CUDA out of memory"), "other": ValueError("shapes do not match")}


@pytest.mark.parametrize("kind", ERRORS)
def test_retried_batch_continues_where_it_failed(kind: str, llama: Any) -> None:
    """Texts, random streams, log probabilities and what the listeners hear, all as without the failures."""
    asked, calm = (
        [Asked(ids, replace(plan, logprobs=1)) for ids, plan in zip(draw_prompts(10), random_plans(5), strict=True)]
        for _ in range(2)
    )
    calls: dict[int, int] = {}

    def is_wrong(input_ids: torch.Tensor) -> bool:
        rows, columns = input_ids.shape
        calls[rows] = calls.get(rows, 0) + 1
        return columns == 1 and rows > 3 and calls[rows] % 4 == 0

    with Bench(spy := Spy(llama)) as bench:
        bench.run(calm)
        with Failing(llama, is_wrong, ERRORS[kind]):
            bench.run(asked)
    assert len(spy.widths) > 3
    for each, other in zip(asked, calm, strict=True):
        assert [(done.token_ids, done.finish_reason) for done in each.completions] == [
            (done.token_ids, done.finish_reason) for done in other.completions
        ]
        assert each.told_ids == each.token_ids
        for mine, its in zip(each.completions, other.completions, strict=True):
            found, wanted = ([one.logprob for one in done.logprobs or []] for done in (mine, its))
            assert found == pytest.approx(wanted, abs=1e-4)


def test_a_text_that_makes_the_model_raise_later_is_refused_alone(
    model_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = model_of("llama")
    monkeypatch.setattr(llama.generation_config, "eos_token_id", None)
    prompts = draw_prompts(8)
    texts = [solo_ids(llama, ids, 10) for ids in prompts]
    guilty, poison = next(
        (place, token)
        for place, ids in enumerate(texts)
        for token in ids[2:8]
        if not any(token in other for at, other in enumerate(texts) if at != place) and token not in ids[:2]
    )
    asked = [Asked(ids, SamplingParams(10)) for ids in prompts]
    is_wrong: Callable[[torch.Tensor], bool] = lambda ids: ids.shape[1] == 1 and bool((ids == poison).any())  # noqa: E731
    with Failing(llama, is_wrong, ValueError("secret")), Bench(llama) as bench:
        bench.run(asked)
    assert isinstance(asked[guilty].outcome, GenerationError)
    innocent = [at for at in range(8) if at != guilty]
    assert [asked[at].token_ids for at in innocent] == [[texts[at]] for at in innocent]
    assert [asked[at].told_ids for at in innocent] == [[texts[at]] for at in innocent]


def test_parts_grow_again_after_a_failure_unless_the_memory_was_short(llama: Any) -> None:
    asked = [Asked([5, 2] if place == 0 else [5, 6], SamplingParams(2)) for place in range(12)]

    def raise_on_poison(input_ids: torch.Tensor) -> None:
        if (input_ids[:, -1] == 2).any():
            raise ValueError("poison")

    def raise_beyond_three(input_ids: torch.Tensor) -> None:
        if len(input_ids) > 3:
            raise ERRORS["memory"]

    poisoned, short = Spy(llama, raise_on_poison), Spy(llama, raise_beyond_three)
    for spy in (poisoned, short):
        with Bench(spy) as bench:
            bench.run([Asked(each.prompt_ids, each.plan) for each in asked])
    assert poisoned.widths == [12, 6, 3, 2, 1, 1, 2, 4, 4]
    assert short.widths == [12, 6, 3, 3, 3, 3]


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

    large, small = Asked([5] * 41, SamplingParams(4)), Asked([5, 6], SamplingParams(4))
    with Bench(Spy(llama, look)) as bench:
        bench.run([large, small])
    assert isinstance(large.outcome, UnavailableError)
    assert large.outcome.code == "out_of_memory"
    assert small.token_ids == [solo_ids(llama, [5, 6], 4)]


def test_a_real_allocation_that_cannot_be_had_is_out_of_memory(llama: Any) -> None:
    def look(input_ids: torch.Tensor) -> None:
        torch.empty(1 << 52)

    asked = Asked([5, 6], SamplingParams(4))
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


def test_a_listener_that_raises_does_not_end_the_loop(llama: Any) -> None:
    def listen(outcome: Outcome) -> None:
        raise RuntimeError("the sender is gone")

    asked = mixed(3)
    with Bench(llama) as bench:
        with bench.engine.queue.changed:
            for each in asked:
                bench.engine.submit([SequenceGroup(each.prompt_ids, each.plan, listen)])
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
    before, running, waiting = mixed(4), [Asked([5, 2], SamplingParams(4)), *mixed(3)], mixed(8)
    with Bench(Spy(llama, look), max_num_seqs=4, on_fatal=lambda: told.append(len(done()))) as bench:

        def done() -> list[Asked]:
            return [each for each in [*before, *running, *waiting] if each.is_done.is_set()]

        bench.run(before)
        bench.run([*running, *waiting])
        assert not bench.engine.is_healthy()
        bench.run([late := Asked([5], SamplingParams(1))])
    assert all(isinstance(each.outcome, list) for each in before)
    refused = [each.outcome for each in [*running, *waiting, late]]
    assert [each.code for each in refused if isinstance(each, UnavailableError)] == ["engine_failed"] * len(refused)
    assert told == [4 + 4 + 8], "told once, after everyone had an answer"


def test_close_answers_everyone_and_whoever_comes_later(llama: Any) -> None:
    told: list[int] = []
    asked = [Asked(ids, SamplingParams(200)) for ids in draw_prompts(20)]
    with Bench(llama, max_num_seqs=4, on_fatal=lambda: told.append(1)) as bench:
        for each in asked:
            bench.engine.submit([each.sequence()])
        bench.engine.close()
        assert all(each.is_done.is_set() for each in asked)
        assert not bench.engine.is_healthy()
        bench.engine.submit([(late := Asked([5], SamplingParams(1))).sequence()])
        bench.engine.close()
    for each in [*asked, late]:
        assert isinstance(each.outcome, UnavailableError)
        assert each.outcome.code == "shutting_down"
    assert told == []


def test_a_running_text_does_not_hold_up_the_close(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.generation_config, "eos_token_id", None)

    def hear(asked: Asked) -> bool:
        if len(asked.told) == 3:
            bench.engine.close()
        return False

    running, waiting = Asked([5, 6, 7], SamplingParams(500), hear), Asked([5, 6], SamplingParams(5))
    with Bench(llama, max_num_seqs=1) as bench:
        bench.run([running, waiting])
    for each in (running, waiting):
        assert isinstance(each.outcome, UnavailableError)
        assert each.outcome.code == "shutting_down"
    assert len(running.told) == 3


def test_one_answer_each_when_the_engine_closes_amid_submits(llama: Any) -> None:
    """Submits from many threads while it closes: each is answered once, with its text or a refusal."""
    crowds = [[Asked(each.prompt_ids, each.plan) for each in mixed(30, seed)] for seed in range(4)]
    bench = Bench(llama)

    def submit_all(crowd: list[Asked]) -> None:
        for each in crowd:
            bench.engine.submit([each.sequence()])

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
    stopped, cut = Asked([5, 6, 7], SamplingParams(6)), Asked([5, 6, 7], SamplingParams(end))
    with Bench(llama) as bench:
        bench.run([stopped, cut])
    assert stopped.outcome == [Completion(ids[:end], "eos")]
    assert cut.outcome == [Completion(ids[:end], "length")]


def test_no_row_leaves_the_context_while_the_longest_is_written(tmp_path: Path) -> None:
    spy = Spy(load_reference(build_tiny_checkpoint(tmp_path, "gpt2", n_positions=64)).model)
    with Bench(spy, context_length=64) as bench:
        asked = [
            Asked([5] * 60, SamplingParams(4)),
            Asked([6] * 4, SamplingParams(60)),
            Asked([7] * 50, SamplingParams(4)),
        ]
        bench.run(asked)
    assert spy.widths == [2, 1]  # the two long prompts together, the long text alone; nobody twice
    assert all(isinstance(each.outcome, list) for each in asked)


def test_a_prompt_of_one_token_goes_on_from_nobody_s_text() -> None:
    sizes = {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3}
    model = build("RecurrentGemmaConfig", BASE | sizes)
    one, other = [Asked([5], SamplingParams(8)) for _ in range(2)]
    with Bench(model, "equal_length") as bench:
        bench.run([one])
        bench.run([Asked([7, 90, 30, 41] * 9, SamplingParams(20))])
        bench.run([other])
    assert one.token_ids == other.token_ids
