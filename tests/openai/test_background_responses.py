# SPDX-License-Identifier: Apache-2.0
"""Responses in the background, and those that their client left, by the real `openai` client."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread, num_running, wait_until

ASKED: dict[str, Any] = {"model": "demo", "max_output_tokens": 12, "temperature": 0, "input": "How can you be"}
SLOW: dict[str, Any] = {"model": "slow", "temperature": 0, "input": "one", "max_output_tokens": 8}
"""A second's work."""
LONG: dict[str, Any] = {**SLOW, "max_output_tokens": 100}


def ended(client: openai.OpenAI, name: str) -> Any:
    wait_until(lambda: client.responses.retrieve(name).status not in ("queued", "in_progress"))
    return client.responses.retrieve(name)


def wait_for(client: openai.OpenAI, name: str) -> Any:
    """A response that is kept soon."""
    url, headers = f"{client.base_url}responses/{name}", client.auth_headers
    wait_until(lambda: httpx.get(url, headers=headers).status_code == 200)
    return client.responses.retrieve(name)


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


@pytest.mark.parametrize("model", ["demo", "tiny"], ids=["streams", "has no stream door"])
def test_a_response_in_the_background_is_the_one_that_a_client_waits_for(client: openai.OpenAI, model: str) -> None:
    asked = {**ASKED, "model": model}
    waited = client.responses.create(**asked)
    made = client.responses.create(background=True, **asked)
    assert (made.status, made.background, made.output, made.store) == ("queued", True, [], True)
    found = ended(client, made.id)
    assert (found.status, found.output_text, found.usage) == (waited.status, waited.output_text, waited.usage)
    assert found.created_at == made.created_at
    again = client.responses.create(previous_response_id=made.id, **asked)
    assert again.usage is not None
    assert waited.usage is not None
    assert again.usage.input_tokens > waited.usage.input_tokens


@pytest.mark.full
def test_one_that_runs_is_cancelled(client: openai.OpenAI, triton: TritonServer) -> None:
    made = client.responses.create(background=True, **LONG)
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="previous_response_id names a response that is in_progress"):
        client.responses.create(previous_response_id=made.id, **ASKED)
    for _ in range(2):
        cancelled = client.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert cancelled.output_text
        assert client.responses.retrieve(made.id) == cancelled
    wait_until(lambda: num_running(triton) == 0)


@pytest.mark.full
def test_one_that_has_ended_stays_and_one_that_a_client_waits_for_is_no_matter(client: openai.OpenAI) -> None:
    made = client.responses.create(background=True, **ASKED)
    assert client.responses.cancel(made.id) == ended(client, made.id) or made.status == "cancelled"
    waited = client.responses.create(**ASKED)
    with pytest.raises(openai.BadRequestError, match="was not made with background true"):
        client.responses.cancel(waited.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.cancel("resp_none")


def test_one_that_is_deleted_is_cancelled(client: openai.OpenAI, triton: TritonServer) -> None:
    made = client.responses.create(background=True, **LONG)
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    client.responses.delete(made.id)
    wait_until(lambda: num_running(triton) == 0)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(made.id)


def test_a_stream_is_followed_left_and_taken_up(client: openai.OpenAI) -> None:
    """It goes on without its client, and each event comes once, during it and behind its end."""
    stream = client.responses.create(background=True, stream=True, **SLOW)
    first = [next(stream) for _ in range(5)]
    stream.close()
    kinds = ["response.created", "response.queued", "response.in_progress"]
    assert [event.type for event in first][:3] == kinds
    name = first[0].response.id  # type: ignore[union-attr]
    rest = list(client.responses.retrieve(name, stream=True, starting_after=4))
    assert numbers([*first, *rest]) == list(range(5 + len(rest)))
    assert rest[-1].type == "response.incomplete"  # by its limit
    assert rest[-1].response.output_text == "".join(
        event.delta for event in [*first, *rest] if event.type == "response.output_text.delta"
    )
    assert list(client.responses.retrieve(name, stream=True)) == [*first, *rest]
    assert list(client.responses.retrieve(name, stream=True, starting_after=len(first) + len(rest))) == []
    assert client.responses.retrieve(name) == rest[-1].response
    plain = client.responses.create(background=True, **ASKED)
    with pytest.raises(openai.BadRequestError, match="made with background and stream true"):
        client.responses.retrieve(plain.id, stream=True)


@pytest.mark.full
def test_a_stream_that_is_cancelled_ends(client: openai.OpenAI) -> None:
    with client.responses.create(background=True, stream=True, **LONG) as stream:
        name = next(stream).response.id  # type: ignore[union-attr]
        client.responses.cancel(name)
        *_, last = stream
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"


@pytest.mark.full
def test_one_that_its_client_left_is_kept_as_far_as_it_had_got(client: openai.OpenAI, triton: TritonServer) -> None:
    for store in (True, False):
        stream = client.responses.create(stream=True, store=store, **LONG)
        seen = next(event for event in stream if event.type == "response.output_text.delta")
        name = seen.item_id.split("_")[1]
        stream.close()
        wait_until(lambda: num_running(triton) == 0)
        if store:
            kept = wait_for(client, f"resp_{name}")
            assert (kept.status, kept.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
            assert kept.incomplete_details is not None
            assert kept.incomplete_details.reason == "client_disconnected"
            assert kept.output_text.startswith(seen.delta)
            client.responses.create(previous_response_id=kept.id, **ASKED)
        else:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(f"resp_{name}")


def test_what_cannot_run_is_refused_at_once_or_fails(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background needs a response that is kept"):
        client.responses.create(background=True, store=False, **ASKED)
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.responses.create(background=True, **{**ASKED, "model": "nothing"})
    made = client.responses.create(background=True, **{**ASKED, "input": "too long " * 5000})
    failed = ended(client, made.id)
    assert failed.status == "failed"
    assert failed.error.code == "invalid_prompt"
    assert "45033 bytes" in failed.error.message


@pytest.mark.full
def test_one_is_its_keys_own_and_counts_for_it(triton: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one concurrent_requests=1\ntwo\n")
    config = GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=tmp_path / "keys")
    with GatewayThread(config) as gateway:
        one, two = (openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        made = one.responses.create(background=True, **LONG)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            two.responses.cancel(made.id)
        with pytest.raises(openai.RateLimitError, match="has 1 requests in flight"):
            one.responses.create(**ASKED)
        assert one.responses.cancel(made.id).status == "cancelled"
        assert one.responses.create(**ASKED).output_text


@pytest.mark.full
def test_a_gateway_that_stops_cancels_what_runs(triton: TritonServer) -> None:
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, max_stored_responses=2)) as gateway:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        made = client.responses.create(background=True, **LONG)
        wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
        with pytest.raises(openai.RateLimitError, match="1 responses run in the background, as many as may"):
            client.responses.create(background=True, **LONG)
    wait_until(lambda: num_running(triton) == 0)
