# SPDX-License-Identifier: Apache-2.0
"""A request's way through the task, beside an engine and a tokenizer that do as they are told."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hf_triton.engine.interface import Completion, Outcome, Sequence
from hf_triton.errors import GenerationError, HfTritonError
from hf_triton.generation import GenerationParameters
from hf_triton.tasks.text_generation import TextGeneration
from hf_triton.wire import GenerationRequest


class PanicError(BaseException):
    """As a tokenizer's Rust code raises: no Exception."""


class Engine:
    """Finishes every sequence at once, with what `outcome` makes of it."""

    def __init__(self, outcome: Callable[[Sequence], Outcome]) -> None:
        self._outcome = outcome

    def submit(self, sequence: Sequence) -> None:
        sequence.on_finish(self._outcome(sequence))

    def is_healthy(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Codec:
    """One token for each character; panics on `!` when it reads, and on token 63 when it writes."""

    def encode(self, text: str, row: int) -> list[int]:
        if "!" in text:
            raise PanicError
        return [ord(character) for character in text]

    def continuation(self, prompt_ids: list[int], token_ids: list[int]) -> str:
        if 63 in token_ids:
            raise PanicError
        return "".join(map(chr, token_ids))


def echo(sequence: Sequence) -> Outcome:
    return [Completion(sequence.prompt_ids[-2:], "length")] * sequence.plan.num_return_sequences


def ask(*prompts: str, outcome: Callable[[Sequence], Outcome] = echo, **parameters: Any) -> list[Any]:
    """Every answer that a request gets."""
    task = TextGeneration(
        Engine(outcome),
        Codec(),  # type: ignore[arg-type]
        context_length=20,
        is_encoder_decoder=False,
        defaults=(GenerationParameters(),),
        max_output_length=15,
        max_rows=4,
        excludes_prompt=False,
    )
    answers: list[Any] = []
    answered = threading.Event()

    def answer(result: list[str] | HfTritonError) -> None:
        answers.append(result)
        answered.set()

    rows = [GenerationParameters(**parameters)] * len(prompts)
    task.submit(GenerationRequest(list(prompts), rows, None, (len(prompts),)), answer, lambda: False)
    assert answered.wait(10)
    task.close()
    return answers


def test_texts_come_in_the_order_of_the_prompts() -> None:
    assert ask("abc", "xyz") == [["abcbc", "xyzyz"]]


@pytest.mark.parametrize("prompt", ["panic!", "what?"], ids=["reading", "writing"])
def test_a_panic_of_the_tokenizer_is_answered(prompt: str) -> None:
    [answer] = ask("good", prompt)
    assert answer.code == "internal"


def test_one_failed_prompt_is_the_answer_of_its_request() -> None:
    def outcome(sequence: Sequence) -> Outcome:
        return GenerationError("generation_failed", "x") if sequence.prompt_ids == [98] else echo(sequence)

    [answer] = ask("a", "b", "c", outcome=outcome)
    assert answer.code == "generation_failed"


@pytest.mark.parametrize(
    ("prompt", "parameters", "part"),
    [
        ("x" * 20, {}, "row 0 has 20 tokens, and the context of 20 must hold"),
        ("x" * 10, {"max_new_tokens": 11}, "leaves room for max_new_tokens <= 10 in the context of 20, got 11"),
        ("x", {"temperature": 1.0, "num_return_sequences": 5}, "num_return_sequences must be <= 4 here"),
        ("x", {"num_return_sequences": 2}, "would give 2 equal texts without sampling"),
    ],
)
def test_what_does_not_fit_is_refused(prompt: str, parameters: dict[str, Any], part: str) -> None:
    [answer] = ask(prompt, **parameters)
    assert part in str(answer)


@pytest.mark.parametrize(("length", "expected"), [(1, 15), (10, 10), (19, 1)])
def test_the_default_length_is_what_is_left_of_the_context(length: int, expected: int) -> None:
    plans = []

    def outcome(sequence: Sequence) -> Outcome:
        plans.append(sequence.plan)
        return echo(sequence)

    ask("x" * length, outcome=outcome)
    assert [plan.max_new_tokens for plan in plans] == [expected]
