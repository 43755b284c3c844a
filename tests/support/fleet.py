# SPDX-License-Identifier: Apache-2.0
"""Three `hf-triton serve` behind HAProxy, and clients whose requests never stop."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hf_triton.server import free_ports
from tests.support.client import Reply, post
from tests.support.haproxy import Front, haproxy
from tests.support.serving import PORTS, Serving, wait_until_gone
from tests.support.traffic import Clients

MODEL: Final = "text"
NAMES: Final = "a", "b", "c"
GATEWAYS: Final = 9000, 9001, 9002
TRITONS: Final = 8000, 8010, 8020
"""The ports of haproxy.cfg."""
EXPLICIT: Final = "--", "--model-control-mode=explicit", "--load-model=*"
NUM_CLIENTS: Final = 8
LENGTHS: Final = (2, 4, 8, 16, 32, 64)
WEIGHTS: Final = (32, 16, 8, 4, 2, 1)
PROMPTS: Final = ("How far is it", "The harbour", "Der Zug fährt")
LIMIT_S: Final = 90.0
"""A request that takes longer is lost."""

Texts = Mapping[str, Mapping[tuple[str, int], str]]
"""By revision, the completion of a prompt with a number of tokens."""


@dataclass
class Replica:
    """A server at ports that stay the same when it is started again."""

    folder: Path
    environment: Mapping[str, str]
    ports: list[int] = field(default_factory=lambda: free_ports(len(PORTS)))

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    def start(self) -> Replica:
        output = self.folder / "output"
        words = [str(self.repository), "--exit-on-error", *EXPLICIT]
        self.serving = Serving(*words, output=output, ports=self.ports, **self.environment)
        return self

    def wait_until_ready(self) -> None:
        self.serving.wait_for("Ctrl+C stops the server")

    def signal(self, number: signal.Signals) -> None:
        for pid in [self.serving.process.pid, *self.serving.descendants()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End it at once, as a machine that is gone."""
        children = self.serving.descendants()
        self.signal(signal.SIGKILL)
        self.serving.process.wait(30)
        wait_until_gone(children)  # one that waits for a core to end on still has its ports

    def stop(self) -> int:
        self.serving.process.terminate()
        return self.serving.process.wait(90)


@dataclass
class Fleet:
    """Servers by name, what stands before them, and the folder with the proxy's log and socket."""

    replicas: Mapping[str, Replica]
    openai: Front
    triton: Front
    folder: Path


@contextlib.contextmanager
def fleet(folder: Path, replicas: Mapping[str, Replica]) -> Iterator[Fleet]:
    """Start servers, and HAProxy before them; stop what still runs."""
    servers: dict[int, int] = {}
    for replica, gateway_port, triton_port in zip(replicas.values(), GATEWAYS, TRITONS, strict=True):
        servers |= {gateway_port: replica.ports[-1], triton_port: replica.ports[0]}
    try:
        for replica in replicas.values():
            replica.start()
        for replica in replicas.values():
            replica.wait_until_ready()
        with haproxy("haproxy.cfg", folder, servers) as ports:
            openai, triton = (Front(f"http://127.0.0.1:{ports[port]}") for port in (8080, 8081))
            yield Fleet(replicas, openai, triton, folder)
    finally:
        for replica in replicas.values():
            if replica.serving.process.poll() is None:
                replica.stop()


class Load(Clients):
    """Clients that send completions, most of them short and a few long, over every door."""

    limit_s = LIMIT_S

    def __init__(self, fleet: Fleet, texts: Texts) -> None:
        super().__init__(NUM_CLIENTS)
        self._fleet, self._texts = fleet, texts
        self._chances = [random.Random(client) for client in range(NUM_CLIENTS)]

    def pause_s(self, client: int) -> float:
        return self._chances[client].expovariate(10)

    def ask(self, client: int) -> str:
        """See the base class: the revision, or a status."""
        chance = self._chances[client]
        prompt, [num_tokens] = chance.choice(PROMPTS), chance.choices(LENGTHS, WEIGHTS)
        text = chance.choice([self._complete, self._stream, self._generate])(prompt, num_tokens)
        names = (name for name, texts in self._texts.items() if texts[prompt, num_tokens] == text)
        return next(names, text)

    def _complete(self, prompt: str, num_tokens: int) -> str:
        reply = self._completions(prompt, num_tokens)
        return reply.json()["choices"][0]["text"] if reply.status == 200 else f"{reply.status}: {reply.body}"

    def _stream(self, prompt: str, num_tokens: int) -> str:
        reply = self._completions(prompt, num_tokens, stream=True)
        if reply.status != 200:
            return f"{reply.status}: {reply.body}"
        *events, end = [line.removeprefix("data: ") for line in reply.body.split("\n") if line]
        if end != "[DONE]":
            return f"no end: {end}"
        return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])

    def _completions(self, prompt: str, num_tokens: int, **fields: object) -> Reply:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **fields}
        return post(self._fleet.openai, "/v1/completions", body, LIMIT_S)

    def _generate(self, prompt: str, num_tokens: int) -> str:
        body = {"text_input": prompt, "max_new_tokens": num_tokens, "exclude_input_in_output": True}
        reply = post(self._fleet.triton, f"/v2/models/{MODEL}/generate", body, LIMIT_S)
        return reply.json()["text_output"] if reply.status == 200 else f"{reply.status}: {reply.body}"

    def wait(self, num_requests: int = 60) -> None:
        """Wait until some more have ended."""
        goal, deadline_s = len(self.outcomes) + num_requests, time.monotonic() + 2 * LIMIT_S
        while len(self.outcomes) < goal:
            assert time.monotonic() < deadline_s, "the clients stand still"
            time.sleep(0.05)
