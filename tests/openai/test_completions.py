# SPDX-License-Identifier: Apache-2.0
"""/v1/completions by the real client."""

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from tests.support.gateway import GatewayThread


def test_answer_is_of_openais_type(gateway: GatewayThread) -> None:
    body = {"model": "demo", "prompt": "The model", "max_tokens": 5, "logprobs": 2}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body).json()
    Completion.model_validate(answer, strict=True)
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, **details}


def test_prompts_of_a_list_keep_their_order(client: openai.OpenAI) -> None:
    prompts = ["The model", "Today", "I was glad"]
    alone = [client.completions.create(model="demo", prompt=one, max_tokens=6, temperature=0) for one in prompts]
    together = client.completions.create(model="demo", prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


def test_more_prompts_than_a_folders_batch(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="batching", prompt=["a"] * 9, max_tokens=2)
    assert len({choice.text for choice in answer.choices}) == 1
    assert [choice.index for choice in answer.choices] == list(range(9))


def test_stream_gives_the_completions_in_pieces(client: openai.OpenAI) -> None:
    prompts = ["The model", "Today"]
    whole = client.completions.create(model="demo", prompt=prompts, max_tokens=9, n=2, seed=3, temperature=1)
    texts = [""] * 4
    reasons: list[str | None] = [None] * 4
    stream = client.completions.create(
        model="demo", prompt=prompts, max_tokens=9, n=2, seed=3, temperature=1, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="demo", prompt="The model", max_tokens=4, temperature=0)
    echo = client.completions.create(
        model="demo", prompt="The model", max_tokens=4, temperature=0, echo=True, logprobs=0
    )
    assert echo.choices[0].text == "The model" + plain.choices[0].text
    logprobs = echo.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == echo.choices[0].text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert echo.choices[0].text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_stay_in_step_behind_characters_of_several_tokens(client: openai.OpenAI, stream: bool) -> None:
    prompt = "a 😀 b नि c"
    made: Any = client.completions.create(
        model="demo", prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=0, stream=stream
    )
    choices = [chunk.choices[0] for chunk in made if chunk.choices] if stream else made.choices
    told = [choice.logprobs for choice in choices if choice.logprobs]
    tokens, offsets = ([each for one in told for each in getattr(one, name)] for name in ("tokens", "text_offset"))
    text = "".join(choice.text for choice in choices)
    assert text.startswith(prompt)
    assert "\ufffd" in "".join(tokens)
    for token, start, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        assert text[start:end] == token or "\ufffd" in token


def test_only_allowed_tokens_come(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 5}
    for ids, tokens in (([33, 40], {33, 40}), (34, {34})):
        extra = {"allowed_token_ids": ids, "return_token_ids": True}
        made = client.completions.create(prompt="The model", n=3, temperature=2, seed=1, extra_body=extra, **asked)
        for choice in made.choices:
            assert set((choice.model_extra or {})["token_ids"]) <= tokens
            assert choice.finish_reason == "length"
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "a"}], extra_body=extra, **asked)
    assert (chat.choices[0].model_extra or {})["token_ids"] == [34] * 5
    with pytest.raises(
        openai.BadRequestError, match=r"allowed_token_ids\[1\] is 999999, and the model's token ids are"
    ):
        client.completions.create(prompt="a", extra_body={"allowed_token_ids": [1, 999999]}, **asked)
    extra = {"allowed_token_ids": [33], "guided_choice": ["yes"]}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids has no token that what else constrains"):
        client.completions.create(prompt="a", extra_body=extra, **asked)


@pytest.mark.parametrize("stream", [False, True])
def test_what_stands_before_a_suffix_is_filled_in(client: openai.OpenAI, stream: bool) -> None:
    """As the family's own tokens around the prefix and the suffix have it, for each prompt."""
    asked: dict[str, Any] = {"model": "bare", "max_tokens": 8, "temperature": 0}
    prefixes, suffix = ["def half(x):", "def twice(x):"], "  return y"
    written = [f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>" for prefix in prefixes]
    expected = [choice.text for choice in client.completions.create(prompt=written, **asked).choices]
    assert len({*expected, client.completions.create(prompt=prefixes[0], **asked).choices[0].text}) == 3
    answer = client.completions.create(prompt=prefixes, suffix=suffix, stream=stream, **asked)
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_a_suffix_needs_a_model_that_fills_in(client: openai.OpenAI) -> None:
    for fields, sentence in (
        ({"suffix": "b"}, "suffix needs tokens for filling in the middle"),
        ({"suffix": "b", "echo": True}, "echo cannot be combined with suffix"),
    ):
        with pytest.raises(openai.BadRequestError, match=sentence):
            client.completions.create(model="demo", prompt="a", **fields)  # type: ignore[call-overload]
    assert client.completions.create(model="demo", prompt="a", suffix="", max_tokens=1).choices[0].text


def test_no_tokens_with_echo_score_the_prompt(client: openai.OpenAI) -> None:
    returns = {"return_token_ids": True}
    scored = client.completions.create(
        model="demo", prompt="The model", max_tokens=0, echo=True, logprobs=1, extra_body=returns
    )
    longer = client.completions.create(model="demo", prompt="The model", max_tokens=1, echo=True, logprobs=1)
    assert scored.choices[0].text == "The model"
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert (scored.choices[0].model_extra or {})["token_ids"] == []
    first, second = scored.choices[0].logprobs, longer.choices[0].logprobs
    assert first is not None
    assert second is not None
    assert first.tokens == (second.tokens or [])[:-1]
