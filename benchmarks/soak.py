# SPDX-License-Identifier: Apache-2.0
"""Requests of all kinds against the real server, and the memory of its processes: `make soak`.

16 clients send, in an order that a seed gives: greedy and sampled requests of many lengths, requests of several
prompts, streams, streams that are closed after their first event, gRPC requests that are cancelled, and requests that
are refused. The resident memory (RSS) of the server and of each model's stub is sampled; the first half of the requests
warms them up. Exit status 1:

- a response is lost, or is not what its kind expects;
- the response to one prompt, requested before and after, has changed;
- a request is still in flight at the end;
- a process grew after the warm-up by more than `ALLOWED_KIB` and `ALLOWED_BYTES_PER_REQUEST` for every request.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
import psutil
import tritonclient.grpc as grpcclient
from folders import make_folder
from prometheus_client.parser import text_string_to_metric_families

from hf_triton.testing import TritonServer, build_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 16
TIMEOUT_S = 60.0
CANARY = {"text_input": "The canary sings", "max_new_tokens": 16}
MAX_CACHE_TOKENS = 4096  # a KV cache that the prefix cache fills within the warm-up

ALLOWED_KIB = 4096
"""Single steps of up to some MiB were seen in 1,000 requests, up and down."""
ALLOWED_BYTES_PER_REQUEST = 512
"""A leak never ends, and leaks a request's Python objects and strings, some KiB: 20,000 requests show every leak of
1 KiB per request. The second 10,000 of 20,000 took 2.2 and 4.6 MiB, less with every thousand; a run of a few thousand
fails, because the heap and oneDNN's code for new sizes still grow then.
"""

Kind = Callable[["Client", random.Random], None]


class WrongAnswerError(Exception):
    """A response is not what its kind of request expects."""


class Client:
    """One client's kept-alive HTTP connection, and its gRPC channel."""

    def __init__(self, server: TritonServer) -> None:
        self._http = http.client.HTTPConnection(server.host, server.http_port, timeout=TIMEOUT_S)
        self._grpc = grpcclient.InferenceServerClient(server.grpc_url)

    def close(self) -> None:
        """Close the connections: an open one delays the server's exit."""
        self._http.close()
        self._grpc.close()

    def post(self, path: str, body: object) -> tuple[int, bytes]:
        self._http.request("POST", f"/v2/models/{path}", json.dumps(body), {"Content-Type": "application/json"})
        with self._http.getresponse() as answer:
            return answer.status, answer.read()

    def leave(self, path: str, body: object) -> None:
        """Read the first line of the response and close the connection."""
        self._http.request("POST", f"/v2/models/{path}", json.dumps(body), {"Content-Type": "application/json"})
        with self._http.getresponse() as answer:
            line = answer.readline()
        self._http.close()  # the next request opens it again
        if not line.startswith(b"data: "):
            raise WrongAnswerError(f"no event: {line[:200]!r}")

    def cancel(self, text: str, num_tokens: int, after_s: float) -> None:
        """Send over gRPC, and cancel; the call has to end."""
        is_over = threading.Event()
        tensor = grpcclient.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
        handle = self._grpc.async_infer(
            "plain", [tensor], lambda result, error: is_over.set(), parameters={"max_new_tokens": num_tokens}
        )
        time.sleep(after_s)
        handle.cancel()
        if not is_over.wait(TIMEOUT_S):
            raise WrongAnswerError("a cancelled call did not end")


# --- kinds of requests -----------------------------------------------------------------------------------------------


def expect(answer: tuple[int, bytes], status: int = 200) -> bytes:
    if answer[0] != status:
        raise WrongAnswerError(f"status {answer[0]}, not {status}: {answer[1][:200]!r}")
    return answer[1]


def any_text(source: random.Random) -> str:
    return "".join(source.choices("abcdefgh ijklmnop", k=source.randrange(1, 60)))


