# SPDX-License-Identifier: Apache-2.0
"""Clients that leave a server with little shared memory; run as a program in a mount namespace of its own.

`python -m tests.support.leaving_clients FOLDER NUMBER FILLED` prints, as JSON, whether the server lives after so many
clients have left, the statuses of those that stayed, and how many were never answered. With FILLED 1 another process
takes all of `/dev/shm` and gives it back, again and again.
"""

import collections
import http.client
import json
import os
import random
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from hf_triton.model_process import free_shared_memory
from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread
from tests.support.paths import ROOT

SHARED_MEMORY: Final = Path("/dev/shm")
LONGEST_S: Final = 240.0
DECOUPLED: Final = "model_transaction_policy { decoupled: true }"
TEXT: Final = "The canary sings"
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "whole": {"model": "text", "prompt": [TEXT] * 4, "logprobs": 5},
    "streamed": {"model": "text", "prompt": TEXT, "stream": True},  # by the door
    "decoupled": {"model": "direct", "prompt": TEXT, "stream": True},
    "decoupled, whole": {"model": "direct", "prompt": TEXT},
    "refused": {"model": "text", "prompt": TEXT * 2000},
}


def make_repository(root: Path) -> Path:
    checkpoint = build_tiny_checkpoint(root / "checkpoint", "llama", eos_token_id=None)
    setting = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}'
    for name, config in (("text", ""), ("direct", DECOUPLED)):
        folder = root / "repository" / name
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text("from hf_triton import TritonPythonModel  # noqa: F401\n")
        lines = ['backend: "python"', config, setting.format("huggingface_model", checkpoint)]
        (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")
    shutil.copytree(ROOT / "stream_door", root / "repository" / "text_stream")
    return root / "repository"


class Crowd:
    """Clients of one server, until so many have left."""

    def __init__(self, server: TritonServer, url: str, wanted: int) -> None:
        self.statuses: collections.Counter[str] = collections.Counter()
        self.num_left = self.num_unanswered = 0
        self._server = server
        self._address = url.removeprefix("http://")
        self._wanted = wanted
        self._ends_s = time.monotonic() + LONGEST_S
        self._lock = threading.Lock()

    def run(self, *, is_filled: bool) -> None:
        clients = [self._leave] * 7 + [self._stay] * 3 + [self._fill] * is_filled
        threads = [threading.Thread(target=client, args=(random.Random(seed),)) for seed, client in enumerate(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _goes_on(self) -> bool:
        return self.num_left < self._wanted and self._server.is_running() and time.monotonic() < self._ends_s

    def _note_left(self) -> None:
        with self._lock:
            self.num_left += 1

    def _leave(self, chance: random.Random) -> None:
        """POST to the gateway, and leave before the answer comes."""
        host, _, port = self._address.partition(":")
        while self._goes_on():
            body = json.dumps({"max_tokens": 12, **chance.choice(list(REQUESTS.values()))}).encode()
            with socket.create_connection((host, int(port))) as connected:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
                connected.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
                connected.settimeout(chance.uniform(0.005, 0.08))
                try:
                    connected.recv(1)
                except TimeoutError:
                    self._note_left()

    def _stay(self, chance: random.Random) -> None:
        while self._goes_on():
            kind = chance.choice(list(REQUESTS))
            connected = http.client.HTTPConnection(self._address, timeout=LONGEST_S)
            try:
                body = json.dumps({"max_tokens": 12, **REQUESTS[kind]})
                connected.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                answer = connected.getresponse()
                text = answer.read().decode()
                code = next((code for code in ("out_of_memory", "unavailable") if code in text), "")
                with self._lock:
                    self.statuses[f"{answer.status} {code}".strip()] += 1
            except TimeoutError:
                self.num_unanswered += 1
            finally:
                connected.close()

    def _fill(self, chance: random.Random) -> None:
        filler = SHARED_MEMORY / "filler"
        while self._goes_on():
            with filler.open("wb") as file:
                left = chance.choice([0, 4096, 200_000, 1_000_000, 3_000_000, 30_000_000])
                if (size := free_shared_memory() - left) > 0:
                    try:
                        os.posix_fallocate(file.fileno(), 0, size)
                    except OSError:  # it was taken meanwhile
                        continue
                time.sleep(chance.uniform(0.3, 2))
                filler.unlink()
        filler.unlink(missing_ok=True)


def main(root: Path, wanted: int, *, is_filled: bool) -> None:
    with TritonServer(make_repository(root), ready_timeout_s=280) as server:
        with GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as gateway:
            crowd = Crowd(server, gateway.url, wanted)
            crowd.run(is_filled=is_filled)
        print(
            json.dumps(
                {
                    "lives": server.is_running(),
                    "left": crowd.num_left,
                    "unanswered": crowd.num_unanswered,
                    "statuses": crowd.statuses,
                    "log": server.log_tail(10_000),
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), is_filled=sys.argv[3] == "1")
