# SPDX-License-Identifier: Apache-2.0
"""Hundreds of requests at random times to every architecture: greedy text is that of `generate` alone."""

import random
import time
from pathlib import Path

import pytest
import torch

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.runner.cpu import attention
from hf_triton.runner.cpu import decode_attention as one_token
from hf_triton.testing import ARCHITECTURES
from tests.support.architectures import BATCH, CONTINUOUS, WHOLE, build, load, requests
from tests.support.engine import NOT_ROLLING, Client, check, start_engine

NUM_REQUESTS = 120
NUM_BATCH_REQUESTS = 24
SHIPPED = [name for name in ARCHITECTURES if name not in NOT_ROLLING]


@pytest.mark.parametrize("decoding", ["eager", "static"])
@pytest.mark.parametrize("name", [*CONTINUOUS, *WHOLE, *SHIPPED])
def test_the_rolling_engine_writes_what_generate_writes(name: str, decoding: str, tmp_path: Path) -> None:
    model, source = load(name, tmp_path), random.Random(name + decoding)
    engine = start_engine(model, max_rows=source.choice([3, 5, 8]), context_length=256, decoding=decoding)
    assert isinstance(engine, ContinuousBatchingEngine)
    try:
        check(
            model,
            Client(engine),
            requests(NUM_REQUESTS, source),
            pause=lambda: time.sleep(source.choice([0, 0, 0, 0.01])),  # so that they join and leave at odd times
        )
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["llama", "opt", "mistral-window", "gemma3", "deepseek-v3", "gpt-bigcode", "falcon"])
def test_it_does_by_the_kernel_of_one_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_token, "LEAST_WIDTH", 0)
    found: list[bool] = []
    monkeypatch.setattr(attention, "attend", lambda *call: noted(one_token.attend(*call)))

    def noted(result: torch.Tensor | None) -> torch.Tensor | None:
        found.append(result is not None)
        return result

    model, source = load(name, tmp_path), random.Random(name)
    engine = start_engine(model, max_rows=5, context_length=256)
    try:
        check(model, Client(engine), requests(NUM_REQUESTS, source), pause=lambda: None)
    finally:
        engine.close()
    assert sum(found) > NUM_REQUESTS


@pytest.mark.parametrize("name", [*BATCH])
def test_the_batch_engine_writes_what_generate_writes(name: str) -> None:
    model, source = build(*BATCH[name]), random.Random(name)
    engine = start_engine(model, max_rows=5, context_length=256)
    assert isinstance(engine, BatchEngine)
    try:
        check(model, Client(engine), requests(NUM_BATCH_REQUESTS, source), pause=lambda: None)
    finally:
        engine.close()
