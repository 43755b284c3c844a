# SPDX-License-Identifier: Apache-2.0
"""A request's way through the task, beside an engine and a tokenizer that do as they are told."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_triton.engine.interface import Completion, Outcome, Sequence
from hf_triton.errors import CancelledError, GenerationError, HfTritonError
from hf_triton.generation import GenerationParameters
from hf_triton.tasks.text_generation import TextGeneration
from hf_triton.text import TextCodec, TextStream
from hf_triton.wire import GenerationRequest
from tests.unit.test_text import raw_ids, tokenizer_of

KIND = "byte_level"
VOCABULARY_SIZE = len(tokenizer_of(KIND))


class PanicError(BaseException):
    """As a tokenizer's Rust code raises: no Exception."""


class Engine:
    """Finishes the sequences in order, at once, with what `outcome` makes of each."""

    def __init__(self, outcome: Callable[[Sequence], Outcome]) -> None:
        self._outcome = outcome

    def submit(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.on_finish(self._outcome(sequence))

    def is_healthy(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Codec(TextCodec):
    """Panics on `!` when it reads, on `?` when it writes, and on `#` when it writes token by token."""

    def __init__(self) -> None:
        super().__init__(tokenizer_of(KIND), VOCABULARY_SIZE)

    def encode(self, text: str, row: int) -> list[int]:
        if "!" in text:
            raise PanicError
        return super().encode(text, row)

    def continuation(self, prompt_ids: list[int], token_ids: list[int], stop_strings: tuple[str, ...] = ()) -> str:
        if raw_ids(KIND, "?")[0] in token_ids:
            raise PanicError
        return super().continuation(prompt_ids, token_ids, stop_strings)

    def stream(self, prompt_ids: list[int], stop_strings: tuple[str, ...] = ()) -> TextStream:
        stream = super().stream(prompt_ids, stop_strings)
        push = stream.push

        def panicking(token_id: int) -> str:
            if token_id == raw_ids(KIND, "#")[0]:
                raise PanicError
            return push(token_id)

        stream.push = panicking  # type: ignore[method-assign]
        return stream


def echo(sequence: Sequence) -> Outcome:
    """The prompt's last two tokens."""
    return [Completion(sequence.prompt_ids[-2:], "length")] * sequence.plan.num_return_sequences


def write(text: str) -> Callable[[Sequence], Outcome]:
    """An engine that writes this text, in all copies, token by token, until it is stopped."""

    def outcome(sequence: Sequence) -> Outcome:
        return [written(sequence, copy, text) for copy in range(sequence.plan.num_rows)]

    return outcome


def written(sequence: Sequence, copy: int, text: str) -> Completion:
    token_ids: list[int] = []
    for token_id in raw_ids(KIND, text):
        token_ids.append(token_id)
        if sequence.on_token is not None and sequence.on_token(copy, token_id):
            return Completion(token_ids, "stop_string")
    return Completion(token_ids, "length")


def ask(
    *prompts: str,
    outcome: Callable[[Sequence], Outcome] = echo,
    excludes_prompt: bool = False,
    is_encoder_decoder: bool = False,
    timeout_s: float | None = None,
    **parameters: Any,
) -> list[Any]:
    """Every answer that a request gets."""
    task = TextGeneration(
        Engine(outcome),
        Codec(),
        context_length=20,
        is_encoder_decoder=is_encoder_decoder,
        defaults=(GenerationParameters(),),
        max_output_length=15,
        max_rows=4,
        excludes_prompt=excludes_prompt,
    )
    answers: list[Any] = []
    answered = threading.Event()

    def answer(result: list[str] | HfTritonError) -> None:
        answers.append(result)
        answered.set()

    rows = [GenerationParameters(**parameters)] * len(prompts)
    task.submit(GenerationRequest(list(prompts), rows, None, (len(prompts),)), answer, lambda: False, timeout_s)
    assert answered.wait(10)
    task.close()
    return answers


def sequences_of(*prompts: str, **asked: Any) -> list[Sequence]:
    """What reaches the engine."""
    sequences: list[Sequence] = []

    def outcome(sequence: Sequence) -> Outcome:
        sequences.append(sequence)
        return echo(sequence)

    [answer] = ask(*prompts, outcome=outcome, **asked)
    assert not isinstance(answer, HfTritonError), answer
    return sequences


def test_texts_come_in_the_order_of_the_prompts() -> None:
    assert ask("xyz", "zyx") == [["xyzyz", "zyxyx"]]


@pytest.mark.parametrize("prompt", ["panic!", "what?"], ids=["reading", "writing"])
def test_a_panic_of_the_tokenizer_is_answered(prompt: str) -> None:
    [answer] = ask("good", prompt)
    assert answer.code == "internal"


def test_one_failed_prompt_is_the_answer_of_its_request() -> None:
    def outcome(sequence: Sequence) -> Outcome:
        return (
            GenerationError("generation_failed", "x") if sequence.prompt_ids == raw_ids(KIND, "b") else echo(sequence)
        )

    [answer] = ask("a", "b", "c", outcome=outcome)
    assert answer.code == "generation_failed"


@pytest.mark.parametrize(
    ("prompt", "parameters", "part"),
    [
        ("x" * 20, {}, "row 0 has 20 tokens, and the context of 20 must hold"),
        ("x" * 10, {"max_new_tokens": 11}, "leaves room for max_new_tokens <= 10 in the context of 20, got 11"),
        ("x", {"temperature": 1.0, "num_return_sequences": 5}, "num_return_sequences must be <= 4 here"),
        ("x" * 10, {"min_new_tokens": 11}, "leaves room for min_new_tokens <= 10 in the context of 20, got 11"),
        ("x", {"temperature": 1.0, "best_of": 5}, "best_of must be <= 4 here"),
        ("x", {"num_return_sequences": 2}, "would give 2 equal texts without sampling"),
        ("x", {"logit_bias": {VOCABULARY_SIZE: 1.0}}, f"the model's token ids are below {VOCABULARY_SIZE}"),
        ("x", {"eos_token_id": [3, VOCABULARY_SIZE]}, f"eos_token_id names the token {VOCABULARY_SIZE}"),
    ],
)
def test_what_does_not_fit_is_refused(prompt: str, parameters: dict[str, Any], part: str) -> None:
    [answer] = ask(prompt, **parameters)
    assert part in str(answer)


@pytest.mark.parametrize(("length", "expected"), [(1, 15), (10, 10), (19, 1)])
def test_the_default_length_is_what_is_left_of_the_context(length: int, expected: int) -> None:
    assert [each.plan.max_new_tokens for each in sequences_of("x" * length)] == [expected]


def test_after_a_failed_prompt_the_others_are_given_up_and_answer_nothing() -> None:
    given_up: list[bool] = []

    def outcome(sequence: Sequence) -> Outcome:
        given_up.append(sequence.is_cancelled())
        if len(given_up) == 2:
            return GenerationError("generation_failed", "x")
        return CancelledError() if sequence.is_cancelled() else echo(sequence)

    [answer] = ask("a", "b", "c", "d", outcome=outcome)
    assert answer.code == "generation_failed"
    assert given_up == [False, False, True, True]


# --- stop strings ----------------------------------------------------------------------------------------------------


def test_a_plain_request_is_told_no_tokens() -> None:
    assert [each.on_token for each in sequences_of("x", "y")] == [None, None]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ("tw",), "one "),
        ("one two three", ("o t", "three"), "one tw"),  # over tokens' borders
        ("one two three", ("four",), "one two three"),
        ("one two thre", ("three",), "one two thre"),
        ("one two", ("one",), ""),
    ],
)
def test_a_text_ends_before_its_stop_string(text: str, stops: tuple[str, ...], expected: str) -> None:
    assert ask("go: ", outcome=write(text), stop_strings=stops) == [["go: " + expected]]
    assert ask("go: ", outcome=write(text), stop_strings=stops, excludes_prompt=True) == [[expected]]
    assert ask("go: ", outcome=write(text), stop_strings=stops, is_encoder_decoder=True) == [[expected]]


