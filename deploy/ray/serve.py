# SPDX-License-Identifier: Apache-2.0
"""Ray Serve: replicas of a model behind one address, each a `hf-triton serve` to whose gateway requests are passed.

    serve run deploy.ray.serve:app model=Qwen/Qwen3-0.6B replicas=2

Knows HTTP, and nothing of the API.
"""

import asyncio
import collections
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, field_validator
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hf_triton.server import describe_status, end_with_parent, free_ports

PORTS: Final = ("--http-port", "--grpc-port", "--metrics-port", "--openai-port")
OF_A_CONNECTION: Final = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
OF_RAY: Final = {b"date", b"server", b"x-request-id"}
"""Headers that Ray gives each response itself."""


class Args(BaseModel):
    """What is served, and by how many replicas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    options: str = ""  # of `hf-triton serve`, as a shell splits them
    replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None
    max_ongoing_requests: PositiveInt = 128  # in one replica; more wait in Ray
    cpus: NonNegativeFloat = 1
    gpus: NonNegativeFloat = 0

    @field_validator("options")
    @classmethod
    def _leave_ports(cls, options: str) -> str:
        for word in shlex.split(options):
            if word.partition("=")[0] in {*PORTS, "--host", "--no-openai"}:
                raise ValueError(f"{word} is the replica's own: leave it out")
        return options


@serve.deployment(health_check_period_s=5, graceful_shutdown_timeout_s=120)
class Replica:
    """One `hf-triton serve`. If it ends, the replica ends too, so that Ray replaces it at once."""

    async def __init__(self, args: Args) -> None:
        ports = free_ports(len(PORTS))
        self._scratch = tempfile.TemporaryDirectory(prefix="hf_triton_replica_")
        lock = Path(self._scratch.name) / "admin-key"  # locks what changes the server; clients do not get it
        lock.write_text(secrets.token_urlsafe())
        options = [
            f"--admin-key-file={lock}",
            *(f"{name}={port}" for name, port in zip(PORTS, ports, strict=True)),
            *shlex.split(args.options),
        ]
        self._is_needed = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hf_triton_cli", "serve", args.model, "--exit-on-error", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl+C reaches Ray alone
            preexec_fn=end_with_parent,
        )
        self._tail: collections.deque[str] = collections.deque(maxlen=20)
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()
        # A new connection each time: one that the gateway closes meanwhile would fail a request.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self._url = httpx.URL(f"http://127.0.0.1:{ports[-1]}/health")
        while not await self._is_ready():
            await asyncio.sleep(0.2)
        self._is_needed = True

    def _follow(self) -> None:
        for line in self._process.stdout or ():
            print(line, end="", flush=True)  # to Ray's log of the replica
            self._tail.append(line)
        if self._is_needed:
            os._exit(1)

    async def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            self._follower.join(1)
            status = describe_status(self._process.returncode)
            raise RuntimeError(f"hf-triton serve exited {status}:\n{''.join(self._tail)}")
        try:
            return (await self._client.get(self._url, timeout=10)).is_success
        except httpx.TransportError:
            return False

    async def check_health(self) -> None:
        """Ray asks this, and replaces a replica that fails three times."""
        if not await self._is_ready():
            raise RuntimeError("Triton is not ready")

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its response back as it comes; a client's disconnect ends both."""
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        passed = self._client.build_request(
            request.method,
            self._url.copy_with(raw_path=request.scope["raw_path"] + b"?" + request.scope["query_string"]),
            headers=_without(OF_A_CONNECTION, request.headers.raw),
            content=request.stream() if has_body else None,
        )
        response = await self._client.send(passed, stream=True)
        answer = StreamingResponse(_pieces(response), response.status_code)
        answer.raw_headers = _without(OF_A_CONNECTION | OF_RAY, response.headers.raw)
        return answer

    def __del__(self) -> None:
        """Ray calls this when the requests in flight are done."""
        self._is_needed = False
        self._process.terminate()
        self._process.wait()


def _without(names: set[bytes], headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in names]


async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_raw():
            yield piece
    finally:
        await response.aclose()


def app(args: Args) -> serve.Application:  # Ray reads the annotation: nothing is imported from __future__ here
    """The application; `serve run` and config files give its arguments by name."""
    path = Path(args.model).expanduser()
    model = str(path.resolve()) if path.exists() else args.model  # replicas run in folders of their own
    scale: dict[str, object] = {"num_replicas": args.replicas}
    if args.max_replicas is not None:
        bounds = {"min_replicas": args.replicas, "max_replicas": args.max_replicas}
        scale = {"autoscaling_config": {**bounds, "target_ongoing_requests": args.max_ongoing_requests / 2}}
    return Replica.options(
        **scale,
        max_ongoing_requests=args.max_ongoing_requests,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
    ).bind(args.model_copy(update={"model": model}))
