# SPDX-License-Identifier: Apache-2.0
"""Sequences end early at stop strings, deadlines and cancellation."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from hf_triton.testing import TritonServer
from tests.support.client import Reply, infer
from tests.support.gateway import num_running, wait_until
from tests.support.slow_model import STEP_S
from tests.support.standard import StandardServer

PROMPT, OTHER_PROMPT = "The canary sings", "Where does the river go"
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def server(standard: StandardServer) -> TritonServer:
    return standard.serve("plain", "slow")


@pytest.fixture
def client(server: TritonServer) -> Iterator[Any]:
    client = grpcclient.InferenceServerClient(server.grpc_url)
    yield client
    client.close()


def texts_of(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.body
    [output] = [each for each in reply.json()["outputs"] if each["name"] == "text_output"]
    return list(output["data"])


def write(server: TritonServer, *prompts: str, model: str = "plain", **parameters: object) -> list[str]:
    return texts_of(infer(server, model, list(prompts), parameters={"max_new_tokens": NUM_TOKENS, **parameters}))


def text_tensor(name: str, *texts: str, is_batched: bool = False) -> Any:
    array = np.array([text.encode() for text in texts], dtype=np.object_)
    array = array.reshape(-1, 1) if is_batched else array
    tensor = grpcclient.InferInput(name, list(array.shape), "BYTES")
    tensor.set_data_from_numpy(array)
    return tensor


def before(text: str, *stops: str) -> str:
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def test_infer_takes_stop_strings(server: TritonServer) -> None:
    [whole] = write(server, PROMPT)
    stops = [whole[25:30], whole[10:13], "never written"]
    assert write(server, PROMPT, stop_strings=json.dumps(stops)) == [before(whole, *stops)]


@pytest.mark.full
def test_every_row_has_its_own_stop_string(server: TritonServer, standard: StandardServer, client: Any) -> None:
    standard.serve("typed")
    wholes = write(server, PROMPT, OTHER_PROMPT, PROMPT)
    stops = [wholes[0][20:24], wholes[1][5:8], "never written"]
    rows = {"text_input": (PROMPT, OTHER_PROMPT, PROMPT), "stop_strings": stops}
    inputs = [text_tensor(name, *texts, is_batched=True) for name, texts in rows.items()]
    result = client.infer("typed", inputs, parameters={"max_new_tokens": NUM_TOKENS})
    expected = [before(whole, stop) for whole, stop in zip(wholes, stops, strict=True)]
    assert [text.decode() for [text] in result.as_numpy("text_output")] == expected


@pytest.fixture(scope="module")
def slow_text(server: TritonServer) -> str:
    """What the slow model would write, by the fast one: they have one checkpoint."""
    return write(server, PROMPT)[0]


def test_deadline_ends_a_sequence_with_its_tokens_so_far(server: TritonServer, slow_text: str) -> None:
    [text] = write(server, PROMPT, model="slow", max_time=NUM_TOKENS * STEP_S / 2)
    assert 0 < len(text) < len(slow_text)
    assert slow_text.startswith(text.rstrip("\ufffd"))


def test_client_timeout_ends_a_sequence(server: TritonServer, client: Any, slow_text: str) -> None:
    result = client.infer(
        "slow",
        [text_tensor("text_input", PROMPT)],
        parameters={"max_new_tokens": NUM_TOKENS},
        timeout=int(NUM_TOKENS * STEP_S / 2 * 1e6),
    )
    [text] = [each.decode() for each in result.as_numpy("text_output")]
    assert 0 < len(text) < len(slow_text)


def test_request_queued_past_its_deadline_is_refused(server: TritonServer, slow_text: str) -> None:
    wait_until(lambda: num_running(server) == 0)  # a moment after an answer it still is one
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(write, server, PROMPT, model="slow")
        wait_until(lambda: num_running(server) > 0)  # it has the only row now
        reply = infer(server, "slow", [PROMPT], parameters={"max_time": 0.5})
        assert (reply.status, reply.error.split(":")[0]) == (503, "deadline_exceeded")
        assert running.result() == [slow_text]


def test_cancelled_request_frees_its_slot(server: TritonServer, client: Any) -> None:
    ends: list[InferenceServerException | None] = []
    num_tokens = 230  # 23 s
    wait_until(lambda: num_running(server) == 0)
    handle = client.async_infer(
        "slow",
        [text_tensor("text_input", PROMPT)],
        lambda result, error: ends.append(error),
        parameters={"max_new_tokens": num_tokens},
    )
    wait_until(lambda: num_running(server) > 0)
    handle.cancel()
    started = time.monotonic()
    assert infer(server, "slow", [PROMPT], parameters={"max_new_tokens": 4}).status == 200
    assert time.monotonic() - started < num_tokens * STEP_S / 2
    assert ends
    assert "CANCELLED" in str(ends[0])
