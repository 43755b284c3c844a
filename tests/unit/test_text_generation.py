# SPDX-License-Identifier: Apache-2.0
"""A request's way through the task, beside an engine and a tokenizer that do as they are told."""

import copy
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from hf_triton.engine.protocols import EngineLoad
from hf_triton.engine.sequence import Completion, Outcome, SequenceGroup
from hf_triton.errors import GenerationError, HfTritonError, RequestError, SettingsError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.prompts import Limits, Prompt
from hf_triton.protocol.request_options import RequestOptions
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from hf_triton.tasks.checked_hooks import CheckedHooks
from hf_triton.tasks.hooks import Hooks
from hf_triton.tasks.serving.adapters import AdapterStore
from hf_triton.tasks.text_generation.chat_template import ChatTemplate
from hf_triton.tasks.text_generation.detokenizer import TextStream
from hf_triton.tasks.text_generation.prepare import PromptPreparer
from hf_triton.tasks.text_generation.resolve import PromptDefaults
from hf_triton.tasks.text_generation.response_template import MessageFormat
from hf_triton.tasks.text_generation.service import NUM_HOOK_THREADS, TextGenerationService
from hf_triton.tasks.text_generation.text_codec import TextCodec
from tests.support.collector import Collector, config_of
from tests.support.tokenizers import codec_of, raw_ids, tokenizer_of
from tests.support.waiting import wait_until

KIND = "byte_level"
VOCABULARY_SIZE = len(tokenizer_of(KIND))
EOS_ID = 3


class Engine:
    """Finishes the sequences in order, at once, with what `outcome` makes of each."""

    is_sleeping = False

    def __init__(self, outcome: Callable[[SequenceGroup], Outcome]) -> None:
        self._outcome = outcome

    def submit(self, sequences: list[SequenceGroup]) -> None:
        for sequence in sequences:
            sequence.listener.on_finish(sequence.row, self._outcome(sequence))

    def is_healthy(self) -> bool:
        return True

    def load(self) -> EngineLoad:
        return EngineLoad(num_free_slots=4)

    def close(self) -> None:
        pass


class Codec(TextCodec):
    """Exits on `!` when it reads, on `?` when it writes, and on `#` when it writes token by token."""

    def __init__(self) -> None:
        super().__init__(tokenizer_of(KIND), VOCABULARY_SIZE)

    def encode(self, text: str, row: int, **options: Any) -> list[int]:
        if "!" in text:
            raise SystemExit
        return super().encode(text, row, **options)

    def continuation(self, prompt_ids: list[int], token_ids: list[int]) -> str:
        if raw_ids(KIND, "?")[0] in token_ids:
            raise SystemExit
        return super().continuation(prompt_ids, token_ids)

    def stream(
        self, prompt_ids: list[int], stop_strings: tuple[str, ...] = (), *, includes_stop: bool = False
    ) -> TextStream:
        stream = super().stream(prompt_ids, stop_strings, includes_stop=includes_stop)
        push = stream.push

        def panicking(token_id: int) -> str:
            if token_id == raw_ids(KIND, "#")[0]:
                raise SystemExit
            return push(token_id)

        stream.push = panicking  # type: ignore[method-assign]
        return stream


def echo(sequence: SequenceGroup) -> Outcome:
    """The prompt's last two tokens."""
    return [Completion(sequence.prompt_ids[-2:], "length")] * sequence.params.num_return_sequences


def write(text: str) -> Callable[[SequenceGroup], Outcome]:
    """An engine that writes this text, in all copies, token by token, until it is stopped."""

    def outcome(sequence: SequenceGroup) -> Outcome:
        return [written(sequence, copy, text) for copy in range(sequence.params.num_sequences)]

    return outcome


def written(sequence: SequenceGroup, copy: int, text: str) -> Completion:
    token_ids: list[int] = []
    for token_id in raw_ids(KIND, text):
        token_ids.append(token_id)
        if sequence.listens_to_tokens and sequence.listener.on_token(sequence.row, copy, token_id, None):
            return Completion(token_ids, "stop_string")
    return Completion(token_ids, "length")


def reply_to(
    *prompts: Prompt,
    outcome: Callable[[SequenceGroup], Outcome] = echo,
    defaults: GenerationParameters | None = None,
    excludes_prompt: bool = False,
    is_encoder_decoder: bool = False,
    codec: TextCodec | None = None,
    timeout_s: float | None = None,
    streams: bool = False,
    options: RequestOptions | None = None,
    **parameters: Any,
) -> Collector:
    task = build_task(
        outcome, codec, defaults=defaults, excludes_prompt=excludes_prompt, is_encoder_decoder=is_encoder_decoder
    )
    reply = send(task, *prompts, timeout_s=timeout_s, streams=streams, options=options, **parameters)
    assert reply.is_finished.wait(10)
    task.close()
    return reply


