# SPDX-License-Identifier: Apache-2.0
"""Limits of API keys and what each key uses, at a running gateway."""

import asyncio
import json
import logging
import os
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hf_triton.errors import SettingsError
from hf_triton.testing import TritonServer
from hf_triton_gateway.app import build_app
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.keys.accounts import HEADERS, LIMITS
from tests.support.gateway import GatewayThread, num_running, wait_until
from tests.support.paths import ROOT

pytestmark = pytest.mark.full

GATEWAY_DOCUMENT = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
ADMIN = "sk-admin"
KEYS = f"""
* concurrent_requests=500
{ADMIN} name=admin
sk-ten name=ten requests_per_minute=10
sk-slow name=slow concurrent_requests=1
sk-few name=few tokens_per_minute=20 tokens_per_day=1000
sk-some name=some models=demo,tiny
"""
BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 5}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


@pytest.fixture
def alone(keys: Path) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton="127.0.0.1:1", port=0, api_key_file=keys)) as gateway:
        yield gateway


@pytest.fixture
def gateway(triton: TritonServer, keys: Path) -> Iterator[GatewayThread]:
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=keys)) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def post(gateway: GatewayThread, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(gateway.url + path, json={**BODY, **body}, headers=bearer(key), timeout=60)


def use_up(gateway: GatewayThread, key: str) -> None:
    """Send as many requests as the key has in a minute, together: each waits a second for a Triton."""
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda _: post(gateway, key), range(10)))


def used(gateway: GatewayThread, key: str) -> dict[str, float]:
    """What the metrics say of a key, by metric and limit."""
    text = httpx.get(f"{gateway.url}/metrics", headers=bearer(ADMIN)).text
    assert "sk-" not in text
    return {
        sample.name.removeprefix("hf_triton_openai_key_") + sample.labels.get("limit", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("key") == key and sample.name.endswith("_total")
    }


def test_of_many_requests_at_once_as_many_pass_as_the_limit_says(alone: GatewayThread) -> None:
    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(headers=bearer("sk-ten"), timeout=60, limits=httpx.Limits()) as client:
            url = f"{alone.url}/v1/completions"
            return await asyncio.gather(*(client.post(url, json=BODY) for _ in range(200)))

    answers = asyncio.run(ask_all())
    passed = [answer for answer in answers if answer.status_code != 429]
    assert len(passed) == 10
    assert {answer.status_code for answer in passed} == {503}, "there is no Triton"
    assert sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for answer in passed)[0] == 0
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-requests"] == "10"
    found = used(alone, "ten")
    assert (found["requests_total"], found["refused_totalrequests_per_minute"]) == (10, 190)
    assert post(alone, ADMIN).status_code == 503, "others are not touched"


def test_refusal_has_each_apis_form(alone: GatewayThread) -> None:
    use_up(alone, "sk-ten")
    with openai.OpenAI(base_url=f"{alone.url}/v1", api_key="sk-ten", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="the API key ten has used its 10 requests per minute") as told:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        assert told.value.code == "rate_limit_exceeded"
    other = anthropic.Anthropic(base_url=alone.url, api_key="sk-ten", max_retries=0)
    with other, pytest.raises(anthropic.RateLimitError, match="requests per minute"):
        other.messages.create(model="tiny", max_tokens=3, messages=[{"role": "user", "content": "a"}])
    tei = post(alone, "sk-ten", "/embed")
    assert (tei.status_code, tei.json()["error_type"]) == (429, "Overloaded")
    cohere = post(alone, "sk-ten", "/v2/embed")
    assert (cohere.status_code, [*cohere.json()]) == (429, ["message"])
    for path in ("/version", "/v1/models", "/metrics"):
        answer = httpx.get(alone.url + path, headers=bearer("sk-ten"))
        assert answer.status_code != 429, "what has no body uses nothing"
        assert not any(name in answer.headers for name in HEADERS)


def test_unknown_keys_leave_nothing(alone: GatewayThread) -> None:
    with httpx.Client(base_url=alone.url) as client:
        before = client.get("/metrics", headers=bearer(ADMIN)).text.count("key=")
        for number in range(300):
            assert client.post("/v1/completions", json=BODY, headers=bearer(f"sk-no-{number}")).status_code == 401
        assert client.post("/v1/completions", json=BODY, headers=bearer("*")).status_code == 401
        after = client.get("/metrics", headers=bearer(ADMIN)).text
    assert after.count("key=") == before
    assert "sk-no" not in after


