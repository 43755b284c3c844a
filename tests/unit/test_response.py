# SPDX-License-Identifier: Apache-2.0
"""From tokens to one answer: what is told of each text, and that a request is answered once, whatever happens."""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch

from hf_triton.engine.sequence import Completion, FinishReason, SequenceGroup
from hf_triton.errors import CancelledError, GenerationError, HfTritonError, RequestError
from hf_triton.protocol.declared_ports import OUTPUTS
from hf_triton.protocol.request_options import RequestOptions
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import TokenLogprobs
from hf_triton.tasks.checked_hooks import CheckedHooks
from hf_triton.tasks.hooks import HOOKS, Hooks
from hf_triton.tasks.text_generation.outputs import FINISH_REASONS, LEAST_LOGPROB
from hf_triton.tasks.text_generation.prepare import PreparedPrompt
from hf_triton.tasks.text_generation.resolve import TaskParams
from hf_triton.tasks.text_generation.response import GenerationResponse
from tests.support.collector import Collector, config_of
from tests.support.tokenizers import codec_of, raw_ids

KIND = "byte_level"
PLAN = SamplingParams(max_new_tokens=20)


def prompt_of(text: str, plan: SamplingParams = PLAN, before: str = "", **asked: Any) -> PreparedPrompt:
    ids = raw_ids(KIND, text)
    return PreparedPrompt(TaskParams(**asked), ids, plan, ids, before)


class Pool:
    """Runs work at once, or as `submit` says."""

    def __init__(self, submit: Callable[[Callable[[], None]], object] = lambda work: work()) -> None:
        self.num_submitted = 0
        self._submit = submit

    def submit(self, work: Callable[[], None]) -> None:
        self.num_submitted += 1
        self._submit(work)


ALL_OUTPUTS = RequestOptions(return_finish_reason=True, return_cumulative_logprob=True, return_logprobs=True)


def answering(
    *prompts: PreparedPrompt,
    streams: bool = False,
    hooks: Hooks | None = None,
    was_cancelled: bool = False,
    pool: Pool | None = None,
    options: RequestOptions = ALL_OUTPUTS,
) -> tuple[GenerationResponse, Collector]:
    reply = Collector()
    reply.asks_whether_cancelled = lambda: was_cancelled
    checked = GenerationRequest([], [], options, (len(prompts),))
    checked_hooks = CheckedHooks(hooks or Hooks())
    preparer = SimpleNamespace(
        codec=codec_of(KIND),
        hooks=checked_hooks,
        overridden={name for name in HOOKS if checked_hooks.overrides(name)},
        text_field="generated_text",
        describe_tokens=None,
    )
    made = GenerationResponse(
        reply, checked, config_of(streams=streams), cast(Any, preparer), cast(Any, pool or Pool())
    )
    made.prompts += prompts
    GROUPS[made] = made.begin()
    return made, reply


GROUPS: dict[GenerationResponse, list[SequenceGroup]] = {}


def completion(text: str, reason: FinishReason = "length", logprobs: Any = None) -> Completion:
    return Completion(raw_ids(KIND, text), reason, logprobs)


def texts_of(reply: Collector) -> list[Any]:
    [result] = reply.results
    assert isinstance(result, list), result
    return result


# --- what is told of a text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_every_finish_reason_has_a_name_for_clients(reason: FinishReason) -> None:
    made, reply = answering(prompt_of("x"))
    made.on_finish(0, [completion("text", reason)])
    assert [each.finish_reason for each in texts_of(reply)] == [FINISH_REASONS[reason]]