NO_ADAPTERS = AdapterStore(cast(Any, SimpleNamespace(sweep=lambda: None)), {}, Path("nowhere"), Path)


def build_task(
    outcome: Callable[[SequenceGroup], Outcome] = echo,
    codec: TextCodec | None = None,
    *,
    context_length: int = 20,
    defaults: GenerationParameters | None = None,
    excludes_prompt: bool = False,
    is_encoder_decoder: bool = False,
    hooks: Hooks | None = None,
    max_waiting: int = 1000,
    adapters: AdapterStore = NO_ADAPTERS,
) -> TextGenerationService:
    preparer = PromptPreparer(
        codec or Codec(),
        ChatTemplate(tokenizer_of(KIND), None, 1000),
        GrammarCompiler(tokenizer_of(KIND), VOCABULARY_SIZE, frozenset()),
        CheckedHooks(hooks or Hooks()),
        MessageFormat(None, {}),
        adapters,
        PromptDefaults(
            (defaults or GenerationParameters(),),
            eos_ids=frozenset([EOS_ID]),
            context_length=context_length,
            max_output_length=15,
            max_num_seqs=4,
            is_encoder_decoder=is_encoder_decoder,
            excludes_prompt=excludes_prompt,
        ),
    )
    return TextGenerationService(
        Engine(outcome), preparer, Limits(1000, 1000), max_waiting=max_waiting, returns_timings=True
    )


def send(
    task: TextGenerationService,
    *prompts: Prompt,
    to: Collector | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
    timeout_s: float | None = None,
    streams: bool = False,
    options: RequestOptions | None = None,
    **parameters: Any,
) -> Collector:
    """Send a request, and give what collects its answer."""
    reply = to or Collector()
    reply.timeout_s, reply.asks_whether_cancelled = timeout_s, is_cancelled
    task.generate(reply, request_of(prompts, options, **parameters), config_of(streams=streams))
    return reply


def error_code(reply: Collector) -> str:
    [result] = reply.results
    assert isinstance(result, HfTritonError), result
    return result.code


def request_of(
    prompts: tuple[Prompt, ...], options: RequestOptions | None = None, **parameters: Any
) -> GenerationRequest:
    rows = [GenerationParameters(**parameters)] * len(prompts)
    return GenerationRequest(list(prompts), rows, options or RequestOptions(), (len(prompts),))


def ask(*prompts: Prompt, **asked: Any) -> list[Any]:
    """Every answer that a request gets: its texts, or an error."""
    results = reply_to(*prompts, **asked).results
    return [[each.text_output for each in result] if isinstance(result, list) else result for result in results]


def sequences_of(*prompts: Prompt, **asked: Any) -> list[SequenceGroup]:
    sequences: list[SequenceGroup] = []

    def outcome(sequence: SequenceGroup) -> Outcome:
        sequences.append(sequence)
        return echo(sequence)

    [answer] = ask(*prompts, outcome=outcome, **asked)
    assert not isinstance(answer, HfTritonError), answer
    return sequences


@pytest.mark.parametrize("prompt", ["panic!", "what?"], ids=["reading", "writing"])
def test_a_tokenizer_panic_is_an_internal_error(prompt: str) -> None:
    [answer] = ask("good", prompt)
    assert answer.code == "internal"


