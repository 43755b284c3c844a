# SPDX-License-Identifier: Apache-2.0
"""Each invalid request is refused at once with a message of its own, and no other request is affected."""

import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_triton.errors import CODES
from hf_triton.testing import TritonServer
from tests.support.bad_requests import BAD_REQUEST, REQUESTS, TENSORS, with_tensor
from tests.support.client import Reply, generate, get, infer, post
from tests.support.doors import (
    PLAIN,
    TYPED,
    Answer,
    Door,
    over_client,
    over_grpc,
    pack,
    prompts,
    tensor,
    to_generate,
    to_infer_binary,
    to_infer_inputs,
)
from tests.support.standard import StandardServer

pytestmark = pytest.mark.full

CONTEXT_TOKENS = 256
HUGE_BYTES = 50_000_000
ANSWER_S = 30.0
"""For 50 MB on a busy machine; a tokenizer needs minutes for them."""
CANARY = "The canary sings"


# --- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(standard: StandardServer) -> TritonServer:
    return standard.serve(PLAIN, TYPED)


@dataclass(frozen=True)
class Health:
    is_live: bool
    is_ready: bool
    are_models_ready: tuple[bool, bool]
    songs: tuple[str, ...]
    stubs: frozenset[int]


def take_health(server: TritonServer) -> Health:
    return Health(
        server.is_live(),
        get(server, "/v2/health/ready").status == 200,
        (server.is_model_ready(PLAIN), server.is_model_ready(TYPED)),
        (
            generate(server, PLAIN, CANARY, max_new_tokens=4).body,
            generate(server, TYPED, CANARY, max_new_tokens=4).body,
        ),
        find_stubs(server),
    )


def find_stubs(server: TritonServer) -> frozenset[int]:
    """The process ids of the models' Python stubs: the server may still be unloading others."""
    assert server.process is not None
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        is_own = any(f"/{model}/1/".encode() in command for model in (PLAIN, TYPED))
        if int(parent) == server.process.pid and b"triton_python_backend_stub" in command and is_own:
            found.add(int(folder.name))
    return frozenset(found)


@pytest.fixture(scope="module")
def healthy(server: TritonServer) -> Health:
    health = take_health(server)
    assert health.is_live
    assert health.are_models_ready == (True, True)
    assert len(health.stubs) >= 2
    return health


@pytest.fixture(autouse=True)
def _unharmed(server: TritonServer, healthy: Health) -> Iterator[None]:
    """After every test: live, ready, the same greedy text byte for byte, and the same processes."""
    yield
    assert take_health(server) == healthy


def assert_refused(answer: Answer, statuses: Sequence[int | str], sentence: str, server: TritonServer) -> None:
    """`sentence` is a pattern that the answer must hold, or all of it where it begins with one of our codes."""
    assert answer.status in statuses, answer
    assert_discreet(answer.text, server)
    if sentence.partition(":")[0] in CODES:
        assert re.fullmatch(sentence, answer.text, re.DOTALL), answer
    else:
        assert re.search(sentence, answer.text), answer


def assert_discreet(text: str, server: TritonServer) -> None:
    """Nothing of the server's inside is shown."""
    inside = ("Traceback", 'File "', ".py", sys.prefix, str(Path(__file__).parents[2]), str(server.model_repository))
    assert [word for word in inside if word in text] == []


# --- wrong requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REQUESTS)
def test_a_wrong_request_is_refused(server: TritonServer, case: str) -> None:
    ask, statuses, sentence = REQUESTS[case]
    assert_refused(ask(server), statuses, sentence, server)


NOT_UTF8: dict[str, Door] = {
    "a name": to_generate(b'{"text_input": "x", "\xff": 1}'),
    "a value": to_generate(b'{"text_input": "x", "seed": "\xff"}'),
    "the request's id": to_generate(b'{"text_input": "x", "id": "\xff"}'),
}


def test_a_parameter_that_is_no_utf8_is_the_clients_mistake(server: TritonServer) -> None:
    for ask in NOT_UTF8.values():
        assert_refused(ask(server), BAD_REQUEST, "invalid_parameter: .*UTF-8.*", server)