def test_wrong_line_leaves_keys_and_use_as_they_were(
    alone: GatewayThread, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_up(alone, "sk-ten")
    with caplog.at_level(logging.INFO, "hf_triton_gateway"):
        keys.write_text(f"{KEYS}sk-new requests_per_minute=many sk-other\n")
        wait_until(lambda: "stay as they were" in caplog.text)
    [line] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert f"api_key_file {keys}, line 8: word 3 must be a limit" in line
    assert "sk-" not in line
    assert post(alone, "sk-ten").status_code == 429
    assert post(alone, "sk-new").status_code == 401
    with caplog.at_level(logging.INFO, "hf_triton_gateway"):
        keys.write_text(f"sk-ten name=eleven requests_per_minute=11\n{ADMIN} name=admin\n")
        wait_until(lambda: "API keys read again" in caplog.text)
    assert [post(alone, "sk-ten").status_code for _ in range(2)] == [503, 429]
    assert used(alone, "ten") == used(alone, "few") == {}
    assert used(alone, "eleven")["requests_total"] == 1
    keys.unlink()
    wait_until(lambda: post(alone, "sk-ten").status_code == 401)
    keys.write_text(f"sk-ten name=eleven requests_per_minute=11\n{ADMIN}\n")
    wait_until(lambda: post(alone, "sk-ten").status_code != 401)
    assert post(alone, "sk-ten").status_code == 429, "the use outlives the file"


def test_gateway_does_not_start_with_a_wrong_line(keys: Path) -> None:
    keys.write_text(f"{KEYS}sk-new tokens_per_day=all\n")
    with pytest.raises(SettingsError, match="line 8: tokens_per_day must be an integer"):
        build_app(GatewayConfig(api_key_file=keys))


def test_requests_in_flight_are_limited(triton: TritonServer, gateway: GatewayThread) -> None:
    body = {**BODY, "model": "slow", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, headers=bearer("sk-slow"), timeout=60) as one:
        assert one.status_code == 200
        lines = one.iter_lines()
        next(lines)
        refused = post(gateway, "sk-slow")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "has 1 requests in flight, as many as it may have" in refused.json()["error"]["message"]
    wait_until(lambda: post(gateway, "sk-slow").status_code == 200)
    wait_until(lambda: num_running(triton) == 0)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, **more}


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat(n=2, seed=1, temperature=1)),
    "chat in a stream": ("/v1/chat/completions", chat(model="demo", n=2, seed=1, temperature=1, **STREAM)),
    "prompts": ("/v1/completions", {**BODY, "prompt": ["a b", "c"], "n": 2, "temperature": 1}),
    "prompts as token ids": ("/v1/completions", {**BODY, "prompt": [[5, 6, 7], [8]]}),
    "prompts in a stream": ("/v1/completions", {**BODY, "model": "demo", "prompt": ["a b", "c"], **STREAM}),
    "a folder that streams only": ("/v1/completions", {**BODY, "model": "decoupled"}),
    "a scored prompt": ("/v1/completions", {**BODY, "max_tokens": 0, "echo": True, "logprobs": 1}),
    "messages": ("/v1/messages", chat()),
    "responses": ("/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 5}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_tokens_are_counted_as_the_usage_says(gateway: GatewayThread, name: str) -> None:
    path, body = REQUESTS[name]
    answer = httpx.post(gateway.url + path, json=body, headers=bearer(ADMIN), timeout=60)
    assert answer.status_code == 200, answer.text
    if "stream" in body:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    else:
        usage = answer.json()["usage"]
    found = used(gateway, "admin")
    assert found["prompt_tokens_total"] == usage.get("prompt_tokens", usage.get("input_tokens")) > 0
    assert found["completion_tokens_total"] == usage.get("completion_tokens", usage.get("output_tokens"))
    assert found["requests_total"] == 1
    assert not any(found[f"refused_total{limit}"] for limit in LIMITS)


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told_and_counted(gateway: GatewayThread, stream: bool) -> None:
    first = 40 + 20 * stream
    body = {"model": "demo", "prompt": [[*range(first, first + 150)], [9] * 3], "max_tokens": 2, "n": 2, "seed": 1}
    details: list[Any] = []
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=ADMIN) as client:
        for _ in range(2):
            if stream:
                *_, last = client.completions.create(**body, **STREAM)
                details.append(last.usage.prompt_tokens_details)
            else:
                details.append(client.completions.create(**body).usage.prompt_tokens_details)
        responses = [client.responses.create(model="demo", input="a " * 200, max_output_tokens=2) for _ in range(2)]
    assert details[0].cached_tokens == 0
    assert details[1].cached_tokens == 128
    nums = [response.usage.input_tokens_details.cached_tokens for response in responses]
    assert nums[1] > 0
    assert used(gateway, "admin")["cached_tokens_total"] == 128 + sum(nums)


