# SPDX-License-Identifier: Apache-2.0
"""Which device an engine's thread computes on."""

import threading

import pytest
import torch

from hf_triton.engine.sequence import SequenceGroup
from hf_triton.engine.worker import Worker


class Idle(Worker[SequenceGroup]):
    """An engine without a model."""

    def __init__(self, device: str) -> None:
        super().__init__(torch.device(device), lambda: None)
        self.thread.start()

    def unfinished(self) -> list[SequenceGroup]:
        return []


def test_the_gpu_of_the_model_is_current_in_the_engine_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    for device in ("cpu", "cuda:1"):
        Idle(device).close()
    assert chosen == [("hf_triton-engine", torch.device("cuda:1"))]
