# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: the tokens, and their log probabilities, are those without it; there are fewer steps."""

import copy
import random
from collections.abc import Container, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hf_triton.engine import prompt_lookup
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.protocols import Observer
from hf_triton.engine.sequence import Sequence
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.model_runner import ModelRunner
from hf_triton.runner.step import Step, TokenRange
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Bits, TokenLogprobs
from tests.support.architectures import BASE, CONTINUOUS, STATES, build
from tests.support.engine import Client, StartEngine, only
from tests.support.marks import full

WORD = [11, 12, 13, 14, 15, 16, 17, 18, 19]
CONFIG = EngineConfig(block_size=8, proposal_cost=0.01)


class Counts(Observer):
    """Counts proposed and accepted tokens, steps, preempted sequences and cached tokens."""

    def __init__(self) -> None:
        self.num_proposed = self.num_accepted = self.num_steps = self.num_preempted = self.num_cached = 0

    def on_proposal(self, num_proposed: int, num_accepted: int) -> None:
        self.num_proposed, self.num_accepted = self.num_proposed + num_proposed, self.num_accepted + num_accepted

    def on_step(self, num_sequences: int) -> None:
        self.num_steps += 1

    def on_preempt(self, num_sequences: int) -> None:
        self.num_preempted += num_sequences

    def on_prefix_hit(self, num_tokens: int) -> None:
        self.num_cached += num_tokens


class Spelling:
    """A constraint that spells a word again and again."""

    is_complete = False

    def __init__(self) -> None:
        self._num_tokens = 0

    def bitmask(self) -> Bits:
        allowed = np.zeros(64, bool)
        allowed[WORD[self._num_tokens % len(WORD)]] = True
        return np.packbits(allowed, bitorder="little")

    def accept(self, token_id: int) -> None:
        assert token_id == WORD[self._num_tokens % len(WORD)]
        self._num_tokens += 1


def requests(seed: int) -> Iterator[tuple[list[int], SamplingParams, dict[str, Any]]]:
    """Prompts that repeat themselves, under every option of sampling."""
    source = random.Random(seed)
    for number in range(36):
        words = [[source.randrange(8) for _ in range(source.randint(2, 6))] for _ in range(3)]
        prompt = [token for _ in range(source.randint(1, 16)) for token in source.choice(words)]
        params = SamplingParams(
            source.randint(1, 50),
            min_new_tokens=source.choice([0, 0, 20]),
            do_sample=number % 2 == 0,
            temperature=source.choice([0.3, 1.0]) if number % 2 == 0 else 1.0,
            top_k=source.choice([0, 0, 3]),
            top_p=source.choice([1.0, 0.7]),
            min_p=source.choice([0.0, 0.1]),
            typical_p=source.choice([1.0, 1.0, 0.8]),
            seed=number,
            repetition_penalty=source.choice([1.0, 1.0, 1.2]),
            presence_penalty=source.choice([0.0, 0.0, 0.5]),
            frequency_penalty=source.choice([0.0, 0.0, 0.1]),
            no_repeat_ngram_size=source.choice([0, 0, 0, 6]),
            bad_words_ids=source.choice([(), (), ((5,), (6, 7), (1, 2, 3))]),
            logit_bias=source.choice([(), (), ((2, 0.5), (3, -1.0))]),
            eos_ids=frozenset([4] if number % 3 == 0 else []),
            num_return_sequences=source.choice([1, 1, 3]),
            logprobs=source.choice([None, None, 0, 2]),
            prompt_logprobs=source.choice([None, None, None, 1]),
        )
        yield prompt, params, {"stops": number % 5 == 0, "spells": number % 9 == 4}


@pytest.fixture(scope="module")
def repeating() -> Any:
    """A model of eight words, whose text often has the same three again."""
    model = build("LlamaConfig", BASE | {"vocab_size": 24})
    model.lm_head.weight.data *= 40
    return model


def answers(engine: Any, seed: int) -> tuple[list[Any], list[list[tuple[int, int]]]]:
    """Outcomes, and what each listener heard."""
    client, heard = Client(engine), list[list[tuple[int, int]]]()
    for prompt, params, options in requests(seed):
        tokens: list[tuple[int, int]] = []
        heard.append(tokens)

        def hear(index: int, token: int, _: Any, tokens: list[Any] = tokens, stops: bool = options["stops"]) -> bool:
            tokens.append((index, token))
            return stops and sum(each == index for each, _ in tokens) == 11

        constraint = {"constraint": Spelling} if options["spells"] else {}
        client.submit(prompt, params, on_token=hear, **constraint)
    return client.outcomes(), [sorted(tokens) for tokens in heard]


