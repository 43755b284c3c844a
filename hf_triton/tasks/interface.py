# SPDX-License-Identifier: Apache-2.0
"""What a folder's process serves: a `RequestService`, how it answers, and what its model is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_triton.errors import ERROR_FORM_VERSION
from hf_triton.hub.spec import CheckpointSpec
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.sleep import SleepAnswer
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.sender import ResponseSender
from hf_triton.tasks.tokenizer_answers import TokenizerAnswers

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings


@dataclass(frozen=True)
class ResponseConfig:
    """How the requests of a folder are answered."""

    output_names: list[str]
    is_decoupled: bool
    streams: bool
    """Whether a response is streamed if the request does not say."""
    sender: ResponseSender
    is_batching: bool = False
    """Whether the first dimension of every tensor is Triton's batch (`max_batch_size`)."""

    def streams_if(self, asked: bool | None) -> bool:
        """Whether a response is streamed to a request that asks for it, for the contrary, or does not say."""
        return self.is_decoupled and (self.streams if asked is None else asked)

    def named_outputs(self, request: InferenceRequest) -> list[str]:
        """The outputs that the client lists; empty if it lists all or none, and so does not choose."""
        requested = request.requested_outputs()
        return requested if len(requested) < len(self.output_names) else []


class RequestService(ABC):
    """Takes a folder's requests."""

    info: ModelInfo | None = None
    """What the model is; None: another process has it."""
    tokenizer: TokenizerAnswers | None = None
    """Answers what is asked of the tokenizer; None: there is none, or another process has it."""

    @abstractmethod
    def submit(self, request: InferenceRequest, config: ResponseConfig) -> None:
        """Start a request and return at once. It gets exactly one final response, mostly from another thread.

        Raises:
            HfTritonError: The request is refused; the caller answers it.
        """

    @abstractmethod
    def is_healthy(self) -> bool:
        """Whether requests can be taken."""

    def is_sleeping(self) -> bool:
        """Whether the model has given its memory back until the next request."""
        return False

    def set_sleeping(self, is_sleeping: bool) -> Future[SleepAnswer]:
        """Have the model sleep once no request is in flight, or wake; the result comes from any thread.

        Cancelling the future withdraws the call.
        """
        done: Future[SleepAnswer] = Future()
        done.set_result(SleepAnswer(is_sleeping=False))
        return done

    @abstractmethod
    def close(self) -> None:
        """Answer every request that is not finished, then stop."""


def model_info(checkpoint: Checkpoint, settings: ModelSettings, *, task: str, engine: str, **chat: Any) -> ModelInfo:
    name = settings.huggingface_model
    model = checkpoint.model
    modules = model.modules() if callable(getattr(model, "modules", None)) else ()
    bits = [module.bits for module in modules if hasattr(module, "widened")]
    dtype = f"int{min(bits)}" if bits else str(model.dtype).removeprefix("torch.")
    footprint = getattr(model, "get_memory_footprint", None)  # a graph has none
    return ModelInfo(
        task=task,
        model=Path(name).name if CheckpointSpec(name).is_local else name,
        context_length=checkpoint.context_length,
        engine=engine,
        dtype=dtype if settings.runtime == "torch" else settings.precision,
        device=str(model.device),
        memory_bytes=footprint() if settings.has_weights and callable(footprint) else 0,
        architecture=type(model).__name__,
        max_prompts=settings.max_prompts,
        max_waiting_prompts=settings.max_waiting_prompts,
        error_form=ERROR_FORM_VERSION,
        **chat,
    )
