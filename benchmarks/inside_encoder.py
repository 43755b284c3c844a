# SPDX-License-Identifier: Apache-2.0
"""A model folder's model.py that also runs its embeddings without Triton, inside the server's process.

A request with the id `inside` is answered, as `embedding`, with two numbers: the seconds that its text takes from the
task's `submit` to the response, and those of the tokenizer, the bare model and mean pooling, one after the other.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import hf_triton
from hf_triton.protocol.tensor_values import Array
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest

INSIDE = "inside"


class LocalRequest(InferenceRequest):
    """A request of this process."""

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        super().__init__()
        self._inputs = dict(inputs)
        self.is_done = threading.Event()

    def inputs(self) -> dict[str, Array]:
        return self._inputs

    @property
    def parameters(self) -> dict[str, object]:
        return {}

    def requested_outputs(self) -> list[str]:
        return ["embedding"]

    def add(self, outputs: Mapping[str, Array]) -> None:
        raise NotImplementedError

    def answer(self, outputs: Mapping[str, Array], parameters: Mapping[str, int] | None = None) -> None:
        self.is_done.set()

    def refuse(self, error: hf_triton.HfTritonError) -> None:
        raise error


class TritonPythonModel(hf_triton.TritonPythonModel):
    """Serves, and runs without Triton for requests with the id `inside`."""

    def load(self, checkpoint: Any) -> Any:
        self._bare, self._tokenizer = copy.deepcopy(checkpoint.model), checkpoint.tokenizer
        return checkpoint

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        task = self._dispatcher.service
        submit = task.submit

        def submit_or_run(request: InferenceRequest, config: ResponseConfig) -> None:
            if request.request_id == INSIDE:
                threading.Thread(target=self._run, args=[submit, request, config]).start()
            else:
                submit(request, config)

        task.submit = submit_or_run

    def _run(self, submit: Any, request: InferenceRequest, config: ResponseConfig) -> None:
        inputs = request.inputs()
        started_s = time.perf_counter()
        local = LocalRequest(inputs)
        submit(local, config)
        local.is_done.wait()
        inside_s, started_s = time.perf_counter() - started_s, time.perf_counter()
        self._compute(inputs["text"].item().decode())
        bare_s = time.perf_counter() - started_s
        request.answer({"embedding": np.array([[inside_s, bare_s]], np.float32)})

    @torch.inference_mode()
    def _compute(self, text: str) -> Any:
        encoded = self._tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        states = self._bare(**encoded).last_hidden_state[0]
        return torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
