# SPDX-License-Identifier: Apache-2.0
"""What each API key uses, and where its limits end it. State of one process; belongs to its event loop.

While a request is served, the account of its key is the current one, and tokens are charged to it as they come: a
request is let in if its key has any left, and what it uses beyond them counts in the next period.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_triton.errors import clip
from hf_triton_gateway.chat.answers import json_output
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.triton.triton_messages import Generation, Outputs, TextRequest, base_name

if TYPE_CHECKING:
    from hf_triton_gateway.http.gateway_metrics import Metrics
    from hf_triton_gateway.keys.key_lines import Quota

CACHE_SALT: Final = "cache_salt"
REQUESTS: Final = "requests"
TOKENS: Final = "tokens"
HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in (REQUESTS, TOKENS) for what in ("limit", "remaining", "reset")
)
"""The headers of responses to keys with limits, as OpenAI names them."""
PERIODS_S: Final[Mapping[str, float]] = {
    "requests_per_minute": 60.0,
    "tokens_per_minute": 60.0,
    "tokens_per_day": 24 * 3600.0,
}
"""Limits of an API key over a time, and the time in seconds."""
CONCURRENT_REQUESTS: Final = "concurrent_requests"
CANCEL: Final = "/cancel"
"""What ends so ends a request, and needs no limit left."""
LIMITS: Final = (*PERIODS_S, CONCURRENT_REQUESTS)
"""All limits of an API key."""
CURRENT: Final[ContextVar[Account | None]] = ContextVar("hf_triton_account", default=None)
"""The account of the request that is served; None: keys are not asked for."""


class Window:
    """The use of one limit in periods, each of which begins with a use."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._end_s = 0.0
        self._used = 0

    def use(self, amount: int, limit: int, now_s: float) -> int:
        """Use an amount. Returns what is left of the limit: not above 0 if nothing more may be used."""
        if now_s >= self._end_s:
            num_ended = 1 + int((now_s - self._end_s) // self._period_s)
            self._used = max(0, self._used - num_ended * limit)
            self._end_s = now_s + self._period_s
        self._used += amount
        return limit - self._used

    def wait_s(self, limit: int, now_s: float) -> float:
        """Seconds until something is left."""
        return self._end_s - now_s + max(0, self._used // limit - 1) * self._period_s


class Account:
    """One API key, of which a digest is kept: what it may use, and what it has used."""

    def __init__(self, quota: Quota, metrics: Metrics, key: bytes = b"") -> None:
        self._salt = hashlib.sha256(b"hf_triton cache salt\0" + key).digest()
        self.quota = quota
        self._counts = metrics.of_key(quota.name)
        self._metrics = metrics
        self._windows = {name: Window(period_s) for name, period_s in PERIODS_S.items()}
        self._num_in_flight = 0

    def change(self, quota: Quota) -> None:
        """Have other limits from now on, and the same use."""
        self.quota, self._counts = quota, self._metrics.of_key(quota.name)

    def cache_salt(self, given: str) -> str:
        """The salt of the key's prompts, which are told apart by the client's own; the same in every worker."""
        return hashlib.sha256(self._salt + given.encode(errors="surrogatepass")).hexdigest()

    def refusal(self) -> ApiError | None:
        """Why a request may not be served now; None if it may."""
        now_s = monotonic()
        spent = [
            (window.wait_s(limit, now_s), name, limit)
            for name, limit, window in self._limits()
            if window.use(0, limit, now_s) <= 0
        ]
        if spent:
            wait_s, name, limit = max(spent)
            return self._refused(name, f"has used its {limit} {name.replace('_', ' ')}", math.ceil(wait_s))
        most = self.quota.concurrent_requests
        if most is not None and self._num_in_flight >= most:
            return self._refused(CONCURRENT_REQUESTS, f"has {most} requests in flight, as many as it may have", 1)
        return None

    def _refused(self, limit: str, reason: str, wait_s: int) -> ApiError:
        self._counts.refused[limit].inc()
        message = f"the API key {self.quota.name} {reason}: send the request again in {wait_s} s"
        error = ApiError(429, message, code="rate_limit_exceeded")
        error.headers = {"Retry-After": str(wait_s)}
        return error

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request that is let in."""
        self._counts.requests.inc()
        self._use(REQUESTS, 1)
        with self.in_flight():
            yield

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """What runs for the key, beside its requests."""
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    def charge(self, num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int = 0) -> None:
        """Count tokens of a request; cached ones are among the prompt's, and cost as much."""
        self._counts.prompt_tokens.inc(num_prompt_tokens)
        self._counts.cached_tokens.inc(num_cached_tokens)
        self._counts.completion_tokens.inc(num_completion_tokens)
        self._use(TOKENS, num_prompt_tokens + num_completion_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is left, as ASGI has headers; of two limits of tokens, the one with less left."""
        now_s = monotonic()
        states = [
            (name.partition("_")[0], max(0, window.use(0, limit, now_s)), limit, window.wait_s(limit, now_s))
            for name, limit, window in self._limits()
        ]
        tightest = {kind: state for kind, *state in sorted(states, key=lambda state: state[1], reverse=True)}
        return [
            (f"x-ratelimit-{what}-{kind}".encode(), text.encode())
            for kind, (left, limit, wait_s) in tightest.items()
            for what, text in (("limit", str(limit)), ("remaining", str(left)), ("reset", f"{math.ceil(wait_s)}s"))
        ]

    def _use(self, kind: str, amount: int) -> None:
        now_s = monotonic()
        for name, limit, window in self._limits():
            if name.startswith(kind):
                window.use(amount, limit, now_s)

    def _limits(self) -> list[tuple[str, int, Window]]:
        """The limits over a period that the key has."""
        limits: dict[str, int | None] = {name: getattr(self.quota, name) for name in self._windows}
        return [(name, limit, self._windows[name]) for name, limit in limits.items() if limit is not None]


class QuotaCheck:
    """ASGI middleware that refuses what a key has no limit left for, and counts what it uses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account = CURRENT.get()
        if account is None or scope["type"] != "http" or scope["method"] != "POST" or scope["path"].endswith(CANCEL):
            await self._app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *account.headers()]}
            await send(message)

        if (refusal := account.refusal()) is not None:
            await refusal.response(scope["path"])(scope, receive, send_with_limits)
            return
        with account.request():
            await self._app(scope, receive, send_with_limits)


class Tally:
    """Charges the tokens of one request to Triton to the current account, as its responses come."""

    def __init__(self, request: Generation | TextRequest) -> None:
        self._account, self._num_prompts = CURRENT.get(), 0
        if isinstance(request, Generation):  # whose prompts have several rows each; texts have one
            self._num_prompts = max(1, len(request.prompts))
            if "tokenize_only" in request.options:
                self._account = None
        self._has_prompt = False
        self._num_completion_tokens = 0

    @property
    def counts(self) -> bool:
        """Whether there is an account to charge."""
        return self._account is not None

    def read(self, outputs: Outputs) -> None:
        """Charge what a response has beyond the earlier ones."""
        if self._account is None:
            return
        num_prompt_tokens = 0 if self._has_prompt else self._of_prompts(outputs, "num_input_tokens")
        self._has_prompt |= num_prompt_tokens > 0
        if "num_output_tokens" in outputs:  # of a whole response, or a stream's last
            num_new = sum(outputs["num_output_tokens"]) - self._num_completion_tokens
        else:
            ids = outputs.get("token_ids", [])
            num_new = sum(len(json_output(outputs, "token_ids", index) or ()) for index in range(len(ids)))
        self._num_completion_tokens += num_new
        if num_prompt_tokens or num_new > 0 or "num_cached_tokens" in outputs:
            num_cached_tokens = self._of_prompts(outputs, "num_cached_tokens")
            self._account.charge(num_prompt_tokens, max(0, num_new), num_cached_tokens)

    def _of_prompts(self, outputs: Outputs, name: str) -> int:
        """The sum of an output's counts, in which each completion of a prompt repeats the prompt's."""
        counts = outputs.get(name, [])
        return sum(counts[:: max(1, len(counts) // (self._num_prompts or len(counts) or 1))])


def with_salt(request: Generation) -> Generation:
    """A request that shares cached prefixes with those of the current key alone, if the key has a cache of its own."""
    account = CURRENT.get()
    if account is None or not account.quota.private_cache:
        return request
    salt = account.cache_salt(str(request.sampling.get(CACHE_SALT) or ""))
    return replace(request, sampling={**request.sampling, CACHE_SALT: salt})


def allows_model(name: str) -> bool:
    """Whether the key of the request that is served may use a model; adapters are part of it."""
    account = CURRENT.get()
    return account is None or account.quota.models is None or base_name(name) in account.quota.models


def check_model(name: str) -> None:
    """Refuse a model that the key may not use."""
    if not allows_model(name):
        message = f"the model {clip(name)} does not exist, or this API key may not use it: see GET /v1/models"
        raise ApiError(404, message, param="model", code="model_not_found")


def check_admin() -> None:
    """Refuse what is for an admin's key alone: without a file of keys, a gateway knows no admin."""
    account = CURRENT.get()
    if account is None or not account.quota.admin:
        without = "this gateway has no --api-key-file: start it with one"
        reason = without if account is None else f"{account.quota.name}'s has not"
        message = f"this endpoint is for API keys whose line in the file has admin=true, and {reason}"
        raise ApiError(403, message, code="restricted")
