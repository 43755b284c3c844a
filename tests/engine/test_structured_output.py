# SPDX-License-Identifier: Apache-2.0
"""Guided completions of both engines, by models with random weights."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import GenerationEngine, eos_ids
from hf_triton.engine.sequence import Completion, Outcome
from hf_triton.errors import GenerationError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.protocol.structured_output import Grammar
from hf_triton.protocol.thinking_switches import Thinking
from hf_triton.sampling.allowed_tokens import AllowedTokens
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint, bits_of
from hf_triton.tasks.text_generation.message import MessageReader, ThinkingReader
from hf_triton.tasks.text_generation.text_codec import TextCodec
from hf_triton.testing import build_tiny_checkpoint
from hf_triton.testing.checkpoints import VOCAB_SIZE
from tests.support import harmony
from tests.support.harmony import build_harmony_checkpoint
from tests.support.listener import group_of
from tests.support.marks import full
from tests.support.reference import Reference, load_reference, solo_ids

WAIT_S = 60.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "more": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA), "guided_json")
PROMPT = "The old harbour has"


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @cache
    def load(architecture: str) -> Reference:
        return load_reference(build_tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture))

    return load


@pytest.fixture
def start() -> Iterator[Callable[..., GenerationEngine]]:
    engines: list[GenerationEngine] = []

    def start(model: Any, name: str) -> GenerationEngine:
        if name == "continuous":
            engines.append(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=8)))
        else:
            engines.append(BatchEngine(model, EngineOptions(max_num_seqs=8, context_length=256), "padded"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


class Writer:
    """Submits guided prompts, and others, to an engine."""

    def __init__(self, engine: GenerationEngine, reference: Reference, size: int = VOCAB_SIZE) -> None:
        self.engine, self.reference = engine, reference
        self.codec = TextCodec(reference.tokenizer, size)
        self.prompt_ids = self.codec.encode(PROMPT)
        self.preceding = [] if reference.model.config.is_encoder_decoder else self.prompt_ids
        self._compiler = GrammarCompiler(reference.tokenizer, size, eos_ids(reference.model))

    def submit(
        self,
        params: SamplingParams,
        grammar: Grammar | None,
        wrap: Callable[[Constraint], Constraint] = lambda constraint: constraint,
        thinking: Thinking | None = None,
        own: Callable[[], Constraint] | None = None,
        **options: Any,
    ) -> Callable[[], list[Completion]]:
        constraint, build_constraint = own, None
        if grammar:
            params, build_constraint = self._compiler.compile(grammar, params)
        if thinking:
            build_constraint = self._compiler.behind_thinking(thinking, params, build_constraint)
        if build_constraint:

            def constraint() -> Constraint:
                return wrap(build_constraint())

        outcomes: list[Outcome] = []
        is_done = threading.Event()

        def on_finish(outcome: Outcome) -> None:
            outcomes.append(outcome)
            is_done.set()

        self.engine.submit([group_of(self.prompt_ids, params, on_finish=on_finish, constraint=constraint, **options)])

        def wait() -> list[Completion]:
            assert is_done.wait(WAIT_S)
            (outcome,) = outcomes
            assert isinstance(outcome, list), outcome
            return outcome

        return wait

    def text(self, completion: Completion) -> str:
        return self.codec.continuation(self.preceding, completion.token_ids)

    def check(self, completion: Completion, params: SamplingParams) -> None:
        """A completion is whole exactly if it ends as `eos`, and otherwise it has all its tokens."""
        if completion.finish_reason == "eos":
            jsonschema.validate(json.loads(self.text(completion)), SCHEMA)
        else:
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == params.max_new_tokens
            with pytest.raises(json.JSONDecodeError):
                json.loads(self.text(completion))


@pytest.mark.parametrize(
    ("architecture", "engine"),
    [("llama", "continuous"), ("t5", "batch"), *full(("llama", "batch"), ("mamba", "batch"))],
)
def test_guided_completions_follow_the_grammar_with_any_settings(
    architecture: str, engine: str, load: Callable[[str], Reference], start: Callable[..., GenerationEngine]
) -> None:
    reference = load(architecture)
    writer = Writer(start(reference.model, engine), reference)
    drawn = {"do_sample": True, "temperature": 1.5}
    all_params = [
        SamplingParams(30),
        SamplingParams(1),
        SamplingParams(30, repetition_penalty=1.5, min_new_tokens=30),
        SamplingParams(30, bad_words_ids=tuple((token_id,) for token_id in range(3, 60))),
        SamplingParams(60, **drawn, seed=1, num_return_sequences=3),
        SamplingParams(40, **drawn, seed=2, num_return_sequences=1, best_of=3),
        SamplingParams(90, **drawn, top_k=5, logprobs=2),
    ]
    waits = [writer.submit(params, GRAMMAR) for params in all_params]
    free = writer.submit(SamplingParams(20), None)
    for params, wait in zip(all_params, waits, strict=True):
        completions = wait()
        assert len(completions) == params.num_return_sequences
        for completion in completions:
            assert len(completion.token_ids) <= params.max_new_tokens
            writer.check(completion, params)
    assert free()[0].token_ids == solo_ids(reference.model, writer.prompt_ids, 20)


@pytest.mark.parametrize("engine", ["continuous", "batch"])
def test_allowed_tokens_hold_alone_and_beside_a_grammar(
    engine: str, load: Callable[[str], Reference], start: Callable[..., GenerationEngine]
) -> None:
    reference = load("llama")
    writer = Writer(start(reference.model, engine), reference)
    digits = [token_id for token_id in range(VOCAB_SIZE) if writer.codec.token_text(token_id) in set("0123456789")]
    allowed, no_end = bits_of(digits, VOCAB_SIZE), bits_of((), VOCAB_SIZE)
    drawn = SamplingParams(6, do_sample=True, temperature=3.0, seed=1, num_return_sequences=3, logprobs=1)
    alone = writer.submit(drawn, None, own=lambda: AllowedTokens(allowed, no_end))
    both = writer.submit(
        drawn,
        Grammar("regex", "[0-9a-z]{2}[0-4]", "guided_regex"),
        lambda constraint: AllowedTokens(allowed, no_end, lambda: constraint),
    )
    for wait, form, reason in ((alone, "[0-9]{6}", "length"), (both, "[0-9]{2}[0-4]", "eos")):
        completions = wait()
        assert len({tuple(completion.token_ids) for completion in completions}) == 3
        for completion in completions:
            assert re.fullmatch(form, writer.text(completion).strip()), writer.text(completion)
            assert completion.finish_reason == reason
            assert len(completion.logprobs or ()) == len(completion.token_ids)


@pytest.mark.parametrize("engine", ["continuous", "batch"])
def test_thinking_is_the_models_own_up_to_its_budget(
    engine: str, load: Callable[[str], Reference], start: Callable[..., GenerationEngine]
) -> None:
    reference = load("llama")
    writer = Writer(start(reference.model, engine), reference)
    own = solo_ids(reference.model, writer.prompt_ids, 40)
    closing_ids = writer.codec.encode("</think>", adds_special_tokens=False)
    budgets = (0, 1, 12)
    waits = {
        (grammar, budget): writer.submit(
            SamplingParams(90, logprobs=1), grammar, thinking=Thinking("<think>", "</think>", True, budget)
        )
        for grammar in (None, GRAMMAR)
        for budget in budgets
    }
    drawn = SamplingParams(90, do_sample=True, seed=1, num_return_sequences=3)
    several = writer.submit(drawn, GRAMMAR, thinking=Thinking("<think>", "</think>", True, 3))
    for (grammar, budget), wait in waits.items():
        (completion,) = wait()
        assert completion.token_ids[:budget] == own[:budget]
        assert completion.token_ids[budget : budget + len(closing_ids)] == closing_ids
        assert [each.token_id for each in completion.logprobs or ()] == completion.token_ids
        if grammar is not None:
            answer = replace(completion, token_ids=completion.token_ids[budget + len(closing_ids) :])
            check_answer(writer, answer)
    for completion in several():
        assert writer.text(completion).count("</think>") == 1
        check_answer(writer, replace(completion, token_ids=completion.token_ids[3 + len(closing_ids) :]))
    (unbounded,) = writer.submit(SamplingParams(40), GRAMMAR, thinking=Thinking("<think>", "</think>", True))()
    assert unbounded.token_ids == own
    assert unbounded.finish_reason == "length"


@pytest.mark.full
@pytest.mark.parametrize("engine", ["continuous", *full("batch")])
def test_an_answer_of_gpt_oss_begins_in_its_final_channel(
    engine: str, tmp_path: Path, start: Callable[..., GenerationEngine]
) -> None:
    reference = load_reference(build_harmony_checkpoint(tmp_path))
    own = solo_ids(reference.model, TextCodec(reference.tokenizer, harmony.SIZE).encode(PROMPT), 20)
    writer = Writer(start(reference.model, engine), reference, harmony.SIZE)
    drawn = SamplingParams(200, do_sample=True, temperature=1.5, seed=3, num_return_sequences=3)
    waits = [
        (thinking, writer.submit(params, GRAMMAR, thinking=thinking))
        for budget in (0, 4)
        for thinking in (replace(harmony.THINKING, budget=budget, is_open=is_open) for is_open in (True, False))
        for params in (SamplingParams(200), drawn)
    ]
    free = writer.submit(SamplingParams(20), None)
    (budgeted,) = writer.submit(SamplingParams(20), None, thinking=replace(harmony.THINKING, budget=2, is_open=True))()
    assert budgeted.token_ids[:3] == [*own[:2], reference.tokenizer.convert_tokens_to_ids(harmony.END)]
    for thinking, wait in waits:
        for completion in wait():
            text = reference.tokenizer.decode(completion.token_ids)
            _, end, rest = text.partition(harmony.END)
            if thinking.is_open or end:
                assert rest.startswith(harmony.START + harmony.FINAL)
            assert thinking.is_open or text.startswith((harmony.ANALYSIS, harmony.FINAL))
            reader = ThinkingReader(MessageReader, thinking)
            reader.feed(text)
            reader.finish(is_cut=completion.finish_reason == "length")
            message = reader.message()
            if completion.finish_reason == "eos":
                jsonschema.validate(json.loads(message["content"]), SCHEMA)
            assert "<|" not in (message["content"] or "")
            assert thinking.budget or "reasoning_content" not in message
    assert free()[0].token_ids == own


def check_answer(writer: Writer, answer: Completion) -> None:
    """An answer of its own text is whole, or cut."""
    if answer.finish_reason == "eos":
        jsonschema.validate(json.loads(writer.codec.decode(answer.token_ids)), SCHEMA)
    else:
        assert answer.finish_reason == "length"
        assert writer.codec.decode(answer.token_ids).lstrip().startswith("{")


def test_a_seed_gives_the_same_completion_in_both_engines(
    load: Callable[[str], Reference], start: Callable[..., GenerationEngine]
) -> None:
    reference, outputs = load("llama"), []
    for name in ("continuous", "batch"):
        writer = Writer(start(reference.model, name), reference)
        waits = [writer.submit(SamplingParams(60, do_sample=True, seed=seed), GRAMMAR) for seed in range(4)]
        outputs.append([wait()[0].token_ids for wait in waits])
    assert outputs[0] == outputs[1]
    assert len({tuple(token_ids) for token_ids in outputs[0]}) > 1


@pytest.mark.parametrize("engine", ["continuous", "batch"])
@pytest.mark.parametrize("num_spare", [0, 1, 20])
def test_a_whole_completion_ends_as_eos_even_with_its_last_token(
    engine: str, num_spare: int, load: Callable[[str], Reference], start: Callable[..., GenerationEngine]
) -> None:
    reference = load("llama")
    writer = Writer(start(reference.model, engine), reference)
    grammar = Grammar("regex", "[0-9]{3}-[0-9]{4}", "guided_regex")
    (whole,) = writer.submit(SamplingParams(40), grammar)()
    length = len(whole.token_ids)
    params = SamplingParams(length + num_spare, logprobs=0, min_new_tokens=length + num_spare)
    (completion,) = writer.submit(params, grammar)()
    assert completion.token_ids == whole.token_ids
    assert completion.finish_reason == whole.finish_reason == "eos"
    assert [each.token_id for each in completion.logprobs or ()] == whole.token_ids
    (cut,) = writer.submit(SamplingParams(length - 1), grammar)()
    assert cut.finish_reason == "length"
    assert cut.token_ids == whole.token_ids[:-1]


@pytest.mark.parametrize("engine", ["continuous", "batch"])
def test_a_guided_completion_is_cut_at_its_deadline(
    engine: str, load: Callable[[str], Reference], start: Callable[..., GenerationEngine]
) -> None:
    reference = load("llama")
    writer = Writer(start(reference.model, engine), reference)
    grammar = Grammar("json_schema", json.dumps({"type": "string", "minLength": 190}), "guided_json")
    heard: list[int] = []

    def listen(index: int, token_id: int, *_: object) -> bool:
        heard.append(token_id)
        time.sleep(0.05)
        return False

    deadline_s = time.monotonic() + 0.5
    (completion,) = writer.submit(SamplingParams(200), grammar, on_token=listen, deadline_s=deadline_s)()
    assert completion.finish_reason == "deadline"
    assert heard == completion.token_ids
    assert 0 < len(heard) < 190
    assert writer.text(completion).startswith('"')


@pytest.mark.parametrize("engine", ["continuous", "batch"])
def test_completion_without_a_short_ending_ends_as_length(
    engine: str, load: Callable[[str], Reference], start: Callable[..., GenerationEngine]
) -> None:
    reference = load("llama")
    writer = Writer(start(reference.model, engine), reference)
    grammar = Grammar("lark", "start: A start\nA: /[ab]/", "guided_grammar")
    banned = tuple((token_id,) for token_id in range(VOCAB_SIZE))
    for params in (SamplingParams(20), SamplingParams(20, bad_words_ids=banned)):
        (completion,) = writer.submit(params, grammar)()
        assert completion.finish_reason == "length"
        assert len(writer.text(completion)) >= 20
        assert set(writer.text(completion)) <= {"a", "b"}


@pytest.mark.parametrize("engine", ["continuous", "batch"])
def test_grammar_beyond_its_limits_fails_alone(
    engine: str, load: Callable[[str], Reference], start: Callable[..., GenerationEngine]
) -> None:
    def exhaust(constraint: Constraint) -> Constraint:
        def accept(token_id: int) -> None:
            accepted.append(token_id)
            if len(accepted) > 5:
                raise GenerationError("generation_failed", "the grammar cannot follow")
            advance(token_id)

        accepted: list[int] = []
        advance, constraint.accept = constraint.accept, accept  # type: ignore[method-assign]
        return constraint

    reference = load("llama")
    writer = Writer(start(reference.model, engine), reference)
    others = [writer.submit(SamplingParams(30), GRAMMAR), writer.submit(SamplingParams(20), None)]
    with pytest.raises(AssertionError, match="generation_failed"):
        writer.submit(SamplingParams(30), GRAMMAR, exhaust)()
    writer.check(others[0]()[0], SamplingParams(30))
    assert others[1]()[0].token_ids == solo_ids(reference.model, writer.prompt_ids, 20)