class SlowCodec(Codec):
    """Takes its time to read, and counts what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0

    def encode(self, text: str, row: int, **options: Any) -> list[int]:
        self.num_read += 1
        time.sleep(0.01)
        return super().encode(text, row, **options)


def test_a_request_of_many_prompts_does_not_delay_a_short_one() -> None:
    codec = SlowCodec()
    task = build_task(codec=codec)
    large, small = [send(task, *["x"] * 200) for _ in range(4)], send(task, "y")
    assert small.is_finished.wait(10)
    assert not any(reply.is_finished.is_set() for reply in large)
    assert all(reply.is_finished.wait(30) for reply in large)
    assert codec.num_read == 801
    task.close()


@pytest.mark.parametrize(
    ("prompts", "asked", "defaults", "is_at_once"),
    [
        (("short",), {}, {}, True),
        (("x" * 1000,), {}, {}, True),
        (("x" * 1001,), {}, {}, False),
        (("two", "prompts"), {}, {}, False),
        (("x",), {"bad_words": ("y",)}, {}, False),
        (("x",), {"guided_regex": "a"}, {}, False),
        (("x",), {}, {"bad_words": ("y",)}, False),
        (("x",), {}, {"guided_regex": "a"}, False),
    ],
)
def test_short_plain_prompts_are_prepared_in_the_caller_s_thread(
    prompts: tuple[str, ...], asked: dict[str, Any], defaults: dict[str, Any], is_at_once: bool
) -> None:
    threads: list[str] = []

    def outcome(sequence: SequenceGroup) -> Outcome:
        threads.append(threading.current_thread().name)
        return echo(sequence)

    task = build_task(outcome, context_length=2000, defaults=GenerationParameters(**defaults))
    reply = send(task, *prompts, **asked)
    assert reply.is_finished.wait(30)
    assert {name == threading.current_thread().name for name in threads} == {is_at_once}
    task.close()


def test_cold_grammars_do_not_delay_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: is_over.wait(30) and ask("never"))
    task = build_task()
    others, small = [send(task, "x", guided_regex="a") for _ in range(4)], send(task, "y")
    assert small.is_finished.wait(10)
    is_over.set()
    assert all(reply.is_finished.wait(30) for reply in others)
    task.close()


@pytest.mark.parametrize(("timeout_s", "code"), [(None, "cancelled"), (0.1, "deadline_exceeded")])
def test_preparation_stops_after_cancellation_or_deadline(timeout_s: float | None, code: str) -> None:
    codec = SlowCodec()
    task = build_task(codec=codec)
    reply = send(
        task, *["x"] * 500, timeout_s=timeout_s, is_cancelled=lambda: timeout_s is None and codec.num_read > 20
    )
    assert reply.is_finished.wait(10)
    task.close()
    assert error_code(reply) == code
    assert codec.num_read < 100


@pytest.mark.parametrize(("max_time", "code"), [(None, "cancelled"), (0.1, "deadline_exceeded")])
def test_a_grammar_of_an_ended_request_is_not_compiled(
    max_time: float | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, read = threading.Event(), []

    def compile_slowly(self: GrammarCompiler, grammar: Grammar, plan: SamplingParams) -> Any:
        read.append(grammar.text)
        is_over.wait(30)
        raise RequestError("invalid_parameter", "never")

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    task = build_task()
    first = send(task, "x", guided_regex="a")
    wait_until(lambda: read == ["a"])
    late = send(task, "y", guided_regex="b", max_time=max_time, is_cancelled=lambda: max_time is None)
    time.sleep(0.2)
    is_over.set()
    assert first.is_finished.wait(10)
    assert late.is_finished.wait(10)
    task.close()
    assert [error.code for error in late.results] == [code]
    assert read == ["a"]


class Held(Hooks):
    """Makes no prompt until it `may_go`."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.texts: list[str] = []

    def build_prompt(self, text: str) -> str:
        self.texts.append(text)
        assert self.may_go.wait(30)
        return text


def test_requests_that_wait_for_a_thread_are_refused_in_time() -> None:
    hooks = Held()
    task = build_task(hooks=hooks)
    first = [send(task, "x") for _ in range(NUM_HOOK_THREADS)]
    late = send(task, "late", "later", max_time=0.2)
    gone = send(task, "gone", is_cancelled=late.is_finished.is_set)
    patient = send(task, "patient", max_time=60.0, timeout_s=50.0)
    assert late.is_finished.wait(10)
    assert gone.is_finished.wait(10)
    assert [error_code(late), error_code(gone)] == ["deadline_exceeded", "cancelled"]
    assert not any(reply.is_finished.is_set() for reply in (*first, patient))
    hooks.may_go.set()
    assert all(reply.is_finished.wait(10) for reply in (*first, patient))
    task.close()
    assert [len(reply.results) for reply in (*first, late, gone, patient)] == [1] * (NUM_HOOK_THREADS + 3)
    assert hooks.texts == ["x"] * NUM_HOOK_THREADS + ["patient"]


def test_the_shortest_max_time_of_its_prompts_is_the_request_s() -> None:
    hooks = Held()
    task, reply = build_task(hooks=hooks, defaults=GenerationParameters(max_time=60.0)), Collector()
    rows = [GenerationParameters(), GenerationParameters(max_time=0.2), GenerationParameters(max_time=50.0)]
    task.generate(reply, GenerationRequest(["a", "b", "c"], rows, RequestOptions(), (3,)), config_of(streams=False))
    assert reply.is_finished.wait(10)
    assert error_code(reply) == "deadline_exceeded"
    hooks.may_go.set()
    task.close()
    assert len(reply.results) == 1


