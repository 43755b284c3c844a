# SPDX-License-Identifier: Apache-2.0
"""What every task offers to the process that serves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hf_triton.engine.types import EngineLoad
from hf_triton.tasks.request import InferenceRequest
from hf_triton.tasks.sender import ResponseSender


@dataclass(frozen=True)
class ResponseConfig:
    """How the requests of a folder are answered."""

    output_names: list[str]
    """The outputs that the folder declares."""
    is_decoupled: bool
    """Whether a request may have several responses."""
    streams: bool
    """Whether a response is streamed if the request does not say."""
    sender: ResponseSender
    """Sends the responses."""
    is_batching: bool = False
    """Whether the first dimension of every tensor is Triton's batch (`max_batch_size`)."""

    def streams_if(self, asked: bool | None) -> bool:
        """Whether a response is streamed to a request that asks for it, for the contrary, or does not say."""
        return self.is_decoupled and (self.streams if asked is None else asked)


class Task(Protocol):
    """What a model does with a request: text generation, embeddings, ..."""

    def submit(self, request: InferenceRequest, config: ResponseConfig) -> None:
        """Start a request and return at once. It gets exactly one final response, mostly from another thread.

        Raises:
            HfTritonError: The request is refused; the caller answers it.
        """

    def is_healthy(self) -> bool:
        """Whether requests can be taken."""

    def close(self) -> None:
        """Answer every request that is not finished, then stop."""


class LoadedTask(Task, Protocol):
    """The task of a folder with a model of its own."""

    def load(self) -> EngineLoad:
        """What its engine holds."""