@pytest.mark.parametrize("case", TENSORS)
def test_a_wrong_parameter_tensor_is_refused(server: TritonServer, case: str) -> None:
    ask, statuses, sentence = TENSORS[case]
    assert_refused(ask(server), statuses, sentence, server)


# --- parameters: impossible values, through every door ---------------------------------------------------------------

ALLOWED = {
    "max_new_tokens": "an integer >= 1 and <= 1048576",
    "do_sample": "true or false",
    "temperature": "a number >= 0 and <= 100",
    "top_k": "an integer >= -1 and <= 2147483647",
    "seed": "an integer >= 0 and <= 9223372036854775807",
}
IMPOSSIBLE = [
    *(("max_new_tokens", "5"), ("max_new_tokens", 2**63), ("do_sample", 1), ("temperature", float("nan"))),
    *(("top_k", 4294967301), ("seed", -2)),
]
"""A value of each kind that a door carries in its own way; `tests/unit/test_parameters.py` has every border."""


def doors_for_parameter(name: str, value: object) -> dict[str, Door]:
    """Every way to say a parameter that can carry this value."""
    doors = {
        "generate": to_generate({"text_input": "x", name: value}),
        "generate, in `parameters`": to_generate({"text_input": "x", "parameters": {name: value}}),
        "infer": to_infer_inputs(tensor(), parameters={name: value}),
        "infer, with inputs of that name": to_infer_inputs(tensor(shape=[1, 1]), model=TYPED, parameters={name: value}),
    }
    if isinstance(value, str) or (isinstance(value, int) and value < 2**63):
        doors["gRPC"] = over_client(PLAIN, {"text_input": prompts(b"x")}, {name: value})
    array = as_tensor(name, value)
    if array is not None:
        doors["gRPC, as a tensor"] = over_client(
            TYPED, {"text_input": prompts(b"x", is_batch=True), name: array.reshape(1, 1)}
        )
    return doors


DECLARED: dict[str, Any] = {"top_k": np.int32, "seed": np.uint64}


def as_tensor(name: str, value: object) -> Any:
    """The value in the tensor type that the parameter is declared with; None where it cannot hold it."""
    if isinstance(value, bool | str):
        return None
    if ALLOWED[name].startswith("a number"):
        with np.errstate(over="ignore"):
            return np.float32(value)
    kind = DECLARED.get(name, np.int64)
    is_whole = ALLOWED[name].startswith("an integer") and isinstance(value, int)
    return kind(value) if is_whole and np.iinfo(kind).min <= value <= np.iinfo(kind).max else None


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_out_of_range_value_is_refused_at_every_endpoint(server: TritonServer, name: str, value: object) -> None:
    for door, ask in doors_for_parameter(name, value).items():
        answer = ask(server)
        statuses = ["INVALID_ARGUMENT"] if door.startswith("gRPC") else [400]
        assert_refused(answer, statuses, rf"invalid_parameter: {name} must be {ALLOWED[name]}, got \S+", server)


NONE_LIKE_IT = r"; the nearest are \w+, \w+ and \w+, and docs/requests\.md lists all"
NO_SUCH = {
    "text_inpt": r", did you mean 'text_input'\?",
    "timeout": r", did you mean 'max_time'\?",
    "priority": r", did you mean 'queue_priority'\?",
    "nonsense": NONE_LIKE_IT,
    "": NONE_LIKE_IT,
    "ключ": NONE_LIKE_IT,
}
TRITONS_OWN_AT_INFER = ("timeout", "priority")


@pytest.mark.parametrize("name", NO_SUCH)
def test_unknown_parameter_is_refused_at_every_endpoint(server: TritonServer, name: str) -> None:
    doors = [to_generate({"text_input": "x", name: 5}), to_generate({"text_input": "x", "parameters": {name: 5}})]
    if name not in TRITONS_OWN_AT_INFER:
        doors += [
            to_infer_inputs(tensor(), parameters={name: 5}),
            to_infer_inputs(tensor(shape=[1, 1]), model=TYPED, parameters={name: 5}),
            over_client(PLAIN, {"text_input": prompts(b"x")}, {name: 5}),
        ]
    for ask in doors:
        sentence = rf"unknown_parameter: there is no parameter '{name}'{NO_SUCH[name]}"
        assert_refused(ask(server), (400, "INVALID_ARGUMENT"), sentence, server)


