# SPDX-License-Identifier: Apache-2.0
"""Requests of all kinds at a time, under random cancellations, have in ranks the answers that one process gives."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hf_triton.engine.protocols import Observer, eos_ids
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint, TokenLogprobs
from hf_triton.testing import build_tiny_checkpoint
from tests.support.engine import Client, Outcome, error_code
from tests.support.ranks import load_in_ranks, start_small_engine
from tests.support.reference import Reference, load_reference

pytestmark = pytest.mark.full

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 1.2}


class Counts(Observer):
    num_preempted = num_hits = 0

    def on_preempt(self, num_sequences: int) -> None:
        self.num_preempted += num_sequences

    def on_prefix_hit(self, num_tokens: int) -> None:
        self.num_hits += num_tokens > 0


@dataclass
class Request:
    """One of a sequence, whose client may leave once it has seen some tokens."""

    prompt: list[int]
    params: SamplingParams
    constraint: Callable[[], Constraint] | None
    leaves_after: int | None
    streamed: list[int] = field(default_factory=list)

    def submit(self, client: Client, *, leaves: bool) -> None:
        self.streamed = []
        limit = self.leaves_after if leaves else None

        def on_token(index: int, token_id: int, _: TokenLogprobs | None) -> bool:
            if index == 0:
                self.streamed.append(token_id)
            return False

        def has_left() -> bool:
            return limit is not None and len(self.streamed) >= limit

        client.submit(self.prompt, self.params, has_left, on_token=on_token, constraint=self.constraint)


def draw_requests(reference: Reference, number: int, seed: int) -> list[Request]:
    source, size = random.Random(seed), reference.model.config.vocab_size
    compiler = GrammarCompiler(reference.tokenizer, size, eos_ids(reference.model))
    grammar = Grammar("json_schema", json.dumps(SCHEMA), "guided_json")
    requests: list[Request] = []
    for index in range(number):
        shared = source.choice(requests).prompt[: source.choice([16, 32, 48])] if index and index % 3 == 0 else []
        prompt = [*shared, *(source.randrange(3, size) for _ in range(source.choice([1, 5, 17, 40, 90])))]
        length = source.choice([1, 2, 5, 9, 24])
        params, constraint = [
            (SamplingParams(length), None),
            (SamplingParams(length, repetition_penalty=1.3, logprobs=2), None),
            (SamplingParams(length, **DRAWN, seed=index, num_return_sequences=2), None),
            (SamplingParams(length, **DRAWN, seed=index, top_p=0.9, best_of=2), None),
            (SamplingParams(length, prompt_logprobs=1), None),
            compiler.compile(grammar, SamplingParams(24)),
            compiler.compile(grammar, SamplingParams(24, **DRAWN, seed=index)),
        ][source.randrange(7)]
        leaves_after = source.choice([0, 1, 4]) if source.random() < 0.25 else None
        requests.append(Request(prompt, params, constraint, leaves_after))
    return requests


def ask_all(engine: Any, requests: list[Request], *, leaves: bool) -> list[tuple[Outcome, list[int]]]:
    answered: list[tuple[Outcome, list[int]]] = []
    for start in range(0, len(requests), 100):  # less than a minute each
        client, some = Client(engine), requests[start : start + 100]
        for request in some:
            request.submit(client, leaves=leaves)
        answered += [(outcome, request.streamed) for outcome, request in zip(client.outcomes(), some, strict=True)]
    return answered


def flat(outcome: Outcome) -> tuple[list[Any], list[float]]:
    """What must be equal of an outcome, and its log probabilities."""
    assert isinstance(outcome, list), outcome
    scored = [(each.logprobs or []) + (each.prompt_logprobs or []) for each in outcome]
    exact = [(each.token_ids, each.finish_reason) for each in outcome]
    return [exact, [each.token_id for part in scored for each in part]], [
        each.logprob for part in scored for each in part
    ]


@pytest.mark.parametrize(("size", "number"), [(2, 300), (4, 60)])
def test_mixed_requests_have_the_answers_of_one_process(size: int, number: int, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama", num_key_value_heads=4, num_attention_heads=4)
    reference = load_reference(tmp_path)
    requests = draw_requests(reference, number, seed=size)
    engine = start_small_engine(reference.model)
    try:
        expected = ask_all(engine, requests, leaves=False)
    finally:
        engine.close()
    counts = Counts()
    ranks, model = load_in_ranks(tmp_path, size)
    with ranks.loading():
        engine = start_small_engine(model, ranks, observer=counts)
    try:
        answers = ask_all(engine, requests, leaves=True)
        load = engine.load()
    finally:
        engine.close()
    num_left = 0
    for request, (outcome, streamed), (whole, stream) in zip(requests, answers, expected, strict=True):
        if not isinstance(outcome, list):
            num_left += 1
            assert request.leaves_after is not None
            assert error_code(outcome) == "cancelled"
            assert streamed == stream[: len(streamed)]
            continue
        (exact, logprobs), (expected_exact, expected_logprobs) = flat(outcome), flat(whole)
        assert exact == expected_exact
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
        assert streamed == stream
    assert num_left > number / 20
    assert counts.num_preempted > 0
    assert counts.num_hits > number / 20
    assert (load.num_running, load.num_waiting) == (0, 0)
    print(f"{size} ranks, {number} requests: {num_left} left, {counts.num_preempted} preempted, {counts.num_hits} hits")
