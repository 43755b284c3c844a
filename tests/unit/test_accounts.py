# SPDX-License-Identifier: Apache-2.0
"""What API keys use, by a clock that the test moves."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client import generate_latest

from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.keys import accounts
from hf_triton_gateway.keys.accounts import CURRENT, Account, Tally, Window
from hf_triton_gateway.keys.key_lines import Quota
from hf_triton_gateway.triton.triton_messages import Generation, TextRequest

START_S = 1e6


class Clock:
    now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(accounts, "monotonic", clock)
    return clock


def account(**limits: Any) -> Account:
    return Account(Quota(name="alice", **limits), Metrics())


def let_in(asked: Account) -> bool:
    if asked.refusal() is not None:
        return False
    with asked.request():
        return True


def refused(asked: Account) -> tuple[str, int]:
    error = asked.refusal()
    assert error is not None
    assert error.headers is not None
    assert (error.status_code, error.code) == (429, "rate_limit_exceeded")
    return error.message, int(error.headers["Retry-After"])


def test_as_many_requests_as_a_period_has() -> None:
    window = Window(60)
    assert [window.use(1, 3, START_S + second) for second in (0, 30, 59)] == [2, 1, 0]
    assert window.use(0, 3, START_S + 59.9) == 0
    assert window.wait_s(3, START_S + 59.9) == pytest.approx(0.1)
    assert window.use(0, 3, START_S + 60) == 3


def test_what_goes_beyond_a_limit_counts_in_the_next_periods() -> None:
    window = Window(60)
    assert window.use(25, 10, START_S) == -15
    assert window.wait_s(10, START_S) == 120
    assert window.use(0, 10, START_S + 60) == -5
    assert window.wait_s(10, START_S + 60) == 60
    assert window.use(0, 10, START_S + 120) == 5
    assert window.use(15, 10, START_S + 120) == -10
    assert window.use(0, 10, START_S + 10_000) == 10, "periods without use end it too"


def test_requests_of_a_minute(clock: Clock) -> None:
    asked = account(requests_per_minute=10)
    assert sum(let_in(asked) for _ in range(200)) == 10
    assert refused(asked) == (
        "the API key alice has used its 10 requests per minute: send the request again in 60 s",
        60,
    )
    clock.now_s += 59.5
    assert refused(asked)[1] == 1
    clock.now_s += 0.5
    assert sum(let_in(asked) for _ in range(200)) == 10


def test_tokens_are_paid_after_a_request_was_let_in(clock: Clock) -> None:
    asked = account(tokens_per_minute=100, tokens_per_day=250)
    for _ in range(2):
        assert let_in(asked)
        asked.charge(30, 70)
        assert refused(asked)[1] == 60
        clock.now_s += 60
    assert let_in(asked)
    asked.charge(0, 50)
    message, wait_s = refused(asked)
    assert "has used its 250 tokens per day" in message
    assert wait_s == 24 * 3600 - 120
    clock.now_s += wait_s
    assert let_in(asked)


def test_requests_in_flight(clock: Clock) -> None:
    asked = account(concurrent_requests=2)
    with ExitStack() as stack:
        for _ in range(2):
            assert asked.refusal() is None
            stack.enter_context(asked.request())
        assert refused(asked) == (
            "the API key alice has 2 requests in flight, as many as it may have: send the request again in 1 s",
            1,
        )
    with pytest.raises(ValueError, match="failed"), asked.request():
        raise ValueError("failed")
    assert asked.refusal() is None


def test_other_limits_leave_what_was_used(clock: Clock) -> None:
    asked = account(requests_per_minute=10)
    assert sum(let_in(asked) for _ in range(8)) == 8
    asked.change(Quota(name="alice", requests_per_minute=5))
    assert asked.refusal() is not None
    asked.change(Quota(name="alice", requests_per_minute=9))
    assert sum(let_in(asked) for _ in range(5)) == 1
    asked.change(Quota(name="alice"))
    assert let_in(asked)


def test_headers_tell_the_limit_with_least_left(clock: Clock) -> None:
    asked = account(requests_per_minute=10, tokens_per_minute=100, tokens_per_day=120)
    let_in(asked)
    asked.charge(20, 10)
    clock.now_s += 0.5
    told = {name.decode(): value.decode() for name, value in asked.headers()}
    assert told == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "60s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "70",
        "x-ratelimit-reset-tokens": "60s",
    }
    clock.now_s += 60
    assert (b"x-ratelimit-limit-tokens", b"120") in asked.headers()
    asked.charge(500, 0)
    assert (b"x-ratelimit-remaining-tokens", b"0") in asked.headers()
    assert account().headers() == []
    assert {name.decode() for name, _ in asked.headers()} == set(accounts.HEADERS)


def test_metrics_are_those_of_the_keys_that_there_are(clock: Clock) -> None:
    metrics = Metrics()
    asked = Account(Quota(name="alice", requests_per_minute=1), metrics)
    let_in(asked)
    let_in(asked)
    asked.charge(3, 4)

    def exported() -> list[str]:
        lines = generate_latest(metrics.registry).decode().splitlines()
        return [line for line in lines if line.startswith("hf_triton_openai_key_") and "_created" not in line]

    of_alice = {line for line in exported() if not line.endswith(" 0.0")}
    assert of_alice == {
        'hf_triton_openai_key_requests_total{key="alice"} 1.0',
        'hf_triton_openai_key_prompt_tokens_total{key="alice"} 3.0',
        'hf_triton_openai_key_completion_tokens_total{key="alice"} 4.0',
        'hf_triton_openai_key_refused_total{key="alice",limit="requests_per_minute"} 1.0',
    }
    metrics.forget_key("alice")
    asked.charge(3, 4)  # a request that is in flight yet
    assert exported() == []


@pytest.fixture
def current(clock: Clock) -> Iterator[list[tuple[int, ...]]]:
    """What is charged to the current account, one for each time."""
    asked = account()
    charged: list[tuple[int, ...]] = []
    asked.charge = lambda *counts: charged.append(counts)  # type: ignore[method-assign]
    token = CURRENT.set(asked)
    yield charged
    CURRENT.reset(token)


def generation(num_prompts: int = 0, **options: bool) -> Generation:
    return Generation("m", "id", {}, options, prompts=["a"] * num_prompts)


def test_whole_response_is_charged_with_its_usage(current: list[tuple[int, ...]]) -> None:
    Tally(generation(2)).read(
        {"num_input_tokens": [5, 5, 7, 7], "num_cached_tokens": [4, 4, 2, 2], "num_output_tokens": [1, 2, 3, 4]}
    )
    Tally(generation()).read({"num_input_tokens": [5, 5], "num_output_tokens": [1, 2]})
    Tally(TextRequest("m", "id", "embeddings", {"text": ["a", "b"]}, [])).read({"num_input_tokens": [5, 6]})
    Tally(generation(tokenize_only=True)).read({"num_input_tokens": [5]})
    Tally(generation(1)).read({"text_output": ["a"]})
    assert current == [(12, 10, 6), (5, 3, 0), (11, 0, 0)]


def test_stream_is_charged_as_it_comes(current: list[tuple[int, ...]]) -> None:
    tally = Tally(generation(1))
    tally.read({"num_input_tokens": [5, 5], "token_ids": ["[1]", ""]})
    tally.read({"token_ids": ["[2, 3]", "[4]"]})
    last = {"num_input_tokens": [5, 5], "num_cached_tokens": [2, 2], "num_output_tokens": [4, 1]}
    tally.read({**last, "token_ids": ["[5]", ""]})
    assert current == [(5, 1, 0), (0, 3, 0), (0, 1, 2)]
