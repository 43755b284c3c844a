# SPDX-License-Identifier: Apache-2.0
"""Chunks of streamed completions, from responses that a test chooses."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

from hf_triton_gateway.app_state import Gateway
from hf_triton_gateway.chat import completions
from hf_triton_gateway.chat.completions import CompletionRequest
from hf_triton_gateway.triton.triton_messages import Generation, Outputs

RESPONSES: list[Outputs] = [
    {"text_output": ["a", ""], "token_ids": ["[5]", "[6]"], "prompt_token_ids": ["[1, 2]", "[1, 2]"]},
    {"text_output": ["", "b"], "token_ids": ["[]", "[7]"]},
    {
        "text_output": ["", ""],
        "token_ids": ["[]", "[]"],
        "prompt_token_ids": ["[1, 2]", "[1, 2]"],
        "finish_reason": ["stop", "stop"],
        "num_input_tokens": [2, 2],
        "num_output_tokens": [1, 2],
    },
]


class _Models:
    async def stream(self, generation: Generation) -> AsyncGenerator[Outputs]:
        for outputs in RESPONSES:
            yield outputs

    @property
    def models(self) -> "_Models":
        return self


def test_first_chunk_of_each_choice_has_the_prompts_tokens() -> None:
    body = CompletionRequest.model_validate(
        {"model": "m", "prompt": "p", "n": 2, "stream": True, "return_token_ids": True}
    )
    answers = completions._answers(body, body.generations("1", 0))

    async def read() -> list[bytes]:
        return [data async for data in completions._stream(cast(Gateway, _Models()), body, answers)]

    events = b"".join(asyncio.run(read())).decode().split("\n\n")
    chunks: list[Any] = [json.loads(data.removeprefix("data: ")) for data in events[:-2]]
    for index, token_ids in enumerate([[5], [6, 7]]):
        first, *others = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert first["prompt_token_ids"] == [1, 2]
        assert first["token_ids"] == token_ids
        assert all("prompt_token_ids" not in choice for choice in others)