def test_counting_tokens_is_no_use_of_them(gateway: GatewayThread) -> None:
    counted = post(gateway, ADMIN, "/v1/messages/count_tokens", messages=chat()["messages"])
    tokens = httpx.post(f"{gateway.url}/tokenize", json={"model": "tiny", "prompt": "a"}, headers=bearer(ADMIN))
    assert (counted.status_code, tokens.status_code) == (400, 200), "max_tokens is no field of count_tokens"
    found = used(gateway, "admin")
    assert (found["requests_total"], found["prompt_tokens_total"], found["completion_tokens_total"]) == (2, 0, 0)


def test_client_that_leaves_its_stream_pays_for_what_came(triton: TritonServer, gateway: GatewayThread) -> None:
    body = {**BODY, "model": "slow", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, headers=bearer(ADMIN), timeout=60) as stream:
        lines = stream.iter_lines()
        num_events = sum(next(lines).startswith("data:") for _ in range(9))
    wait_until(lambda: num_running(triton) == 0)
    found = used(gateway, "admin")
    assert found["prompt_tokens_total"] > 0
    assert num_events <= found["completion_tokens_total"] < 100


def test_key_uses_its_models_alone(gateway: GatewayThread) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-some", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo", "tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        assert client.completions.create(**BODY).usage
        for ask in (
            lambda: client.models.retrieve("slow"),
            lambda: client.completions.create(**{**BODY, "model": "slow"}),
            lambda: client.completions.create(**{**BODY, "model": "slow:law"}, stream=True),
            lambda: client.chat.completions.create(**chat(model="slow", stream=True)),
            lambda: client.chat.completions.create(**chat(model="none")),
            lambda: client.embeddings.create(model="slow", input="a"),
        ):
            with pytest.raises(
                openai.NotFoundError,
                match=r"the model '(slow|slow:law|none)' does not exist, or this API key may not use it",
            ) as no:
                ask()
            assert (no.value.code, no.value.param) == ("model_not_found", "model")


def test_documented_file_and_request(triton: TritonServer, keys: Path) -> None:
    section = GATEWAY_DOCUMENT.partition("## Limits of keys")[2]
    keys.write_text(section.split("```")[1].strip("\n"))
    words = shlex.split(re.findall(r"^```bash\n(curl .*?)^```", section, re.DOTALL | re.MULTILINE)[0])
    headers = dict(word.split(": ") for flag, word in pairwise(words) if flag == "-H")
    body = words[words.index("-d") + 1]
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=keys)) as running:
        url = next(word for word in words if word.startswith("http")).replace("http://localhost:9000", running.url)
        answer = httpx.post(url, content=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "59"
        refused = httpx.post(url, json={**json.loads(body), "model": "tiny"}, headers=headers)
        assert refused.status_code == 404
        told = [
            httpx.post(url, content=body, headers=bearer(key)).headers for key in ("sk-alice-kCq1", "sk-batch-9aZm")
        ]
    assert (told[0]["x-ratelimit-limit-requests"], told[0]["x-ratelimit-limit-tokens"]) == ("600", "20000")
    assert not any(name in told[1] for name in HEADERS)


def test_file_of_thousands_of_keys(keys: Path, triton: TritonServer) -> None:
    keys.write_text("".join(f"sk-{os.urandom(8).hex()} requests_per_minute=5\n" for _ in range(5000)) + f"{ADMIN}\n")
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=keys)) as running:
        assert post(running, ADMIN).status_code == 200
        assert post(running, "sk-another").status_code == 401


LONG = "The quick brown fox jumps over the lazy dog by the river. " * 8
OWN_CACHES = """
sk-admin name=admin
sk-ann name=ann private_cache=true
sk-ben name=ben private_cache=true
"""


