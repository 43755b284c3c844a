# SPDX-License-Identifier: Apache-2.0
"""A request that keeps its responses, and a sender that sends at once."""

import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hf_triton.errors import HfTritonError
from hf_triton.protocol.declared_ports import OUTPUTS
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.sender import ResponseSender
from hf_triton.triton_backend.cancellation import RequestPoller

POLLER = RequestPoller(interval_s=0.005)


class InlineSender(ResponseSender):
    def __init__(self) -> None:
        pass

    def put(self, send: Callable[[], None]) -> None:
        self._run(send)


class Collector(InferenceRequest):
    """Keeps the deltas and the one final response."""

    def __init__(self, timeout_s: float | None = None) -> None:
        super().__init__("", timeout_s)
        self.pieces: list[tuple[int, str]] = []
        self.parts: list[list[str]] = []
        self.results: list[list[Any] | HfTritonError] = []
        self.outputs: dict[str, Any] = {}
        self.response_parameters: Mapping[str, int] = {}
        self.is_finished = threading.Event()
        self.asks_whether_cancelled: Callable[[], bool] = lambda: False
        POLLER.add(self)

    def is_cancelled(self) -> bool:
        return self.asks_whether_cancelled()

    def inputs(self) -> dict[str, Any]:
        return {}

    @property
    def parameters(self) -> dict[str, object]:
        return {}

    def requested_outputs(self) -> list[str]:
        return []

    def add(self, outputs: Mapping[str, Any]) -> None:
        assert not self.results, "a delta after the final response"
        self.parts.append([element.decode() for element in outputs["text_output"]])
        self.pieces += [(index, piece) for index, piece in enumerate(self.parts[-1]) if piece]

    def answer(self, outputs: Mapping[str, Any], parameters: Mapping[str, int] | None = None) -> None:
        values = {name: array.ravel().tolist() for name, array in outputs.items()}
        self.outputs, self.response_parameters = dict(outputs), parameters or {}
        rows = zip(*values.values(), strict=True)
        self._end([SimpleNamespace(**dict(zip(values, map(_plain, row), strict=True))) for row in rows])

    def refuse(self, error: HfTritonError) -> None:
        self._end(error)

    def _end(self, result: list[Any] | HfTritonError) -> None:
        self._is_answered = True
        self.results.append(result)
        self.is_finished.set()


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def config_of(
    *, streams: bool = False, sender: ResponseSender | None = None, output_names: Sequence[str] = tuple(OUTPUTS)
) -> ResponseConfig:
    names = [name for name in output_names if name != "text"]
    return ResponseConfig(names, is_decoupled=streams, streams=streams, sender=sender or InlineSender())