def test_the_gate_bounds_waiting_prompts() -> None:
    hooks = Held()
    task = build_task(hooks=hooks, max_waiting=3)  # beside its 4 rows

    taken = [send(task, "a"), send(task, "b", "c", "d"), send(task, "e", "f", max_time=0.2), send(task, "g")]
    assert task.load().num_waiting == 7
    full = send(task, "h")
    assert error_code(full) == "queue_full"
    assert "3 prompts are waiting and 3 may (setting max_waiting_prompts)" in str(full.results[0])
    assert taken[2].is_finished.wait(10)
    assert error_code(send(task, "h")) == "queue_full", "a thread still has to do with those whose time was up"
    hooks.may_go.set()
    assert all(reply.is_finished.wait(10) for reply in taken)
    wait_until(lambda: task.load().num_waiting == 0)
    large = send(task, *["i"] * 20)  # alone
    assert large.is_finished.wait(10)
    assert not isinstance(large.results[0], HfTritonError)
    wait_until(lambda: task.load().num_waiting == 0)
    task.close()


def test_close_refuses_requests_in_preparation() -> None:
    hooks = Held()
    task = build_task(hooks=hooks)
    replies = [send(task, "x") for _ in range(NUM_HOOK_THREADS + 5)]
    closing = threading.Thread(target=task.close)
    closing.start()
    assert all(reply.is_finished.wait(10) for reply in replies)
    assert {error_code(reply) for reply in replies} == {"shutting_down"}
    assert error_code(send(task, "x")) == "shutting_down"
    hooks.may_go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert len(hooks.texts) <= NUM_HOOK_THREADS


def test_a_cached_grammar_does_not_wait_for_a_cold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, compiled = threading.Event(), GrammarCompiler.compile

    def compile_slowly(self: GrammarCompiler, grammar: Grammar, plan: SamplingParams) -> Any:
        assert grammar.text == "a" or is_over.wait(30)
        return compiled(self, grammar, plan)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    task, held = build_task(), Collector()
    for _ in range(2):
        assert send(task, "x", guided_regex="a").is_finished.wait(10)
        send(task, "x", guided_regex="b", to=held)
    is_over.set()
    task.close()


@pytest.mark.parametrize("prompts", [("x",), ("x", "y")], ids=["at once", "in a thread"])
def test_a_cancelled_request_leaves_no_reference_cycle(prompts: tuple[str, ...]) -> None:
    task, reply = build_task(), Collector()
    has_gone = weakref.ref(reply)
    gc.disable()
    try:
        send(task, *prompts, to=reply, is_cancelled=lambda: True)
        assert reply.is_finished.wait(10)
        assert error_code(reply) == "cancelled"
        del reply
        wait_until(lambda: has_gone() is None)
    finally:
        gc.enable()
    task.close()


@pytest.mark.parametrize("prompts", [("x",), ("x", "y")], ids=["at once", "in a thread"])
def test_a_failure_of_engine_submit_is_an_internal_error(
    prompts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Engine, "submit", Mock(side_effect=MemoryError))
    task = build_task()
    reply = send(task, *prompts)
    assert reply.is_finished.wait(10)
    task.close()
    assert error_code(reply) == "internal"
    assert "queueing the request failed: MemoryError" in caplog.text


def test_a_thread_that_cannot_start_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    task = build_task()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        reply = send(task, "x", "y")
    assert error_code(reply) == "internal"
    assert task.load().num_waiting == 0
    later = send(task, "x", "y")  # whose thread finds the first one too
    assert later.is_finished.wait(10)
    assert not isinstance(later.results[0], HfTritonError)
    task.close()
    assert task.load().num_waiting == 0
    assert len(reply.results) == 1


def test_a_refusal_that_fails_does_not_affect_other_requests() -> None:
    class Broken(Collector):
        def refuse(self, error: HfTritonError) -> None:
            raise SystemExit

    hooks = Held()
    task, replies = build_task(hooks=hooks), [Broken(), Collector()]
    for reply in replies:
        send(task, "x", max_time=0.1, to=reply)
    assert replies[1].is_finished.wait(10)
    assert error_code(replies[1]) == "deadline_exceeded"
    hooks.may_go.set()
    task.close()