@pytest.fixture
def private(triton: TritonServer, tmp_path: Path) -> Iterator[GatewayThread]:
    (tmp_path / "keys").write_text(OWN_CACHES)
    config = GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=tmp_path / "keys")
    with GatewayThread(config) as running:
        yield running


def bodies(text: str) -> dict[str, dict[str, Any]]:
    """The same prompt by each door that has the field, and by a stream."""
    messages = [{"role": "user", "content": text}]
    chat = {"model": "demo", "messages": messages, "max_tokens": 1}
    whole_stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {
        "/v1/completions": {"model": "demo", "prompt": text, "max_tokens": 1},
        "/v1/chat/completions": chat,
        "/v1/responses": {"model": "demo", "input": text, "max_output_tokens": 1},
        "/v1/messages": chat,
        "/v1/chat/completions?stream": {**chat, **whole_stream},
    }


def num_cached(gateway: GatewayThread, key: str, path: str, **salt: Any) -> int:
    """The tokens that the prefix cache had for the prompt of a door, by the key's counter."""
    counter = "cached_tokens_total"
    name = {"sk-admin": "admin", "sk-ann": "ann", "sk-ben": "ben"}[key]
    before = used(gateway, name).get(counter, 0)
    body = {**bodies(f"{path}: {LONG}")[path], **salt}
    answer = httpx.post(gateway.url + path.partition("?")[0], json=body, headers=bearer(key), timeout=60)
    assert answer.status_code == 200, answer.text
    return int(used(gateway, name).get(counter, 0) - before)


@pytest.mark.parametrize("path", bodies(""))
def test_a_key_with_a_cache_of_its_own_learns_nothing_of_others(private: GatewayThread, path: str) -> None:
    for key in ("sk-admin", "sk-ann", "sk-ben"):
        assert num_cached(private, key, path) == 0, key
        assert num_cached(private, key, path) > 0, key
    for key in ("sk-admin", "sk-ann"):
        assert num_cached(private, key, path, cache_salt="of my own") == 0, key
        assert num_cached(private, key, path, cache_salt="of my own") > 0, key
        assert num_cached(private, key, path, cache_salt="of my") == 0, key


def test_a_private_cache_begins_and_ends_with_the_file(private: GatewayThread, tmp_path: Path) -> None:
    path = "/v1/completions"
    assert num_cached(private, "sk-ben", path, cache_salt="reread") == 0
    (tmp_path / "keys").write_text(OWN_CACHES.replace("name=ben private_cache=true", "name=ben private_cache=none"))
    wait_until(lambda: num_cached(private, "sk-ben", path, cache_salt="reread") == 0)
    (tmp_path / "keys").write_text(OWN_CACHES)
    assert num_cached(private, "sk-ann", path, cache_salt="reread") == 0


def test_a_refused_request_is_counted_at_its_endpoint(alone: GatewayThread) -> None:
    use_up(alone, "sk-ten")
    before = counted(alone)
    assert post(alone, "sk-ten", "/v1/chat/completions").status_code == 429
    assert post(alone, "sk-nobody", "/v1/embeddings").status_code == 401
    assert httpx.get(f"{alone.url}/v1/responses/resp_1").status_code == 401
    assert httpx.head(f"{alone.url}/v1/models").status_code == 401
    assert httpx.put(f"{alone.url}/v1/rerank").status_code == 401
    assert post(alone, "sk-nobody", "/v1/nowhere").status_code == 401
    assert (
        httpx.post(f"{alone.url}/v1/completions", content=b"x" * (17 << 20), headers=bearer(ADMIN)).status_code == 413
    )
    after = counted(alone)
    assert {
        labels: after[labels] - before.get(labels, 0) for labels in after if after[labels] != before.get(labels)
    } == {
        ("/v1/chat/completions", "429"): 1,
        ("/v1/embeddings", "401"): 1,
        ("/v1/responses/{response_id}", "401"): 1,
        ("/v1/models", "401"): 1,
        ("/v1/rerank", "401"): 1,
        ("other", "401"): 1,
        ("/v1/completions", "413"): 1,
        ("/metrics", "200"): 1,
    }


def counted(gateway: GatewayThread) -> dict[tuple[str, str], float]:
    """Requests by endpoint and status."""
    text = httpx.get(f"{gateway.url}/metrics", headers=bearer(ADMIN)).text
    return {
        (sample.labels["endpoint"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "hf_triton_openai_requests_total"
    }
