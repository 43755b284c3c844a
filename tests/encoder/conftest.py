# SPDX-License-Identifier: Apache-2.0
"""Fixtures: one thread, and engines that are closed after the test."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_triton.encoder.engine import EncoderEngine
from tests.support.encoders import ObservedForward, StartEncoder, build_model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bert() -> Any:
    return build_model("bert", "embeddings")


@pytest.fixture
def forward(bert: Any) -> ObservedForward:
    """A forward of mean-pooled embeddings, packed."""
    return ObservedForward(
        bert, ("last_hidden_state",), per_token=True, reduce=lambda states: states.mean(0), way="packed"
    )


@pytest.fixture
def start() -> Iterator[StartEncoder]:
    """Starts an engine: `start(forward, max_batch_tokens=...)`."""
    engines: list[EncoderEngine] = []

    def start(forward: ObservedForward, **options: Any) -> EncoderEngine:
        engines.append(EncoderEngine(forward, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