@pytest.mark.parametrize(
    ("prompt", "parameters", "part"),
    [
        ("x" * 20, {}, "row 0 has 20 tokens, and the context of 20 must hold"),
        ("x" * 10, {"max_new_tokens": 11}, "leaves room for max_new_tokens <= 10 in the context of 20, got 11"),
        ("x", {"temperature": 1.0, "num_return_sequences": 5}, "num_return_sequences must be <= 4 here"),
        ("x" * 10, {"min_new_tokens": 11}, "leaves room for min_new_tokens <= 10 in the context of 20, got 11"),
        ("x", {"temperature": 1.0, "best_of": 5}, "best_of must be <= 4 here"),
        ("x", {"num_return_sequences": 2}, "would give 2 equal completions without sampling"),
        ("x", {"logit_bias": {VOCABULARY_SIZE: 1.0}}, f"the model's token ids are below {VOCABULARY_SIZE}"),
        ("x", {"eos_token_id": [3, VOCABULARY_SIZE]}, f"eos_token_id names the token {VOCABULARY_SIZE}"),
    ],
)
def test_prompts_and_parameters_that_do_not_fit_are_refused(prompt: str, parameters: dict[str, Any], part: str) -> None:
    [answer] = ask(prompt, **parameters)
    assert part in str(answer)


@pytest.mark.parametrize(("length", "rest"), [(1, 19), (10, 10), (19, 1)])
@pytest.mark.parametrize(("defaults", "most"), [(None, 15), (GenerationParameters(max_new_tokens=12), 12)])
def test_the_default_length_is_cut_to_the_context(
    length: int, rest: int, defaults: GenerationParameters | None, most: int
) -> None:
    asked = sequences_of("x" * length, defaults=defaults)
    assert [each.params.max_new_tokens for each in asked] == [min(rest, most)]


def test_a_default_length_as_long_as_the_context_fails_the_load() -> None:
    with pytest.raises(SettingsError, match="leaves room for max_new_tokens <= 19 in the context of 20, got 20"):
        build_task(defaults=GenerationParameters(max_new_tokens=20)).check_defaults()


# --- token ids, tokenizing and truncating ----------------------------------------------------------------------------


def test_token_ids_reach_the_engine_as_they_are() -> None:
    ids = tuple(raw_ids(KIND, "go: "))
    assert [each.prompt_ids for each in sequences_of(ids)] == [list(ids)]
    assert ask(ids, outcome=write("on")) == [["go: on"]]
    assert ask(ids, outcome=write("on"), excludes_prompt=True) == [["on"]]
    assert ask(ids, outcome=write("on"), is_encoder_decoder=True) == [["on"]]


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ((1, VOCABULARY_SIZE), f"prompt_token_ids[1] is {VOCABULARY_SIZE}, and the model's token ids are below"),
        ((1,) * 20, "prompt_token_ids has 20 tokens, and the context of 20 must hold"),
    ],
    ids=["unknown", "too many"],
)
def test_token_ids_that_the_model_cannot_take_are_refused(ids: tuple[int, ...], sentence: str) -> None:
    [answer] = ask(ids)
    assert sentence in str(answer)


def test_the_tokens_of_prompt_and_completion_are_outputs() -> None:
    options = RequestOptions(return_prompt_token_ids=True, return_token_ids=True)
    [[answer]] = reply_to("go: ", outcome=write("on"), options=options).results
    assert json.loads(answer.prompt_token_ids) == raw_ids(KIND, "go: ")
    assert json.loads(answer.token_ids) == raw_ids(KIND, "on")


class Framing(Hooks):
    """A folder's own prompt and text."""

    def build_prompt(self, text: str) -> str:
        return f"<{text}>"

    def postprocess(self, text: str) -> str:
        return f"[{text}]"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("hooks", [None, Framing()], ids=["plain", "hooks"])
def test_tokenize_only_returns_the_prompt_as_the_model_gets_it(streams: bool, hooks: Hooks | None) -> None:
    asked = RequestOptions(tokenize_only=True, stream=False, return_prompt_token_ids=True, return_num_input_tokens=True)
    task = build_task(lambda _: GenerationError("generation_failed", "x"), hooks=hooks)
    prompts = ("good day", "x" * 50)  # longer than the context
    reply = send(task, *prompts, options=asked, logprobs=2, num_return_sequences=2, streams=streams)
    assert reply.is_finished.wait(10)
    task.close()
    [answers] = reply.results
    assert isinstance(answers, list)
    assert reply.parts == []
    expected = prompts if hooks is None else tuple(hooks.build_prompt(text) for text in prompts)
    assert tuple(each.text_output for each in answers) == expected
    assert [json.loads(each.prompt_token_ids) for each in answers] == [raw_ids(KIND, text) for text in expected]
    assert [each.num_input_tokens for each in answers] == [len(raw_ids(KIND, text)) for text in expected]


