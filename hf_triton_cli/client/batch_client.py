# SPDX-License-Identifier: Apache-2.0
"""Asks a gateway the requests of a batch: several at a time, their results in order, what is only busy again."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final, Self

import httpx

from hf_triton.errors import ServerError
from hf_triton_cli.client.batch_file import BatchRequest

BUSY: Final = (429, 502, 503)
"""Statuses of a gateway, or of a proxy in front of it, that may answer later."""
REFUSED: Final = (401, 403)
"""Statuses that every request would get."""
WAITS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Waits before a request is sent again; `Retry-After` may make them longer, up to the last one."""
JSON: Final = {"Content-Type": "application/json"}
LOCAL: Final = ("localhost", "127.0.0.1", "::1")
"""Hosts that no proxy of the environment stands before."""
NUM_AHEAD: Final = 8
"""Requests that may be sent, by those in flight, before the first of them has its result: one that takes long does not
hold up the others, and the results that wait for it fit into the memory."""

Result = dict[str, Any]


class BatchClient:
    """Asks one gateway. A context manager, which closes its connections; belongs to the running event loop.

    Without `model`, each request is for the one that it names.
    """

    def __init__(self, url: str, key: str | None, model: str | None, concurrency: int, timeout_s: float) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            limits=limits,
            timeout=timeout,
            trust_env=httpx.URL(url).host not in LOCAL,
            verify=httpx.create_ssl_context(),  # by SSL_CERT_FILE, if it is set, for a local gateway too
        )
        self._url = url
        self._model = model
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Raise a ServerError if no gateway answers."""
        try:
            await self._client.get("/health/live", timeout=10.0)
        except httpx.RequestError as error:
            raise self._unreachable(error) from None

    async def results(self, requests: Iterable[BatchRequest]) -> AsyncGenerator[Result]:
        """The result of each request, in order.

        Raises:
            ServerError: The gateway cannot be reached, or refuses the key.
        """
        asked: deque[asyncio.Task[Result]] = deque()
        try:
            for request in requests:
                while asked and (asked[0].done() or len(asked) >= NUM_AHEAD * self._concurrency):
                    yield await asked.popleft()
                asked.append(asyncio.create_task(self._ask(request)))
                await asyncio.sleep(0)
            while asked:
                yield await asked.popleft()
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, request: BatchRequest) -> Result:
        result: Result = {**request.names}
        body = request.body if self._model is None else {**request.body, "model": self._model}
        async with self._places:
            try:
                response = await self._post(request.url, body)
            except httpx.TimeoutException:
                error = {"code": "timeout", "message": "the request was not answered in time (--timeout-s)"}
                return {**result, "response": None, "error": error}
        answer = {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id"),
            "body": _body_of(response),
        }
        return {**result, "response": answer, "error": None}

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer to a request, which is sent again while the gateway is busy or cannot be reached."""
        content = json.dumps(body).encode()
        for wait_s in (*WAITS_S, None):
            try:
                response = await self._client.post(path, content=content, headers=JSON)
            except httpx.RequestError as error:
                if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
                    raise
                if wait_s is None:
                    raise self._unreachable(error) from None
                await asyncio.sleep(wait_s)
            else:
                if response.status_code in REFUSED:
                    raise ServerError("restricted", f"the gateway at {self._url} refuses the key: set OPENAI_API_KEY")
                if response.status_code not in BUSY:
                    return response
                if wait_s is None:
                    if _is_down(response):
                        raise self._down()
                    return response
                await asyncio.sleep(min(max(wait_s, _retry_after_s(response)), WAITS_S[-1]))
        raise AssertionError("the last try returns or raises")

    def _unreachable(self, error: httpx.RequestError) -> ServerError:
        reason = tls_reason(error)
        sentence = f"no gateway answers at {self._url}{reason}: start one with `hf-triton serve`, or name it with --url"
        return ServerError("server_unreachable", sentence)

    def _down(self) -> ServerError:
        sentence = f"the gateway at {self._url} reaches no server: when it does, the same command goes on"
        return ServerError("server_unreachable", sentence)


def tls_reason(error: BaseException | None) -> str:
    """Why the TLS of a connection failed, for a sentence; empty if it did not."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f" (its certificate is not trusted: {error.verify_message}; SSL_CERT_FILE names authorities)"
    return "" if error is None else " (it speaks no TLS there: http://?)"


def _is_down(response: httpx.Response) -> bool:
    """Whether a busy answer says nothing of its request: no server is behind what answered."""
    body = _body_of(response)
    error = body.get("error") if isinstance(body, dict) else None
    return response.status_code != 429 and (not isinstance(error, dict) or error.get("code") == "unavailable")


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("retry-after", 0))
    except ValueError:
        return 0.0


def _body_of(response: httpx.Response) -> Any:
    """Its JSON; a proxy's page stays text."""
    try:
        return response.json()
    except ValueError:
        return response.text