def test_parameters_that_contradict_each_other_are_refused(server: TritonServer) -> None:
    parameters = {"max_new_tokens": 5, "max_tokens": 5}
    for ask in (
        to_generate({"text_input": "x", **parameters}),
        to_generate({"text_input": "x", "parameters": parameters}),
        to_infer_inputs(tensor(), parameters=parameters),
    ):
        sentence = "invalid_parameter: max_(new_)?tokens and max_(new_)?tokens mean the same: leave one out"
        assert_refused(ask(server), BAD_REQUEST, sentence, server)


# --- lengths ---------------------------------------------------------------------------------------------------------


def test_prompt_and_new_tokens_must_fit_the_context(server: TritonServer) -> None:
    assert generate(server, PLAIN, "x", max_new_tokens=CONTEXT_TOKENS - 2).status == 200
    for ask in (
        to_generate({"text_input": "x", "max_new_tokens": CONTEXT_TOKENS - 1}),
        to_infer_inputs(tensor(), parameters={"max_tokens": CONTEXT_TOKENS - 1}),
        over_client(PLAIN, {"text_input": prompts(b"x")}, {"max_new_tokens": CONTEXT_TOKENS - 1}),
        with_tensor("max_new_tokens", "INT64", [CONTEXT_TOKENS - 1]),
    ):
        sentence = (
            "context_exceeded: text_input row 0 has 2 tokens, which leaves room for max_new_tokens <= 254 in the "
            "context of 256, got 255"
        )
        assert_refused(ask(server), (400, "INVALID_ARGUMENT"), sentence, server)


def test_a_prompt_may_fill_the_context_but_for_one_token(server: TritonServer) -> None:
    longest = "x" * (CONTEXT_TOKENS - 2)  # and the token that begins every prompt
    reply = generate(server, PLAIN, longest, exclude_input_in_output=False)
    assert reply.status == 200
    assert len(reply.json()["text_output"]) > len(longest)
    sentence = (
        "context_exceeded: text_input row 1 has 256 tokens, and the context of 256 must hold the prompt and at least "
        "one new token: shorten it, or set truncate_prompt_tokens"
    )
    answer = to_infer_inputs(tensor(shape=[2], data=["x", longest + "x"]))(server)
    assert_refused(answer, BAD_REQUEST, sentence, server)


HUGE = b"a" * HUGE_BYTES
TOO_LONG = r"context_exceeded: text_input row 0 has 50000000 bytes, more than the 4096 that are accepted \(.*\)"
HUGE_REQUESTS: dict[str, tuple[Callable[[], Door], str]] = {
    "prompt, generate": (lambda: to_generate(b'{"text_input": "' + HUGE + b'"}'), TOO_LONG),
    "prompt, infer": (lambda: to_infer_binary(HUGE), TOO_LONG),
    "prompt, gRPC": (lambda: over_grpc([pack(HUGE)]), TOO_LONG),
    "value": (
        lambda: to_generate(b'{"text_input": "x", "seed": "' + HUGE + b'"}'),
        r"invalid_parameter: seed must be .*, got 'a{10,60}\.\.\.",
    ),
    "name": (
        lambda: to_generate(b'{"text_input": "x", "' + HUGE + b'": 1}'),
        r"unknown_parameter: there is no parameter 'a{10,60}\.\.\." + NONE_LIKE_IT,
    ),
}


@pytest.mark.parametrize("case", HUGE_REQUESTS)
def test_50_megabytes_are_refused_before_anyone_works_on_them(server: TritonServer, case: str) -> None:
    build, sentence = HUGE_REQUESTS[case]
    ask = build()
    started = time.monotonic()
    answer = ask(server)
    assert time.monotonic() - started < ANSWER_S
    assert_refused(answer, (400, "INVALID_ARGUMENT"), sentence, server)