def test_tokenize_only_decodes_token_ids_with_special_tokens() -> None:
    tokenizer = tokenizer_of(KIND)
    special = tokenizer.all_special_ids[0]
    ids = (special, *raw_ids(KIND, "good day"))
    [[text]] = ask(ids, options=RequestOptions(tokenize_only=True, stream=False))
    assert text == f"{tokenizer.convert_ids_to_tokens(special)}good day"


@pytest.mark.parametrize(
    ("asked", "num_kept"),
    [
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": 3, "max_new_tokens": 17}, 3),
        ({"truncate_prompt_tokens": -1}, 5),  # beside 15, of 20
        ({"truncate_prompt_tokens": -1, "max_new_tokens": 4}, 16),
    ],
    ids=str,
)
def test_a_prompt_is_truncated_at_its_beginning(asked: dict[str, Any], num_kept: int) -> None:
    text = "abcdefghij" * 4
    [sequence] = sequences_of(text, **asked)
    assert sequence.prompt_ids == raw_ids(KIND, text)[-num_kept:]
    kept = codec_of(KIND).decode(sequence.prompt_ids)
    assert text.endswith(kept)
    assert ask(text, outcome=write("on"), **asked) == [[kept + "on"]]
    assert [each.prompt_ids for each in sequences_of(tuple(raw_ids(KIND, text)), **asked)] == [sequence.prompt_ids]


def test_a_short_prompt_is_not_truncated() -> None:
    assert ask("ab", outcome=write("on"), truncate_prompt_tokens=3) == [["abon"]]


def test_a_truncated_prompt_leaves_room_for_the_completion_or_is_refused() -> None:
    [answer] = ask("x" * 30, truncate_prompt_tokens=-1, max_new_tokens=20)
    assert "text_input row 0 has 1 tokens, which leaves room for max_new_tokens <= 19" in str(answer)


@pytest.mark.parametrize(
    ("asked", "expected"), [({}, {EOS_ID, 5}), ({"ignore_eos": True}, {5}), ({"eos_token_id": (7,)}, {5, 7})], ids=str
)
def test_stop_tokens_are_added_to_the_end_of_sequence_tokens(asked: dict[str, Any], expected: set[int]) -> None:
    [sequence] = sequences_of("x", stop_token_ids=(5,), **asked)
    assert sequence.params.eos_ids == expected


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_an_unknown_token_is_refused(name: str) -> None:
    [answer] = ask("x", **{name: (1, VOCABULARY_SIZE)})
    assert f"{name}[1] is {VOCABULARY_SIZE}, and the model's" in str(answer)


def test_allowed_tokens_constrain_each_sequence_and_no_beams() -> None:
    [sequence] = sequences_of("x", allowed_token_ids=(5, 9), num_return_sequences=2, temperature=1.0)
    assert sequence.constraint is not None
    assert sequence.constraint() is not sequence.constraint()
    assert np.flatnonzero(np.unpackbits(sequence.constraint().bitmask(), bitorder="little")).tolist() == [5, 9]
    [answer] = ask("x", allowed_token_ids=(5,), num_beams=2)
    assert "allowed_token_ids cannot be combined with num_beams 2" in str(answer)


# --- filling in the middle -------------------------------------------------------------------------------------------


def test_a_suffix_is_refused_where_no_token_stands_for_it() -> None:
    for prompt, asked, sentence in (
        (
            "x",
            {},
            "suffix needs tokens for filling in the middle, such as <|fim_prefix|>, and this model's tokenizer has",
        ),
        ((1, 2), {}, "suffix is for prompts of text, and this one is prompt_token_ids"),
        ("x", {"truncate_prompt_tokens": 5}, "suffix cannot be combined with truncate_prompt_tokens"),
    ):
        [answer] = ask(prompt, suffix="y", **asked)  # type: ignore[arg-type]
        assert sentence in str(answer)
    assert ask("x", suffix="", outcome=write("on")) == [["xon"]]  # none


@pytest.mark.parametrize("ignores_eos", [False, True])
def test_a_prompt_with_a_suffix_is_filled_in_and_ends_with_the_middle(ignores_eos: bool) -> None:
    tokenizer = copy.deepcopy(tokenizer_of(KIND))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]})
    codec = TextCodec(tokenizer, len(tokenizer))
    asked = {"suffix": "see", "codec": codec, "ignore_eos": ignores_eos or None}
    [sequence] = sequences_of("go ", **asked)
    assert sequence.prompt_ids == tokenizer("<fim_prefix>go <fim_suffix>see<fim_middle>")["input_ids"]
    assert sequence.params.eos_ids == (set() if ignores_eos else {EOS_ID, *codec.fill_in_ends})
    assert ask("go ", outcome=write("to "), **asked) == [["go to "]]