def check_scores(scores: list[TokenLogprobs] | None, expected: list[TokenLogprobs] | None) -> None:
    assert (scores is None) == (expected is None)
    for one, other in zip(scores or [], expected or [], strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        values, others = ([logprob for _, logprob in each.top] for each in (one, other))
        assert values == pytest.approx(others, abs=1e-3)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence proposes tokens though its proposals fail: most are rejected."""
    monkeypatch.setattr(prompt_lookup, "MIN_SHARE", 0.0)


@pytest.mark.parametrize(("runs_ahead", "max_cache_tokens"), [(False, 192), *full((True, None))])
def test_every_option_of_sampling_gives_the_tokens_that_it_gives_without(
    runs_ahead: bool, max_cache_tokens: int | None, repeating: Any, start: StartEngine, always: None
) -> None:
    chunks = ChunkSizes(32, 16)
    expected, expected_heard = answers(start(repeating, config=EngineConfig(block_size=8, chunk_sizes=chunks)), 3)
    config, counts = EngineConfig(block_size=8, chunk_sizes=chunks, proposal_cost=0.01, runs_ahead=runs_ahead), Counts()
    engine = start(repeating, prompt_lookup=6, config=config, observer=counts, max_cache_tokens=max_cache_tokens)
    outcomes, heard = answers(engine, 3)
    assert heard == expected_heard
    for outcome, other in zip(outcomes, expected, strict=True):
        for one, two in zip(outcome, other, strict=True):
            assert (one.token_ids, one.finish_reason) == (two.token_ids, two.finish_reason)
            check_scores(one.logprobs, two.logprobs)
            check_scores(one.prompt_logprobs, two.prompt_logprobs)
    assert counts.num_accepted > 50
    assert counts.num_proposed - counts.num_accepted > 50
    assert (counts.num_preempted > 0) == (max_cache_tokens is not None)
    assert {each.finish_reason for outcome in outcomes for each in outcome} == {"eos", "length", "stop_string"}


def test_text_that_repeats_itself_takes_few_steps(model: Any, start: StartEngine) -> None:
    counts = Counts()
    client = Client(start(prompt_lookup=8, config=CONFIG, observer=counts))
    completion = only(client.ask([1, *WORD], SamplingParams(90), constraint=Spelling))
    assert completion.token_ids == WORD * 10
    assert counts.num_steps < 20
    assert counts.num_steps + counts.num_accepted == 90


def test_steps_with_proposals_are_recorded(start: StartEngine) -> None:
    engine = start(prompt_lookup=8, max_num_seqs=1, config=CONFIG)
    embedding, seen = engine.runner.model.get_input_embeddings(), list[int]()
    forward = embedding.forward

    def count(ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids.numel())
        embedded: torch.Tensor = forward(ids)
        return embedded

    embedding.forward = count
    completion = only(Client(engine).ask([1, *WORD], SamplingParams(90), constraint=Spelling))
    assert completion.token_ids == WORD * 10
    assert seen == [1 + len(WORD)], "the prompt alone runs the model's modules"


def test_the_next_turn_finds_blocks_of_accepted_tokens_and_of_no_others(
    repeating: Any, start: StartEngine, always: None
) -> None:
    seen = []
    for num_proposed in (0, 6):
        counts = Counts()
        client = Client(start(repeating, prompt_lookup=num_proposed, config=CONFIG, observer=counts))
        conversation = [1, 2, 3, 4, 5, 6, 7] * 3
        for turn in range(6):
            drawn = SamplingParams(17, do_sample=turn % 2 == 0, temperature=1.0, seed=turn)
            conversation = [*conversation, *only(client.ask(conversation, drawn)).token_ids, turn]
        seen.append((conversation, counts.num_cached))
    assert seen[0] == seen[1]
    assert counts.num_accepted
    assert counts.num_accepted < counts.num_proposed


def test_a_block_that_others_may_share_has_only_tokens_that_its_sequence_took(
    repeating: Any, start: StartEngine, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(repeating, prompt_lookup=6, config=CONFIG)
    prefixes, computed, taken = engine.scheduler._prefixes, list[list[int]](), list[list[int]]()
    publish = prefixes.publish

    def note(sequence: Sequence, part: TokenRange, finite_blocks: Container[int]) -> None:
        end = max(part.start, part.end // 8 * 8)  # of its last full block
        computed.append(list(part.token_ids[: end - part.start]))
        taken.append(list(sequence.tokens(part.start, end)))
        publish(sequence, part, finite_blocks)

    monkeypatch.setattr(prefixes, "publish", note)
    answers(engine, 1)
    assert computed == taken
    assert sum(map(len, computed)) > 1000


def test_a_sequence_proposes_tokens_on_both_sides_of_the_length_at_which_its_keys_are_computed_anew(
    start: StartEngine,
) -> None:
    completions = []
    for num_proposed in (0, 8):
        counts = Counts()
        model = build(*CONTINUOUS["phi3-longrope"])
        client = Client(start(model, prompt_lookup=num_proposed, config=CONFIG, observer=counts))
        completions.append(only(client.ask([1, *WORD], SamplingParams(90, logprobs=1), constraint=Spelling)))
    assert completions[0].token_ids == completions[1].token_ids == WORD * 10
    check_scores(completions[0].logprobs, completions[1].logprobs)
    assert counts.num_steps < 24
    assert counts.num_preempted == 1


def test_a_logits_processor_is_called_for_each_token_in_a_step_of_its_own(model: Any, start: StartEngine) -> None:
    counts = Counts()
    client = Client(start(prompt_lookup=8, config=CONFIG, observer=counts))
    lengths: list[int] = []

    def process() -> Any:
        return lambda token_ids, scores: lengths.append(len(token_ids)) or scores

    client.ask(WORD * 3, SamplingParams(20), logits_processor=process)
    assert lengths == list(range(27, 47))
    assert counts.num_proposed == 0


def test_a_sequence_whose_step_fails_by_its_proposal_goes_on_without(
    repeating: Any, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, run = (WORD * 3, SamplingParams(40)), ModelRunner.run
    expected = only(Client(start(repeating, config=EngineConfig(block_size=8))).ask(*request))
    failed: list[Step] = []

    def fail(runner: ModelRunner, step: Step, *rest: Any) -> Any:
        if any(part.num_drafted for part in step.ranges):
            failed.append(step)
            raise RuntimeError("more rows than the device has")
        return run(runner, step, *rest)

    client = Client(start(repeating, prompt_lookup=8, config=CONFIG))
    monkeypatch.setattr(ModelRunner, "run", fail)
    assert only(client.ask(*request)).token_ids == expected.token_ids
    assert failed


@torch.inference_mode()
def test_in_half_precision_tokens_are_those_of_the_highest_logit_up_to_its_rounding(
    repeating: Any, start: StartEngine
) -> None:
    half, counts = copy.deepcopy(repeating).bfloat16(), Counts()
    client = Client(start(half, prompt_lookup=8, config=CONFIG, observer=counts))
    for number in range(4):
        prompt = [number, 5, 6, 7, 8] * 4
        ids = torch.tensor([prompt + only(client.ask(prompt, SamplingParams(50))).token_ids])
        exact, rounded = (each(ids).logits[0, len(prompt) - 1 : -1].float() for each in (repeating, half))
        lost = exact.amax(-1) - exact.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        assert bool((lost <= 2 * (exact - rounded).abs().amax()).all())
    assert counts.num_accepted > 20


def test_what_a_proposed_token_costs_is_timed_at_load(model: Any, start: StartEngine) -> None:
    costs = start(prompt_lookup=4).scheduler._traits.proposals
    assert costs is not None
    assert costs.most == 4
    assert costs.by_number[0][0] == 1
    assert all(cost >= 0 for _, cost in costs.by_number)


def test_a_timed_step_that_finds_no_memory_is_one_that_does_not_pay(
    model: Any, start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ModelRunner.run

    def run_few(runner: ModelRunner, step: Step, *rest: Any) -> Any:
        if len(step.ranges) > 3 and step.ranges[0].num_drafted:
            raise torch.OutOfMemoryError
        return run(runner, step, *rest)

    monkeypatch.setattr(ModelRunner, "run", run_few)
    costs = start(prompt_lookup=4).scheduler._traits.proposals
    assert costs is not None
    assert costs.by_number[-1] == (4, 1.0)


def test_a_model_whose_states_cannot_roll_back_says_that_the_setting_does_nothing(
    start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(build(*STATES["lfm2"]), prompt_lookup=4)
    assert engine.scheduler._traits.proposals is None
    assert "the setting prompt_lookup does nothing: this model's states cannot roll back" in caplog.text
