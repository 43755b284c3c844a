# SPDX-License-Identifier: Apache-2.0
"""Requests in the forms that the documents of vLLM's server and of Triton's OpenAI frontend show, and load generators'.

Each is sent as JSON; the model's name and the texts are ours.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.gateway import GatewayThread

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CAR = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 12},
        "model": {"type": "string", "maxLength": 12},
        "car_type": {"enum": ["sedan", "SUV", "Truck", "Coupe"]},
    },
    "required": ["brand", "model", "car_type"],
    "additionalProperties": False,
}
MAIL = r"\w{1,8}@\w{1,8}\.com\n"


def asks(text: str, **fields: object) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def is_car(text: str) -> None:
    jsonschema.validate(json.loads(text), CAR)


def is_mail(text: str) -> None:  # \w has more characters in the grammar's language than in Python's
    assert re.fullmatch(r".{1,8}@.{1,8}\.com", text.removesuffix("\n"))


def is_text(text: str) -> None:
    assert text


CHATS: dict[str, tuple[dict[str, Any], Callable[[str], None]]] = {
    "vLLM: extra parameters": (
        asks("Hello!", top_k=50, min_p=0.05, repetition_penalty=1.1, min_tokens=2, ignore_eos=False, max_tokens=9),
        is_text,
    ),
    "vLLM: guided_json": (asks("The most iconic car", guided_json=CAR, max_tokens=120), is_car),
    "vLLM: structured_outputs regex": (asks("Well?", structured_outputs={"regex": MAIL}, max_tokens=60), is_mail),
    "vLLM: template's variables": (asks("Hello!", chat_template_kwargs={"enable_thinking": False}), is_text),
    "vLLM: content in parts": (
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]},
        is_text,
    ),
    "vLLM: continued": (
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        is_text,
    ),
    "Triton: a system's message": (
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "What are LLMs?"},
            ],
            "max_tokens": 100,
        },
        is_text,
    ),
    "Triton: all of its fields": (
        asks(
            "Hi",
            frequency_penalty=0.0,
            presence_penalty=0.0,
            logit_bias=None,
            logprobs=False,
            max_tokens=8,
            n=1,
            seed=None,
            stop=None,
            stream=False,
            stream_options=None,
            temperature=0.7,
            top_p=1,
            tools=None,
            user="me",
        ),
        is_text,
    ),
}
COMPLETIONS_BODIES: dict[str, dict[str, Any]] = {
    "vLLM: a law": {"prompt": "A robot may not injure a human being", "echo": False, "n": 2, "logprobs": 3},
    "lm-eval: loglikelihood": {
        "prompt": [[5, 6, 7, 8]],
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        "temperature": 0,
    },
    "lm-eval: generation": {
        "prompt": ["Question:"],
        "max_tokens": 8,
        "temperature": 0,
        "stop": ["\n", "Q:"],
        "seed": 1,
    },
}
LOAD: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve, completions": (
        COMPLETIONS,
        {
            "prompt": "a b c",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "ignore_eos": True,
        },
    ),
    "vllm bench serve, chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a b c"}]}],
            "max_completion_tokens": 8,
            "temperature": 0.0,
            "ignore_eos": True,
        },
    ),
    "genai-perf": (
        CHAT,
        {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 8, "min_tokens": 8, "ignore_eos": True},
    ),
}


def post(gateway: GatewayThread, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(gateway.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("name", CHATS)
def test_chat(gateway: GatewayThread, name: str) -> None:
    body, check = CHATS[name]
    answer = post(gateway, CHAT, body).json()
    ChatCompletion.model_validate(answer, strict=True)
    check(answer["choices"][0]["message"]["content"])


@pytest.mark.full
@pytest.mark.parametrize("name", COMPLETIONS_BODIES)
def test_completion(gateway: GatewayThread, name: str) -> None:
    body = COMPLETIONS_BODIES[name]
    answer = post(gateway, COMPLETIONS, {"model": "tiny", **body}).json()
    if not body.get("echo"):  # a prompt's first token has no log probability, which OpenAI's type leaves out
        Completion.model_validate(answer, strict=True)
    assert all(choice["text"] for choice in answer["choices"])


@pytest.mark.full
@pytest.mark.parametrize("name", LOAD)
def test_load_generators_stream(gateway: GatewayThread, name: str) -> None:
    path, body = LOAD[name]
    sent = {"model": "demo", **body, "stream": True, "stream_options": {"include_usage": True}}
    *lines, done, _ = post(gateway, path, sent).text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    for chunk in chunks if path == CHAT else ():  # OpenAI's type of completions has no chunks
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert chunks[-1]["usage"]["completion_tokens"] == 8