def greedy(client: Client, source: random.Random) -> None:
    body = {"text_input": any_text(source), "max_new_tokens": source.randrange(1, 40)}
    json.loads(expect(client.post("plain/generate", body)))["text_output"]


def sampled(client: Client, source: random.Random) -> None:
    parameters = {"temperature": source.uniform(0.1, 2), "top_p": source.uniform(0.1, 1), "top_k": 50, "seed": 7}
    body = {"text_input": any_text(source), "max_new_tokens": source.randrange(1, 40), **parameters}
    json.loads(expect(client.post("plain/generate", body)))["text_output"]


def several(client: Client, source: random.Random) -> None:
    texts = [any_text(source) for _ in range(source.randrange(2, 9))]
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    body = {"inputs": [tensor], "parameters": {"max_new_tokens": 8}}
    [output] = json.loads(expect(client.post("plain/infer", body)))["outputs"]
    if len(output["data"]) != len(texts):
        raise WrongAnswerError(f"{len(output['data'])} outputs for {len(texts)} prompts")


def stream(client: Client, source: random.Random) -> None:
    body = {"text_input": any_text(source), "max_new_tokens": source.randrange(1, 40)}
    content = expect(client.post("streamed/generate_stream", body))
    if b"text_output" not in content or b'"error"' in content:
        raise WrongAnswerError(f"no stream: {content[:200]!r}")


def left_stream(client: Client, source: random.Random) -> None:
    client.leave("streamed/generate_stream", {"text_input": any_text(source), "max_new_tokens": 100})


def cancelled(client: Client, source: random.Random) -> None:
    client.cancel(any_text(source), 100, source.uniform(0, 0.05))


def refused(client: Client, source: random.Random) -> None:
    wrong = source.choice([{"temperature": -1}, {"max_new_tokens": 100_000}, {"no_such_parameter": 1}])
    expect(client.post("plain/generate", {"text_input": any_text(source), **wrong}), 400)


def broken(client: Client, source: random.Random) -> None:
    expect(client.post("plain/generate", {"no_text": any_text(source)}), 400)


SHARES: dict[Kind, int] = {
    greedy: 30,
    sampled: 20,
    several: 10,
    stream: 15,
    left_stream: 5,
    cancelled: 5,
    refused: 10,
    broken: 5,
}
"""How many of a hundred requests."""


# --- the run ---------------------------------------------------------------------------------------------------------


class Soak:
    """Sends requests of all kinds and counts their outcomes."""

    def __init__(self, server: TritonServer, seed: int) -> None:
        self._server = server
        self._seed = seed
        self._numbers = itertools.count()
        self.ends: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def send(self, count: int) -> None:
        """Send `count` requests, `WIDTH` at a time, and wait for them."""
        numbers = iter(list(itertools.islice(self._numbers, count)))
        with ThreadPoolExecutor(WIDTH) as pool:
            for client in [pool.submit(self._ask, numbers) for _ in range(WIDTH)]:
                client.result()

    def _ask(self, numbers: itertools.chain[int]) -> None:
        client = Client(self._server)
        try:
            for number in numbers:
                source = random.Random(self._seed * 1_000_003 + number)
                [kind] = source.choices(list(SHARES), list(SHARES.values()))
                try:
                    kind(client, source)
                    self.ends[kind.__name__] += 1
                except (WrongAnswerError, OSError, http.client.HTTPException, ValueError, LookupError) as error:
                    self.errors[f"{kind.__name__}: {type(error).__name__}: {error}"] += 1
                    client.close()
                    client = Client(self._server)
        finally:
            client.close()


def resident_kib(server: TritonServer) -> dict[str, int]:
    """RSS of the server and its models' stubs, by name."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    sizes = {"server": process.memory_info().rss // 1024}
    for stub in process.children():
        # triton_python_backend_stub MODEL_PY SHM_REGION ...: the folder's name is in the path
        [path] = [word for word in stub.cmdline() if word.endswith("model.py")]
        sizes[f"stub {Path(path).parents[1].name}"] = stub.memory_info().rss // 1024
    return sizes


def in_work(server: TritonServer) -> float:
    """Requests in flight and running sequences, of all models."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    names = ("hf_triton_requests_in_flight", "hf_triton_prompts_waiting", "hf_triton_rows_running")
    return sum(sample.value for family in families for sample in family.samples if sample.name in names)


