# SPDX-License-Identifier: Apache-2.0
"""/tokenize, /detokenize, and prompts as token ids."""

from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway import GatewayThread
from tests.support.paths import ROOT

PROMPTS = ["The model", "Today", "I was glad of it"]
HELLO = [{"role": "user", "content": "Hello!"}]


def post(gateway: GatewayThread, path: str, **body: object) -> Any:
    answer = httpx.post(gateway.url + path, json={"model": "demo", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def token_ids(gateway: GatewayThread) -> list[list[int]]:
    return [post(gateway, "/tokenize", prompt=prompt)["tokens"] for prompt in PROMPTS]


def test_tokens_become_the_text_again(gateway: GatewayThread, token_ids: list[list[int]]) -> None:
    for prompt, ids in zip(PROMPTS, token_ids, strict=True):
        assert post(gateway, "/detokenize", tokens=ids)["prompt"].endswith(prompt)  # behind the start token
    assert post(gateway, "/detokenize", tokens=[])["prompt"] == ""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "hf_triton" / "demo")


@pytest.mark.parametrize("adds", [None, True, False])
def test_tokens_are_those_of_the_tokenizer(gateway: GatewayThread, tokenizer: Any, adds: bool | None) -> None:
    """In vLLM's form: the defaults of texts and of chats differ."""
    chat = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    for prompt, text, default in (({"prompt": "Today"}, "Today", True), ({"messages": HELLO}, chat, False)):
        ids = tokenizer(text, add_special_tokens=default if adds is None else adds).input_ids
        context = tokenizer.model_max_length
        told = post(gateway, "/tokenize", **prompt, add_special_tokens=adds)
        assert told == {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": None}
        told = post(gateway, "/tokenize", **prompt, add_special_tokens=adds, return_token_strs=True)
        assert told["token_strs"] == tokenizer.convert_ids_to_tokens(ids)


def test_chat_is_tokenized_by_its_template(gateway: GatewayThread) -> None:
    tokens = post(gateway, "/tokenize", messages=HELLO)
    answer = post(gateway, "/v1/chat/completions", messages=HELLO, max_tokens=1)
    assert tokens["count"] == len(tokens["tokens"]) == answer["usage"]["prompt_tokens"]
    open_end = post(gateway, "/tokenize", messages=HELLO, add_generation_prompt=False)
    assert open_end["tokens"] == tokens["tokens"][: open_end["count"]]
    assert open_end["count"] < tokens["count"]


def test_prompts_as_token_ids_are_completed_as_texts_are(client: openai.OpenAI, token_ids: list[list[int]]) -> None:
    texts = client.completions.create(model="demo", prompt=PROMPTS, max_tokens=6, temperature=0)
    ids = client.completions.create(model="demo", prompt=token_ids, max_tokens=6, temperature=0)
    assert [choice.text for choice in ids.choices] == [choice.text for choice in texts.choices]
    assert ids.usage == texts.usage
    one = client.completions.create(model="demo", prompt=token_ids[0], max_tokens=6, temperature=0)
    assert one.choices[0].text == texts.choices[0].text


def test_folder_that_batches_takes_token_ids(client: openai.OpenAI, gateway: GatewayThread) -> None:
    ids = httpx.post(f"{gateway.url}/tokenize", json={"model": "batching", "prompt": "Hello"}, timeout=60).json()[
        "tokens"
    ]
    text = httpx.post(f"{gateway.url}/detokenize", json={"model": "batching", "tokens": ids}, timeout=60).json()[
        "prompt"
    ]
    assert text.endswith("Hello")
    answers = [client.completions.create(model="batching", prompt=prompt, max_tokens=6) for prompt in ("Hello", ids)]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_prompts_as_token_ids_stream_side_by_side(client: openai.OpenAI, token_ids: list[list[int]]) -> None:
    whole = client.completions.create(model="demo", prompt=PROMPTS, max_tokens=6, temperature=0)
    texts = [""] * len(PROMPTS)
    usage = None
    for chunk in client.completions.create(
        model="demo", prompt=token_ids, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert usage == whole.usage


def test_bad_token_id_among_prompts_is_refused(client: openai.OpenAI, token_ids: list[list[int]]) -> None:
    for is_stream in (False, True):
        with pytest.raises(openai.APIError) as refused:  # of a stream, before or after another prompt's first token
            list(client.completions.create(model="demo", prompt=[*token_ids, [10**9]], stream=is_stream))
        assert refused.value.param == f"prompt[{len(token_ids)}][0]"


def test_token_ids_are_returned_on_request(gateway: GatewayThread, token_ids: list[list[int]]) -> None:
    answer = post(gateway, "/v1/completions", prompt=PROMPTS[0], max_tokens=5, temperature=0, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == token_ids[0]
    assert len(choice["token_ids"]) == 5
    assert post(gateway, "/detokenize", tokens=choice["token_ids"])["prompt"] == choice["text"]


def test_prompt_is_truncated_on_the_left(gateway: GatewayThread, token_ids: list[list[int]]) -> None:
    answer = post(gateway, "/v1/completions", prompt=PROMPTS[2], max_tokens=1, truncate_prompt_tokens=2)
    assert answer["usage"]["prompt_tokens"] == 2