# --- stop strings ----------------------------------------------------------------------------------------------------


def test_a_plain_request_has_no_token_callback() -> None:
    assert [each.listens_to_tokens for each in sequences_of("x", "y")] == [False, False]


@pytest.mark.parametrize("streams", [False, True])
def test_a_completion_may_end_with_its_stop_string(streams: bool) -> None:
    options = RequestOptions(return_finish_reason=True, exclude_input_in_output=True)
    asked: dict[str, Any] = {"stop_strings": ("two",), "include_stop_str_in_output": True}
    reply = reply_to("go: ", outcome=write("one two three"), streams=streams, options=options, **asked)
    [[answer]] = reply.results
    assert "".join(piece for _, piece in reply.pieces) + answer.text_output == "one two"
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "reason"),
    [
        ("one two", ("one two three", "two"), "stop"),  # it may go on to be the longer one, and does not
        ("one two", ("one two three",), "length"),
        ("one two three", ("two",), "stop"),
    ],
)
def test_a_stop_string_is_the_finish_reason(text: str, stops: tuple[str, ...], reason: str, streams: bool) -> None:
    options = RequestOptions(return_finish_reason=True)
    asked: dict[str, Any] = {"stop_strings": stops, "streams": streams, "options": options}
    [[answer]] = reply_to("go: ", outcome=write(text), **asked).results
    assert answer.finish_reason == reason


def test_every_sequence_of_a_prompt_stops_on_its_own() -> None:
    texts = ["ab", "a stop b", "stop", "abc"]

    def outcome(sequence: SequenceGroup) -> Outcome:
        return [written(sequence, copy, text) for copy, text in enumerate(texts)]

    [answer] = ask("", outcome=outcome, stop_strings=("stop",), temperature=1.0, num_return_sequences=4)
    assert answer == ["ab", "a ", "", "abc"]


def test_best_of_keeps_the_texts_of_the_returned_sequences() -> None:
    def outcome(sequence: SequenceGroup) -> Outcome:
        completions = [written(sequence, copy, f"{copy} stop {copy}") for copy in range(4)]
        return [completions[3], completions[1]]

    asked: dict[str, Any] = {"temperature": 1.0, "num_return_sequences": 2, "best_of": 4}
    assert ask("", outcome=outcome, stop_strings=("stop",), **asked) == [["3 ", "1 "]]


def test_a_panic_while_decoding_a_token_ends_the_request() -> None:
    ends: list[bool] = []

    def outcome(sequence: SequenceGroup) -> Outcome:
        ends.append(sequence.listener.on_token(sequence.row, 0, raw_ids(KIND, "#")[0], None))
        ends.append(sequence.listener.is_cancelled())
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


def test_the_sequences_of_a_request_share_its_times() -> None:
    first, second = sequences_of("x", "y")
    assert first.times is second.times


def test_the_priority_is_the_request_s() -> None:
    assert [each.priority for each in sequences_of("x")] == [0]
    assert [each.priority for each in sequences_of("x", "y", queue_priority=-3)] == [-3, -3]


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    [sequence] = sequences_of("x", bad_words=("river", "the"))
    expected = {tuple(raw_ids(KIND, text)) for text in ("river", " river", "the", " the")}
    assert len(expected) == 4
    assert set(sequence.params.bad_words_ids) == expected


# --- what is told beside the text ------------------------------------------------------------------------------------


def plan_with(options: RequestOptions, **parameters: Any) -> Any:
    [sequence] = sequences_of("x", options=options, **parameters)
    return sequence.params


@pytest.mark.parametrize(
    ("options", "parameters", "expected"),
    [
        ({}, {}, None),
        ({"return_finish_reason": True, "return_num_output_tokens": True}, {}, None),
        ({"return_cumulative_logprob": True}, {}, 0),
        ({"return_logprobs": True}, {}, 0),
        ({"return_logprobs": True}, {"logprobs": 3}, 3),
        ({"return_logprobs": False, "return_cumulative_logprob": False}, {}, None),
    ],
    ids=str,
)
def test_log_probabilities_are_computed_if_asked_for(
    options: dict[str, bool], parameters: dict[str, Any], expected: int | None
) -> None:
    assert plan_with(RequestOptions(**options), **parameters).logprobs == expected