def test_every_copy_of_a_prompt_has_its_own_end() -> None:
    texts = ["ab", "a stop b", "stop", "abc"]

    def outcome(sequence: Sequence) -> Outcome:
        return [written(sequence, copy, text) for copy, text in enumerate(texts)]

    [answer] = ask("", outcome=outcome, stop_strings=("stop",), temperature=1.0, num_return_sequences=4)
    assert answer == ["ab", "a ", "", "abc"]


def test_the_copies_that_are_kept_of_many_keep_their_texts() -> None:
    def outcome(sequence: Sequence) -> Outcome:
        completions = [written(sequence, copy, f"{copy} stop {copy}") for copy in range(4)]
        return [completions[3], completions[1]]

    asked: dict[str, Any] = {"temperature": 1.0, "num_return_sequences": 2, "best_of": 4}
    assert ask("", outcome=outcome, stop_strings=("stop",), **asked) == [["3 ", "1 "]]


def test_a_panic_while_a_token_is_read_is_the_answer_and_ends_the_text() -> None:
    ends: list[bool] = []

    def outcome(sequence: Sequence) -> Outcome:
        assert sequence.on_token is not None
        ends.append(sequence.on_token(0, raw_ids(KIND, "#")[0]))
        ends.append(sequence.is_cancelled())
        return echo(sequence)

    [answer] = ask("x", outcome=outcome, stop_strings=("stop",))
    assert answer.code == "internal"
    assert ends == [True, True]


# --- time, priority, bad words ---------------------------------------------------------------------------------------


@pytest.fixture
def arrival_s(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """A clock that stands still."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    yield 100.0
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("max_time", "timeout_s", "expected"),
    [(None, None, None), (2.0, None, 102.0), (None, 3.0, 103.0), (2.0, 3.0, 102.0), (4.0, 3.0, 103.0)],
)
def test_the_deadline_is_the_earlier_of_two(
    arrival_s: float, max_time: float | None, timeout_s: float | None, expected: float | None
) -> None:
    [sequence] = sequences_of("x", timeout_s=timeout_s, max_time=max_time)
    assert sequence.deadline_s == expected


def test_the_priority_is_the_request_s() -> None:
    assert [each.priority for each in sequences_of("x")] == [0]
    assert [each.priority for each in sequences_of("x", "y", queue_priority=-3)] == [-3, -3]


def test_bad_words_are_spelled_as_at_the_beginning_and_behind_a_space() -> None:
    [sequence] = sequences_of("x", bad_words=("river", "the"))
    expected = {tuple(raw_ids(KIND, text)) for text in ("river", " river", "the", " the")}
    assert len(expected) == 4
    assert set(sequence.plan.bad_words_ids) == expected