def test_log_probabilities_are_listed_by_position_and_token() -> None:
    first, second, other = (raw_ids(KIND, letter)[0] for letter in "abc")
    logprobs = [
        TokenLogprobs(first, -0.25, ((first, -0.25), (other, -1.5))),
        TokenLogprobs(second, -3.5, ((other, -0.5), (first, -math.inf))),
    ]
    made, reply = answering(prompt_of("x"))
    made.on_finish(0, [Completion([first, second], "length", logprobs)])
    [text] = texts_of(reply)
    assert text.cumulative_logprob == pytest.approx(-3.75)
    assert json.loads(text.logprobs) == [
        {
            str(first): {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            str(other): {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
        {
            str(second): {"logprob": -3.5, "rank": None, "decoded_token": "b"},
            str(other): {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            str(first): {"logprob": LEAST_LOGPROB, "rank": 2, "decoded_token": "a"},
        },
    ]


def test_prompt_log_probabilities_come_with_each_completion() -> None:
    first, second = (raw_ids(KIND, letter)[0] for letter in "ab")
    logprobs = [TokenLogprobs(second, -math.inf, ((first, -0.5),))]
    made, reply = answering(prompt_of("ab", replace(PLAN, num_return_sequences=2)), prompt_of("x"), prompt_of("y"))
    made.on_finish(0, [Completion([second], "length", prompt_logprobs=logprobs)] * 2)
    made.on_finish(1, [Completion([second], "length", prompt_logprobs=[])])
    made.on_finish(2, [Completion([second], "length")])
    told = [json.loads(each.prompt_logprobs or "") for each in texts_of(reply)]
    of_the_first = [
        None,
        {
            str(second): {"logprob": LEAST_LOGPROB, "rank": None, "decoded_token": "b"},
            str(first): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
    assert told == [of_the_first, of_the_first, [None], None]


@pytest.mark.parametrize("text", ['"', "\\", "\n", "\x7f", "é", "🙂"])
def test_any_token_is_valid_json(text: str) -> None:
    ids = raw_ids(KIND, text)
    made, reply = answering(prompt_of("x"))
    made.on_finish(0, [Completion(ids, "length", [TokenLogprobs(token_id, -1.0) for token_id in ids])])
    [told] = texts_of(reply)
    decoded = [codec_of(KIND).decode([token_id]) for token_id in ids]
    parts = {
        token_id: {"bytes": [*(codec_of(KIND).part_of_character(token_id) or b"")]}
        for token_id, each in zip(ids, decoded, strict=True)
        if "\ufffd" in each
    }
    assert b"".join(bytes(part["bytes"]) for part in parts.values()) in (b"", text.encode())
    assert json.loads(told.logprobs) == [
        {str(token_id): {"logprob": -1.0, "rank": None, "decoded_token": each, **parts.get(token_id, {})}}
        for token_id, each in zip(ids, decoded, strict=True)
    ]


def test_outputs_without_log_probabilities_are_empty() -> None:
    made, reply = answering(prompt_of("x"))
    made.on_finish(0, [completion("ab")])
    assert [(each.cumulative_logprob, each.logprobs) for each in texts_of(reply)] == [(0.0, "")]
    assert "prompt_logprobs" not in reply.outputs


def test_every_output_is_filled_on_request() -> None:
    asked = RequestOptions(**{name: True for name in RequestOptions.model_fields if name.startswith("return_")})
    made, reply = answering(prompt_of("x"), options=asked)
    made.on_finish(0, [Completion(raw_ids(KIND, "ab"), "length", [], prompt_logprobs=[])])
    assert reply.outputs.keys() == OUTPUTS.keys() - {"text"}


# --- one answer ------------------------------------------------------------------------------------------------------


def test_outputs_are_in_prompt_order_whatever_finishes_first() -> None:
    made, reply = answering(*[prompt_of(str(row)) for row in range(4)])
    for row in (2, 0, 3, 1):
        assert not reply.results
        made.on_finish(row, [completion(f"text {row}")])
    assert [each.text_output for each in texts_of(reply)] == ["text 0", "text 1", "text 2", "text 3"]


def test_the_first_error_is_the_response_and_drops_the_rest() -> None:
    made, reply = answering(*[prompt_of(str(row)) for row in range(3)])
    made.on_finish(0, [completion("good")])
    assert not made.is_cancelled()
    made.on_finish(1, GenerationError("generation_failed", "x"))
    assert made.is_cancelled()
    made.on_finish(2, CancelledError())
    assert [getattr(each, "code", None) for each in reply.results] == ["generation_failed"]


def test_a_cancelled_request_is_dropped_by_the_engine() -> None:
    assert answering(prompt_of("x"), was_cancelled=True)[0].is_cancelled()


def test_outcomes_from_many_threads_are_one_response() -> None:
    for _ in range(20):
        made, reply = answering(*[prompt_of(str(row)) for row in range(8)])
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda row, made=made: made.on_finish(row, [completion(f"{row}")]), range(8)))
        assert [each.text_output for each in texts_of(reply)] == [str(row) for row in range(8)]


def test_a_request_cancelled_while_queued_is_not_postprocessed() -> None:
    written = []

    class Noting(Hooks):
        def postprocess(self, text: str) -> str:
            written.append(text)
            return text

    made, reply = answering(prompt_of("x"), hooks=Noting(), was_cancelled=True)
    made.on_finish(0, [completion("ab")])
    assert [getattr(each, "code", None) for each in reply.results] == ["cancelled"]
    assert not written


@pytest.mark.parametrize(
    ("completions", "takes_long"),
    [
        ([Completion([5] * 2048, "length")] * 2, False),
        ([Completion([5] * 2048, "length")] * 3, True),
        ([Completion([5] * 256, "length", [TokenLogprobs(5, -1.0)] * 256)], False),
        ([Completion([5] * 257, "length", [TokenLogprobs(5, -1.0)] * 257)], True),
        ([Completion([5], "length", prompt_logprobs=[TokenLogprobs(5, -1.0)] * 257)], True),
    ],
    ids=["2 texts", "3 texts", "logprobs", "many logprobs", "prompt_logprobs"],
)
def test_long_responses_are_recognised_by_their_tokens(completions: list[Completion], takes_long: bool) -> None:
    pool = Pool()
    made, _ = answering(prompt_of("x"), pool=pool)
    made.on_finish(0, completions)
    assert pool.num_submitted == int(takes_long)


def test_postprocess_runs_in_the_pool() -> None:
    class Calling(Hooks):
        def postprocess(self, text: str) -> str:
            return text

    aside: list[Callable[[], None]] = []
    made, reply = answering(prompt_of("x"), hooks=Calling(), pool=Pool(aside.append))
    made.on_finish(0, [completion("a")])
    assert not reply.results
    [work] = aside
    work()
    assert [each.text_output for each in texts_of(reply)] == ["a"]


@pytest.mark.parametrize("comes_later", [True, False])
def test_postprocess_runs_in_the_sender_if_the_pool_cannot(comes_later: bool) -> None:
    class Calling(Hooks):
        def postprocess(self, text: str) -> str:
            return text

    queued: list[Callable[[], None]] = []

    def queue(make: Callable[[], None]) -> None:
        queued.append(make)
        raise RuntimeError("can't start new thread")

    made, reply = answering(prompt_of("x"), hooks=Calling(), pool=Pool(queue))
    made.on_finish(0, [completion("one")])
    if comes_later:
        queued[0]()
    assert [each.text_output for each in texts_of(reply)] == ["one"]


# --- streams ---------------------------------------------------------------------------------------------------------


def write(made: GenerationResponse, row: int, copy: int, text: str) -> list[bool]:
    assert GROUPS[made][row].listens_to_tokens
    return [made.on_token(row, copy, token_id, TokenLogprobs(token_id, -0.5)) for token_id in raw_ids(KIND, text)]


def test_deltas_are_numbered_through_all_prompts() -> None:
    plan = replace(PLAN, num_return_sequences=2, do_sample=True)
    made, reply = answering(prompt_of("x", plan), prompt_of("y", plan), streams=True)
    for row, copy in ((1, 1), (0, 0), (1, 0), (0, 1)):
        write(made, row, copy, f"{row}{copy}")
    for row in (1, 0):
        made.on_finish(row, [completion(f"{row}{copy}") for copy in (0, 1)])
    pieces = ["".join(piece for text, piece in reply.pieces if text == number) for number in range(4)]
    assert [piece + rest.text_output for piece, rest in zip(pieces, texts_of(reply), strict=True)] == [
        "00",
        "01",
        "10",
        "11",
    ]


def test_a_delta_is_sent_as_soon_as_its_text_is_complete() -> None:
    made, reply = answering(prompt_of("x"), streams=True)
    write(made, 0, 0, "one")
    assert "".join(piece for _, piece in reply.pieces) == "one"
    assert not reply.results


@pytest.mark.parametrize("text", ["one two", "é🙂 é", "a stop b", "a st"])
def test_tokens_and_log_probabilities_come_with_their_text_and_once_each(text: str) -> None:
    names = ("return_token_ids", "return_logprobs", "return_num_input_tokens", "return_prompt_token_ids")
    asked = RequestOptions(**dict.fromkeys((*names, "return_stop_string"), True))
    made, reply = answering(prompt_of("x", stop_strings=("stop",)), streams=True, options=asked)
    told: list[dict[str, str]] = []
    add = reply.add

    def note(outputs: Any) -> None:
        add(outputs)
        told.append({name: array.ravel()[0] for name, array in outputs.items()})

    reply.add = note  # type: ignore[method-assign]
    ids = raw_ids(KIND, text)
    if True in (ends := write(made, 0, 0, text)):
        ids = ids[: ends.index(True) + 1]
    made.on_finish(0, [Completion(ids, "length", [TokenLogprobs(token_id, -0.5) for token_id in ids])])
    [last] = texts_of(reply)
    pieces = [json.loads(each["token_ids"]) for each in told] + [json.loads(last.token_ids)]
    assert [token_id for piece in pieces for token_id in piece] == ids
    assert all(pieces[:-1])
    logprobs = [json.loads(each["logprobs"]) for each in told] + [json.loads(last.logprobs)]
    assert [int(token_id) for piece in logprobs for position in piece for token_id in position] == ids
    assert list(map(len, logprobs)) == list(map(len, pieces))
    assert [each.get("num_input_tokens") for each in told] == [1, *[None] * (len(told) - 1)]
    assert json.loads(told[0]["prompt_token_ids"]) == json.loads(last.prompt_token_ids)
    assert last.stop_string == ("stop" if "stop" in text else "")


def test_an_error_ends_a_stream() -> None:
    made, reply = answering(prompt_of("x"), prompt_of("y"), streams=True)
    write(made, 0, 0, "one")
    made.on_finish(1, GenerationError("generation_failed", "x"))
    assert [getattr(each, "code", None) for each in reply.results] == ["generation_failed"]
    assert made.is_cancelled()


def test_with_postprocess_a_stream_has_one_delta() -> None:
    class Shouting(Hooks):
        def postprocess(self, text: str) -> str:
            return text.upper()

    made, reply = answering(prompt_of("x"), streams=True, hooks=Shouting())
    assert not GROUPS[made][0].listens_to_tokens
    made.on_finish(0, [completion("one")])
    assert reply.pieces == []
    assert [each.text_output for each in texts_of(reply)] == ["ONE"]


# --- a folder's own methods ------------------------------------------------------------------------------------------


class Processing(Hooks):
    """Its processor raises an error, or returns a result."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def logits_processor(self) -> Any:
        def process(token_ids: list[int], scores: torch.Tensor) -> Any:
            if isinstance(self._result, BaseException):
                raise self._result
            return self._result

        return process


def processed(result: Any, score: float = 0.0) -> tuple[Any, Collector]:
    """What the engine gets for scores of one number, and what the request is told."""
    made, reply = answering(prompt_of("x"), hooks=Processing(result))
    process = made.logits_processor()
    assert process is not None
    return process([1], torch.full((3,), score)).tolist(), reply


def test_a_logits_processor_s_scores_are_used() -> None:
    assert processed(torch.tensor([1, 2, 3]))[0] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "result",
    [RuntimeError("x"), BaseException("a panic"), MemoryError(), torch.zeros(1), torch.tensor([0, 0, torch.nan]), None],
    ids=repr,
)
def test_a_failed_logits_processor_refuses_its_request_alone(result: Any) -> None:
    scores, reply = processed(result)
    assert scores == [0.0] * 3
    assert [getattr(each, "code", None) for each in reply.results] == ["hook_failed"]


def test_nan_of_the_model_is_not_blamed_on_the_processor() -> None:
    scores, reply = processed(torch.tensor([0, 1, torch.nan]), score=torch.nan)
    assert scores[:2] == [0.0, 1.0]
    assert not reply.results


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("x"), torch.AcceleratorError("CUDA error: an assert")], ids=repr
)
def test_device_errors_in_a_processor_reach_the_engine(error: Exception) -> None:
    with pytest.raises(type(error)):
        processed(error)


def test_out_of_memory_in_a_processor_reaches_the_engine() -> None:
    class Greedy(Hooks):
        def logits_processor(self) -> Any:
            return lambda token_ids, scores: torch.empty(1 << 50)

    made, _ = answering(prompt_of("x"), hooks=Greedy())
    processor = made.logits_processor()
    assert processor is not None
    with pytest.raises(RuntimeError, match="allocate memory"):
        processor([1], torch.zeros(3))


@pytest.mark.parametrize("words", ["CUDA error: device-side assert triggered", "not enough memory"])
@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError, type("Own", (RuntimeError,), {})])
def test_a_processor_that_quotes_a_device_error_has_failed(kind: type[Exception], words: str) -> None:
    scores, reply = processed(kind(f"cannot read {words!r}"))
    assert scores == [0.0] * 3
    assert [getattr(each, "code", None) for each in reply.results] == ["hook_failed"]


class NoCodeError(HfTritonError):
    def __init__(self) -> None:
        pass


class TeapotError(HfTritonError):
    triton_code = "TEAPOT"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NoCodeError(), "whose code is not a word of a-z, 0-9 and _, other than ok"),
        (
            TeapotError("mine", "secret words"),
            "whose triton_code is not one of INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL",
        ),
    ],
)
@pytest.mark.parametrize("hook", ["logits_processor", "is_complete"])
def test_an_error_with_an_invalid_code_is_hook_failed(
    hook: str, error: HfTritonError, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Hooks):
        def logits_processor(self) -> Any:
            raise error

        def is_complete(self, text: str) -> bool:
            raise error

    made, reply = answering(prompt_of("x"), hooks=Failing())
    if hook == "logits_processor":
        made.logits_processor()
    else:
        write(made, 0, 0, "a")
    assert [str(each) for each in reply.results] == [
        f"hook_failed: {hook} of the folder's own 1/model.py raised an error {words}"
    ]
    assert "secret" not in caplog.text


@pytest.mark.parametrize("claim", [True, False, np.True_, np.False_], ids=repr)
def test_a_stopping_rule_may_return_numpy_booleans(claim: Any) -> None:
    class Ruled(Hooks):
        def is_complete(self, text: str) -> bool:
            return claim

    made, _ = answering(prompt_of("x"), hooks=Ruled())
    assert write(made, 0, 0, "a") == [bool(claim)]


def test_structured_output_has_no_stopping_rule() -> None:
    class Short(Hooks):
        def is_complete(self, text: str) -> bool:
            raise AssertionError("it is not to be asked")

    made, reply = answering(prompt_of("x", grammar=Grammar("regex", "a", "guided_regex")), hooks=Short())
    assert not GROUPS[made][0].listens_to_tokens
    assert not reply.results


def test_a_stopping_rule_may_refuse_its_request() -> None:
    class Strict(Hooks):
        def is_complete(self, text: str) -> bool:
            raise RequestError("invalid_input", "x")

    made, reply = answering(prompt_of("x"), hooks=Strict())
    assert write(made, 0, 0, "a") == [True]
    assert [getattr(each, "code", None) for each in reply.results] == ["invalid_input"]
