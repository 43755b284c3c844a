# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions by the real client: whole answers, streams, and OpenAI's types."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.gateway import GatewayThread

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
BODY = {"model": "demo", "messages": HELLO, "max_tokens": 8}


def post(gateway: GatewayThread, body: Any, path: str = "/v1/chat/completions") -> Any:
    answer = httpx.post(gateway.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(gateway: GatewayThread, body: Any) -> list[Any]:
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_answer_is_of_openais_type(gateway: GatewayThread) -> None:
    answer = post(gateway, BODY)
    ChatCompletion.model_validate(answer, strict=True)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"]


def test_chunks_are_of_openais_type(gateway: GatewayThread) -> None:
    chunks = events(gateway, {**BODY, "stream_options": {"include_usage": True}, "logprobs": True})
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_stream_gives_the_answer_in_pieces(client: openai.OpenAI, n: int) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 20, "seed": 5, "n": n, "temperature": 1}
    whole = client.chat.completions.create(**asked)
    pieces = [""] * n
    reasons: list[str | None] = [None] * n
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert pieces == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_n_alone_gives_different_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, n=4, seed=1)
    assert len({choice.message.content for choice in answer.choices}) > 1


@pytest.mark.parametrize("model", ["tiny", "decoupled", "batching"])
def test_every_kind_of_folder_answers(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_decoupled_folder_streams_by_itself(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="decoupled", messages=HELLO, stream=True))
    assert len(chunks) > 3
    assert chunks[-1].choices[0].finish_reason == "length"


def test_logprobs_are_in_openais_form(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(position.token for position in logprobs.content) == answer.choices[0].message.content
    for position in logprobs.content:
        assert position.bytes == list(position.token.encode())
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].logprob == position.logprob  # greedy
        assert position.top_logprobs[0].logprob >= position.top_logprobs[1].logprob


def test_time_limit_ends_an_answer_with_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="slow", messages=HELLO, max_tokens=100, extra_body={"max_time": 0.8})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 20
