# SPDX-License-Identifier: Apache-2.0
"""A model folder's model.py that also runs its engine alone, inside the server's process.

Two processes that run one model differ in speed by some percent, each time in another way, because their weights lie
elsewhere in memory: more than the server costs. So the server is measured beside the engine in its own process.

A request with the id `inside` says in its `text_input` what to run, as JSON:
`{"requests": [[[1, 2], 8]], "width": 16}`. Each request is a prompt's tokens and the number of new ones; `width`
requests are in flight. The response is the seconds that they took.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import hf_triton
from hf_triton.engine.protocols import GenerationEngine
from hf_triton.engine.sequence import Outcome, SequenceGroup, SequenceListener
from hf_triton.protocol.names import PROMPT, TEXT
from hf_triton.protocol.tensor_values import encode_strings
from hf_triton.sampling.params import SamplingParams
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest

INSIDE = "inside"

Request = tuple[list[int], int]
"""A prompt's tokens, and the number of tokens to generate."""


class OnFinish(SequenceListener):
    """Passes outcomes on."""

    def __init__(self, finish: Callable[[Outcome], object]) -> None:
        self._finish = finish

    def on_finish(self, row: int, outcome: Outcome) -> None:
        self._finish(outcome)


def run_requests(engine: GenerationEngine, requests: list[Request], width: int) -> None:
    """The engine, with `width` requests in flight."""
    room, done = threading.Semaphore(width), threading.Semaphore(0)
    outcomes: list[Outcome] = []

    def finish(outcome: Outcome) -> None:
        outcomes.append(outcome)
        room.release()
        done.release()

    for prompt, count in requests:
        room.acquire()
        engine.submit([SequenceGroup(prompt, SamplingParams(count), listener=OnFinish(finish))])
    for _ in requests:
        done.acquire()
    for outcome in outcomes:
        if not isinstance(outcome, list):
            raise outcome


class TritonPythonModel(hf_triton.TritonPythonModel):
    """Serves, and runs its engine alone for requests with the id `inside`."""

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        task = self._dispatcher.service
        submit = task.submit

        def submit_or_run(request: InferenceRequest, config: ResponseConfig) -> None:
            if request.request_id == INSIDE:
                asked: dict[str, Any] = json.loads(request.inputs()[PROMPT].item())
                threading.Thread(target=self._run, args=[task._engine, request, asked]).start()
            else:
                submit(request, config)

        task.submit = submit_or_run

    @staticmethod
    def _run(engine: GenerationEngine, request: InferenceRequest, asked: dict[str, Any]) -> None:
        started_s = time.perf_counter()
        try:
            run_requests(engine, asked["requests"], asked["width"])
        except hf_triton.HfTritonError as error:
            request.refuse(error)
        else:
            request.answer({TEXT: encode_strings([str(time.perf_counter() - started_s)], (1,))})
