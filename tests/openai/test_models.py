# SPDX-License-Identifier: Apache-2.0
"""/v1/models, /health, /metrics, /tokenize, and request ids."""

import httpx
import openai
import pytest

from tests.support.gateway import GatewayThread


def test_models_are_listed_without_their_stream_doors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["bare", "batching", "decoupled", "demo", "slow", "tiny"]
    assert client.models.retrieve("demo").object == "model"
    with pytest.raises(openai.NotFoundError, match="'demo_stream' does not exist"):
        client.models.retrieve("demo_stream")


def test_models_tell_their_context_in_vllms_names(client: openai.OpenAI, gateway: GatewayThread) -> None:
    for model in client.models.list():
        told = model.model_dump()
        asked = httpx.post(f"{gateway.url}/tokenize", json={"model": model.id, "prompt": "a"}).json()
        assert told["max_model_len"] == asked["max_model_len"] > 0
        assert "/" not in told["root"], "a path of the host"


def test_health_and_metrics(gateway: GatewayThread, client: openai.OpenAI) -> None:
    client.models.list()
    list(client.completions.create(model="demo", prompt="a", stream=True, max_tokens=2))
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    text = httpx.get(f"{gateway.url}/metrics").text
    assert 'hf_triton_openai_requests_total{endpoint="/v1/models",status="200"}' in text
    assert 'hf_triton_openai_time_to_first_token_seconds_count{endpoint="/v1/completions"}' in text
    assert "hf_triton_openai_requests_in_flight 1.0" in text  # this one


@pytest.mark.parametrize(("sent", "is_kept"), [("abc-1.2", True), ("a b", False), ("", False), ("x" * 200, False)])
def test_request_id_goes_in_and_out(gateway: GatewayThread, sent: str, is_kept: bool) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 1}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers={"x-request-id": sent})
    got = answer.headers["x-request-id"]
    assert (got == sent) is is_kept
    assert answer.json()["id"] == f"cmpl-{got}"
