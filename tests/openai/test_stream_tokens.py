# SPDX-License-Identifier: Apache-2.0
"""A stream's tokens, log probabilities and counts: those of the whole answer, each with its text."""

from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.support.gateway import GatewayThread

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def chat_asked(model: str, n: int) -> dict[str, Any]:
    return {"model": model, "messages": HELLO, "max_tokens": 12, "seed": 5, "temperature": 1, "n": n}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("model", ["demo", "decoupled"])
def test_chunks_of_a_chat_hold_the_tokens_of_the_whole_answer(client: openai.OpenAI, model: str, n: int) -> None:
    asked = {**chat_asked(model, n), "logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**asked)
    texts, ids = [""] * n, [list[int]() for _ in range(n)]
    positions: list[list[Any]] = [[] for _ in range(n)]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += (choice.model_extra or {}).get("token_ids", [])
            positions[choice.index] += (choice.logprobs and choice.logprobs.content) or []
            if choice.delta.content:
                assert choice.logprobs is not None
                assert choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    for told, choice in zip(positions, whole.choices, strict=True):
        expected = (choice.logprobs and choice.logprobs.content) or []
        assert [each.token for each in told] == [each.token for each in expected]
        assert [each.logprob for each in told] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert ids == [(choice.model_extra or {})["token_ids"] for choice in whole.choices]
    assert (chunks[0].model_extra or {})["prompt_token_ids"] == (whole.model_extra or {})["prompt_token_ids"]


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("echo", [False, True])
def test_chunks_of_completions_hold_the_tokens_of_the_whole_answer(
    client: openai.OpenAI, num_top: int, echo: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "prompt": ["The model", "Today"],
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": num_top,
        "echo": echo,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.completions.create(**asked)
    told: list[dict[str, list[Any]]] = [
        {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []} for _ in range(2)
    ]
    texts, ids = [""] * 2, [list[int](), list[int]()]
    num_chunks = 0
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += (choice.model_extra or {})["token_ids"]
            for name, values in told[choice.index].items() if choice.logprobs else ():
                values += getattr(choice.logprobs, name)
            num_chunks += choice.logprobs is not None
            assert choice.logprobs is not None or not choice.text
    assert num_chunks > 4
    for index, choice in enumerate(whole.choices):
        assert choice.logprobs is not None
        assert texts[index] == choice.text
        assert ids[index] == (choice.model_extra or {})["token_ids"]
        for name in ("tokens", "text_offset"):
            assert told[index][name] == getattr(choice.logprobs, name)
        assert [each or {} for each in told[index]["top_logprobs"]] == [
            pytest.approx(each or {}, abs=1e-4) for each in choice.logprobs.top_logprobs or []
        ]
        own = choice.logprobs.top_logprobs or []
        assert all(max(num_top, 1) <= len(top) <= num_top + 1 for top in own[1 if echo else 0 :])


def test_the_scores_of_a_long_echo_come_at_the_end(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "prompt": "The model " * 150,
        "max_tokens": 4,
        "logprobs": 0,
        "echo": True,
    }
    [choice] = client.completions.create(**asked, temperature=0).choices
    *early, last = [chunk.choices[0] for chunk in client.completions.create(**asked, temperature=0, stream=True)]
    assert choice.logprobs is not None
    assert last.logprobs is not None
    assert len(choice.logprobs.tokens or ()) > 256
    assert not any(each.logprobs for each in early)
    assert (last.logprobs.tokens, last.logprobs.text_offset) == (choice.logprobs.tokens, choice.logprobs.text_offset)


def test_no_likely_tokens_give_the_token_itself(gateway: GatewayThread) -> None:
    body = {"model": "demo", "prompt": "The model", "max_tokens": 5, "logprobs": 0}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).json()
    Completion.model_validate(answer, strict=True)
    logprobs = answer["choices"][0]["logprobs"]
    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in pairs]


@pytest.mark.parametrize("n", [1, 2])
def test_each_chunk_counts_the_tokens_so_far(client: openai.OpenAI, n: int) -> None:
    whole = client.chat.completions.create(**chat_asked("demo", n))
    counts: list[list[int]] = [[] for _ in range(n)]
    *chunks, last = client.chat.completions.create(**chat_asked("demo", n), stream=True, stream_options=USAGE)
    assert whole.usage is not None
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        assert chunk.usage is not None
        assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        counts[chunk.choices[0].index].append(chunk.usage.completion_tokens)
        assert "token_ids" not in (chunk.choices[0].model_extra or {})
    assert all(each == sorted(each) for each in counts)
    assert sum(each[-1] for each in counts) == whole.usage.completion_tokens
    assert (last.choices, last.usage) == ([], whole.usage)


@pytest.mark.parametrize(
    ("options", "is_continuous"),
    [(USAGE, True), ({"include_usage": True}, False), ({**USAGE, "include_usage": False}, False)],
    ids=["continuous", "at the end", "none"],
)
def test_each_chunk_of_completions_counts_the_tokens_so_far(
    client: openai.OpenAI, options: Any, is_continuous: bool
) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "The model", "max_tokens": 6, "temperature": 0}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    *counted, last = [chunk.usage and chunk.usage.completion_tokens for chunk in chunks]
    assert last == (6 if options["include_usage"] else None)
    assert all((count is not None) == is_continuous for count in counted)
    if is_continuous:
        assert counted == sorted(counted, key=int)
        assert counted[0] >= 1
        assert counted[-1] == 6


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_is_named(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = text.split()[2]
    answer = client.chat.completions.create(**asked, stop=["$$", stop], stream=stream)
    last = list(answer)[-1] if isinstance(answer, openai.Stream) else answer
    assert last.choices[0].finish_reason == "stop"
    assert (last.choices[0].model_extra or {})["stop_reason"] == stop
    assert stream or last.choices[0].message.content == text[: text.index(stop)]
    whole = client.chat.completions.create(**asked)
    assert (whole.choices[0].model_extra or {})["stop_reason"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_message_names_its_stop_sequence_and_counts_its_prompt(
    gateway: GatewayThread, client: openai.OpenAI, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 20, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as agent:
        text = agent.messages.create(**asked).content[0]
        assert text.type == "text"
        stop = text.text.split()[2]
        num_input_tokens = agent.messages.count_tokens(model="demo", messages=HELLO).input_tokens
        if stream:
            with agent.messages.stream(**asked, stop_sequences=[stop]) as events:
                start = next(iter(events))
                assert start.type == "message_start"
                assert start.message.usage.input_tokens == num_input_tokens
                message = events.get_final_message()
        else:
            message = agent.messages.create(**asked, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.usage.input_tokens == num_input_tokens
    assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0
    assert message.usage.output_tokens > 0