# --- the border of what is right -------------------------------------------------------------------------------------

FINE: dict[str, dict[str, object]] = {
    "the request's id": {"id": "r1"},
    "Triton's own parameters": {"sequence_id": 5, "sequence_start": True, "triton_x": 1},
    "greedy, said four times": {"do_sample": False, "temperature": 0, "top_p": 1.0, "top_k": 0},
    "a whole number for a temperature": {"temperature": 2},
    "a temperature that is almost 0": {"temperature": 1e-46},
    "the smallest top_p": {"top_p": 1e-9, "temperature": 100},
    "top_k off": {"top_k": -1},
    "the largest seed": {"seed": 2**63 - 1, "temperature": 1.0},
    "the weakest penalty, sampled": {"repetition_penalty": 0.01, "temperature": 0.001},
    "the strongest penalty, sampled": {"repetition_penalty": 100, "temperature": 1.0},
    "as many texts as there may be": {"num_return_sequences": 32, "temperature": 1.0, "max_new_tokens": 1},
}


@pytest.mark.parametrize("model", [PLAIN, TYPED])
def test_values_at_the_limits_are_accepted(server: TritonServer, model: str) -> None:
    for case, fields in FINE.items():
        assert generate(server, model, "x", **fields).status == 200, case


TEXTS = ["", " ", "a\0b", "\x1b[0m", "\u202eabc", "\u2028", "🙂 🏳️\u200d🌈", "e\u0301", "<s></s>x", "\ufeffx", "\\ud800"]


def test_any_utf8_prompt_is_returned_unchanged(server: TritonServer) -> None:
    reply = infer(server, PLAIN, TEXTS, parameters={"exclude_input_in_output": False})
    assert reply.status == 200
    outputs = reply.json()["outputs"][0]["data"]
    assert [output[: len(text)] for output, text in zip(outputs, TEXTS, strict=True)] == TEXTS


# --- together --------------------------------------------------------------------------------------------------------


def test_good_requests_among_bad_ones_get_their_own_answers(server: TritonServer) -> None:
    def ask(number: int) -> Reply:
        return infer(server, PLAIN, [f"Story {number % 12}:"], parameters={"max_new_tokens": 4 + number % 12})

    alone = [ask(number).body for number in range(12)]
    bad = [REQUESTS["no UTF-8"], REQUESTS["empty batch"], REQUESTS["cut off"], REQUESTS["gRPC: text cut off"]]
    bad += [TENSORS["one bad row"], TENSORS["NaN"], REQUESTS["one bad row among good ones"]]
    with ThreadPoolExecutor(12) as pool:
        good_replies, bad_answers = [], []
        for number in range(96):
            good_replies.append(pool.submit(ask, number))
            bad_answers.append(pool.submit(bad[number % len(bad)][0], server))
        assert [future.result().body for future in good_replies] == alone * 8
        for number, future in enumerate(bad_answers):
            _, statuses, sentence = bad[number % len(bad)]
            assert_refused(future.result(), statuses, sentence, server)


SEEDS = [
    b'{"text_input": "x", "max_new_tokens": 3, "temperature": 0.5, "parameters": {"seed": 1}}',
    b'{"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}], "parameters": {"n": 1}}',
]
FUZZ_REQUESTS = 400


def test_random_bytes_do_no_harm(server: TritonServer) -> None:
    dice = random.Random(20)
    for number in range(FUZZ_REQUESTS):
        body = bytearray(dice.randbytes(dice.randrange(200)) if number % 4 == 0 else SEEDS[number // 4 % 2])
        for _ in range(dice.randrange(4)):
            body[dice.randrange(len(body) + 1) : dice.randrange(len(body) + 1)] = dice.randbytes(dice.randrange(3))
        route = dice.choice(["generate", "infer"])
        model = dice.choice([PLAIN, TYPED])
        reply = post(server, f"/v2/models/{model}/{route}", bytes(body))
        assert reply.status in (200, 400, 500), bytes(body)
        assert_discreet(reply.body, server)
