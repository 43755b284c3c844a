# SPDX-License-Identifier: Apache-2.0
"""A model that writes, served without a server: from a prompt, or a chat with image files, to its answer."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_triton.engine.protocols import Observer
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.protocol.chat_request import Chat, parse_chat
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.request_options import RequestOptions
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.settings import ModelSettings
from hf_triton.tasks.checked_hooks import checked_load
from hf_triton.tasks.hooks import Hooks
from hf_triton.tasks.text_generation.service import build_text_generation
from tests.support.collector import Collector, config_of
from tests.support.image_reference import Messages

WAIT_S = 60.0


class Served:
    """The task of a checkpoint; closed by `close`."""

    def __init__(
        self, folder: Path, observer: Observer | None = None, hooks: Hooks | None = None, **settings: Any
    ) -> None:
        chosen = ModelSettings(huggingface_model=str(folder), **settings)
        hub, hooks = Hub(folder, chosen, {}), hooks or Hooks()
        self.task = build_text_generation(
            checked_load(hooks, load_checkpoint(hub, chosen, Placement("CPU", 0))),
            chosen,
            hooks,
            hub,
            chat_template=None,
            on_fatal=lambda: None,
            observer=observer or Observer(),
            returns_timings=True,
        )
        self.engine: Any = self.task._engine

    def start(
        self, prompt: str | Messages, files: Sequence[bytes] = (), *, streams: bool = False, **asked: Any
    ) -> Collector:
        """Submit a text with placeholders, or a chat, and do not wait.

        Args:
            prompt: Parts of type `image` stand for the files, in order.
            streams: Whether the answer comes in deltas.
            **asked: `tools` and `template` of a chat; options and parameters of a request.
        """
        fields = RequestOptions.model_fields
        options = RequestOptions(
            **{"stream": streams, "return_token_ids": True, "return_num_cached_tokens": True}
            | {name: asked.pop(name) for name in list(asked) if name in fields}
        )
        tools = asked.pop("tools", None)
        is_text = isinstance(prompt, str)
        source = prompt if isinstance(prompt, str) else _chat(prompt, files, {"tools": tools} if tools else {})
        row = GenerationParameters(**{"do_sample": False, "max_new_tokens": 12} | asked)
        reply = Collector()
        request = GenerationRequest([source], [row], options, (1,), images=tuple(files) if is_text else ())
        self.task.generate(reply, request, config_of(streams=streams))
        return reply

    def ask(self, prompt: str | Messages, files: Sequence[bytes] = (), **asked: Any) -> Any:
        """The response's first row."""
        return rows_of(self.start(prompt, files, **asked))[0]

    def close(self) -> None:
        self.task.close()


def rows_of(reply: Collector) -> list[Any]:
    assert reply.is_finished.wait(WAIT_S), "a request was not answered"
    [result] = reply.results
    assert isinstance(result, list), result
    return result


def _chat(messages: Messages, files: Sequence[bytes], options: dict[str, Any]) -> Chat:
    """A checked chat, as a door makes it."""
    chat = parse_chat(json.dumps([message | {"content": "x"} for message in messages]), options, 10**6)
    pairs = zip(chat.messages, messages, strict=True)
    return replace(
        chat,
        messages=tuple(own | {"content": given["content"]} for own, given in pairs),
        images=tuple(files),
        image_places=tuple(f"image {number}" for number in range(len(files))),
    )
