# SPDX-License-Identifier: Apache-2.0
"""What is admitted: the limits of one request, and the one gate that bounds the queue. Knows no text.

The gate counts prompts in preparation and prompts that wait in the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from hf_triton.engine.protocols import EngineLoad
from hf_triton.errors import HfTritonError, ShuttingDownError, UnavailableError
from hf_triton.protocol.prompts import BYTES_PER_TOKEN, Limits
from hf_triton.settings import ModelSettings
from hf_triton.tasks.serving.inference_request import InferenceRequest

MIN_ENCODER_BYTES: Final = 1 << 18
"""What a text for an encoder may have: documents are cut to the context, or read in windows."""

MIN_FILE_BYTES: Final = 1 << 25
"""What a file, such as an image, may have."""


def request_limits(settings: ModelSettings, context_length: int, min_bytes: int = 0) -> Limits:
    """What one request to a folder may hold; without a setting, prompts of as many bytes as could fit the context.

    A prompt may have `min_bytes` whatever the context.
    """
    max_bytes = settings.max_prompt_bytes or max(BYTES_PER_TOKEN * context_length, min_bytes)
    return Limits(settings.max_prompts, max_bytes)


class PendingResponse(Protocol):
    """A response that may be ended with an error at any time."""

    request: InferenceRequest

    def refuse(self, error: HfTritonError) -> None:
        """End the response with an error, unless it has ended."""


class AdmissionGate:
    """Admits requests while few prompts wait.

    Args:
        max_waiting: Prompts that may wait. A request that finds none waiting may have any number.
        engine_load: The engine's load; its free slots are not counted as waiting prompts.
    """

    def __init__(self, max_waiting: int, engine_load: Callable[[], EngineLoad]) -> None:
        self._max_waiting = max_waiting
        self._engine_load = engine_load
        self._preparing: dict[PendingResponse, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def num_preparing(self) -> int:
        """Prompts of admitted requests that have not left."""
        return sum(list(self._preparing.values()))

    def enter(self, response: PendingResponse, num_prompts: int) -> None:
        """Admit a request, which must `leave` when the engine has it or its preparation has ended.

        Raises:
            UnavailableError: Too many prompts wait, or the gate is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError
            load = self._engine_load()
            num_waiting = self.num_preparing + load.num_waiting - load.num_free_slots
            if num_waiting > 0 and num_waiting + num_prompts > self._max_waiting:
                raise UnavailableError(
                    "queue_full",
                    f"{num_waiting} prompts are waiting and {self._max_waiting} may (setting max_waiting_prompts): "
                    "send the request again later",
                )
            self._preparing[response] = num_prompts

    def leave(self, response: PendingResponse) -> None:
        """Count a request's prompts no longer. Leaving twice is harmless."""
        self._preparing.pop(response, None)

    def close(self) -> None:
        """Refuse the requests in preparation, and all that come later."""
        with self._lock:
            self._is_closed = True
            responses = list(self._preparing)
        for response in responses:
            response.refuse(ShuttingDownError())