def test_prompt_log_probabilities_are_computed_if_asked_for() -> None:
    assert plan_with(RequestOptions(return_logprobs=True), logprobs=3).prompt_logprobs is None
    assert plan_with(RequestOptions(), prompt_logprobs=0).prompt_logprobs == 0


def test_prompt_and_output_tokens_are_counted() -> None:
    options = RequestOptions(return_num_input_tokens=True, return_num_output_tokens=True)
    [answer] = reply_to("one two", "x", outcome=write("three four"), options=options).results
    assert isinstance(answer, list)
    counts = [(each.num_input_tokens, each.num_output_tokens) for each in answer]
    num_output = len(raw_ids(KIND, "three four"))
    assert counts == [(len(raw_ids(KIND, prompt)), num_output) for prompt in ("one two", "x")]


# --- streams ---------------------------------------------------------------------------------------------------------


def joined(reply: Collector) -> list[str]:
    """The texts, from their pieces and what is left of them."""
    [result] = reply.results
    assert isinstance(result, list), result
    pieces = ["".join(piece for text, piece in reply.pieces if text == number) for number in range(len(result))]
    return [piece + rest.text_output for piece, rest in zip(pieces, result, strict=True)]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"options": RequestOptions(exclude_input_in_output=False)},
        {"is_encoder_decoder": True},
        {"stop_strings": ("two",)},
        {"stop_strings": ("zero",)},
        {"temperature": 1.0, "num_return_sequences": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["one two three", "🙂🙂", ""])
def test_the_deltas_of_a_stream_are_the_completion(text: str, asked: dict[str, Any]) -> None:
    prompts = ("go: ", "你好 ")
    streamed = reply_to(*prompts, outcome=write(text), streams=True, **asked)
    excludes_prompt = "options" not in asked
    whole = reply_to(*prompts, outcome=write(text), excludes_prompt=excludes_prompt, **asked)
    assert [[each.text_output for each in result] for result in whole.results if isinstance(result, list)] == [
        joined(streamed)
    ]
    assert all(piece for _, piece in streamed.pieces)
    assert whole.pieces == []


def test_a_stream_begins_with_the_prompt_if_asked_for() -> None:
    options = RequestOptions(exclude_input_in_output=False)
    reply = reply_to("go: ", "x", outcome=write("one two"), streams=True, options=options)
    firsts = [next(piece for text, piece in reply.pieces if text == number) for number in (0, 1)]
    assert firsts[0].startswith("go: ")
    assert firsts[1].startswith("x")


def test_the_folder_s_prompt_setting_does_not_affect_streams() -> None:
    for excludes_prompt in (True, False):
        assert joined(reply_to("go: ", outcome=write("x"), streams=True, excludes_prompt=excludes_prompt)) == ["x"]


def test_best_of_cannot_be_streamed() -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "num_return_sequences": 2, "best_of": 4}
    reply = reply_to("x", outcome=write("y"), streams=True, **asked)
    [error] = reply.results
    assert str(error) == "invalid_parameter: best_of cannot be streamed: leave it out, or say stream false"
    assert reply.pieces == []
    assert len(joined(reply_to("x", outcome=write("y"), streams=True, **(asked | {"best_of": 2})))) == 2


@pytest.mark.parametrize(
    ("hook", "defaults"), [("build_prompt", {}), ("postprocess", {}), ("build_prompt", {"guided_regex": "a"})]
)
def test_slow_hooks_run_in_parallel(hook: str, defaults: dict[str, str]) -> None:
    together = threading.Barrier(16)

    class Waiting(Hooks):
        pass

    def wait(self: Hooks, text: str) -> str:
        together.wait(30)  # breaks where fewer are called at a time
        return text

    setattr(Waiting, hook, wait)
    task = build_task(hooks=Waiting(), defaults=GenerationParameters(**defaults))
    replies = [send(task, "ab") for _ in range(16)]
    assert all(reply.is_finished.wait(60) for reply in replies)
    assert not any(isinstance(result, HfTritonError) for reply in replies for result in reply.results)
    task.close()


def test_close_waits_for_responses_in_postprocess() -> None:
    goes_on = threading.Event()

    class Waiting(Hooks):
        def postprocess(self, text: str) -> str:
            goes_on.wait(30)
            return text

    task = build_task(hooks=Waiting())
    reply = send(task, "ab")
    threading.Timer(0.2, goes_on.set).start()
    task.close()
    assert len(reply.results) == 1
    assert not isinstance(reply.results[0], HfTritonError)
