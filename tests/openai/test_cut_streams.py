# SPDX-License-Identifier: Apache-2.0
"""Clients that leave in the middle: no sequence stays behind, and other answers are the same as before."""

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai

from hf_triton.testing import TritonServer
from tests.support.gateway import GatewayThread, num_running, wait_until

WIDTH = 16
PATHS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}]},
    "/v1/completions": {"prompt": "Hello", "n": 2, "temperature": 1},
}


def cut(gateway: GatewayThread, number: int) -> int:
    """Send a request, read at most a random number of bytes or wait a random time, and leave."""
    source = random.Random(number)
    path = source.choice(list(PATHS))
    is_stream = source.random() < 0.75
    body = json.dumps({"model": "demo", "stream": is_stream, "max_tokens": 60, **PATHS[path]})
    fields = f"Host: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    sent = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n{body}".encode()
    if source.random() < 0.1:  # not even the request is whole
        sent = sent[: source.randrange(len(sent))]
    num_bytes = 0
    with socket.create_connection(("127.0.0.1", gateway.port), 30) as connection:
        connection.sendall(sent)
        if sent.endswith(b"}") and source.random() < 0.7:
            limit = source.randrange(1, 4000)
            while num_bytes < limit and (got := connection.recv(limit - num_bytes)):
                num_bytes += len(got)
        else:
            time.sleep(source.uniform(0, 0.05))
    return num_bytes


def unharmed(client: openai.OpenAI) -> list[str]:
    """A stream's deltas, sampled with a seed."""
    stream = client.completions.create(
        model="demo", prompt="The model", max_tokens=40, seed=7, temperature=1, stream=True
    )
    return [chunk.choices[0].text for chunk in stream]


def test_nothing_runs_after_streams_were_cut(
    gateway: GatewayThread, client: openai.OpenAI, triton: TritonServer
) -> None:
    count = 100
    before = "".join(unharmed(client))
    with ThreadPoolExecutor(WIDTH) as pool:
        cuts = pool.map(lambda number: cut(gateway, number), range(count))
        among = ["".join(unharmed(client)) for _ in range(3)]
        assert sum(num_bytes > 0 for num_bytes in cuts) > count // 4
    assert among == [before] * 3
    wait_until(lambda: num_running(triton) == 0)
    wait_until(lambda: "hf_triton_openai_requests_in_flight 1.0" in httpx.get(f"{gateway.url}/metrics").text)
    assert "".join(unharmed(client)) == before