def comes_to_rest(server: TritonServer, timeout_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while in_work(server) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return not in_work(server)


def sing(server: TritonServer) -> str:
    client = Client(server)
    try:
        return str(json.loads(expect(client.post("plain/generate", CANARY)))["text_output"])
    finally:
        client.close()


def build_repository(scratch: Path) -> Path:
    """`plain` answers with one response, `streamed` with several."""
    checkpoint = build_tiny_checkpoint(scratch / "checkpoint", "llama", eos_token_id=None)
    repository = scratch / "repository"
    make_folder(repository, "plain", checkpoint, max_cache_tokens=MAX_CACHE_TOKENS)
    decoupled = "model_transaction_policy { decoupled: true }"
    make_folder(repository, "streamed", checkpoint, decoupled, max_cache_tokens=MAX_CACHE_TOKENS, stream="true")
    return repository


def judge(samples: list[dict[str, int]], num_requests: int, allowed_kib: int) -> list[str]:
    """A sentence for each process that grew too much between the first and the last sample."""
    allowed_kib += ALLOWED_BYTES_PER_REQUEST * num_requests // 1024
    grown = {name: samples[-1].get(name, 0) - size for name, size in samples[0].items()}
    return [
        f"{name} grew by {kib:,} KiB in {num_requests:,} requests; {allowed_kib:,} are allowed"
        for name, kib in grown.items()
        if kib > allowed_kib
    ]


@click.command()
@click.option("--requests", default=20_000, show_default=True, help="How many requests to send.")
@click.option("--samples", default=20, show_default=True, help="How often to sample the memory.")
@click.option(
    "--allowed-kib", default=ALLOWED_KIB, show_default=True, help="Growth that is no leak; more in a short run."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for soak.json.")
def main(requests: int, samples: int, allowed_kib: int, seed: int, out: Path | None) -> None:
    """Send, and print the memory of the processes."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = build_repository(Path(scratch))
        with TritonServer(repository, environment={"OMP_NUM_THREADS": "1"}, exit_on_error=True) as server:
            before, soak, sizes, started_s = sing(server), Soak(server, seed), [resident_kib(server)], time.monotonic()
            names = list(sizes[0])
            print(f"{'requests':>10}" + "".join(f"{name + ' KiB':>22}" for name in names) + f"{'errors':>10}")
            for number in range(samples + 1):
                if number:
                    soak.send(requests // samples)
                    sizes.append(resident_kib(server))
                row = "".join(f"{sizes[-1].get(name, 0):>22,}" for name in names)
                print(f"{number * (requests // samples):>10,}{row}{soak.errors.total():>10}", flush=True)
            is_at_rest, after, wall_s = comes_to_rest(server), sing(server), time.monotonic() - started_s
    warm = samples // 2
    faults = [f"{count} x {error}" for error, count in soak.errors.items()]
    faults += judge(sizes[warm:], requests // samples * (samples - warm), allowed_kib)
    faults += [] if is_at_rest else ["something is still in work"]
    faults += [] if before == after else ["the canary's answer has changed"]
    print(f"{soak.ends.total():,} requests in {wall_s:.0f} s, load average {os.getloadavg()[0]:.1f}: {dict(soak.ends)}")
    for name in names:
        start, warmed, end = sizes[0][name], sizes[warm][name], sizes[-1].get(name, 0)
        print(f"{name}: {start:,} KiB at the start, {warmed:,} after the warm-up, {end:,} at the end")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        content = {"ends": soak.ends, "wall_s": wall_s, "load average": os.getloadavg(), "KiB": sizes, "faults": faults}
        (out / "soak.json").write_text(json.dumps(content, indent=1))
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
