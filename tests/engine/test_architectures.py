# SPDX-License-Identifier: Apache-2.0
"""Many requests at random times to every architecture: greedy output equals that of `generate` alone."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.runner.cpu import attention
from hf_triton.runner.cpu import decode_attention as one_token
from hf_triton.testing import ARCHITECTURES
from tests.support.architectures import BATCH, CONTINUOUS, WHOLE, load, requests
from tests.support.engine import NOT_CONTINUOUS, Client, Items, check, greedy_ids, start_engine

NUM_BATCH_REQUESTS = 24
SHIPPED = [name for name in ARCHITECTURES if name not in NOT_CONTINUOUS]
sizes = pytest.mark.parametrize("num_requests", [32, pytest.param(88, marks=pytest.mark.full)])


@contextmanager
def engine_of(model: Any, kind: type, **options: Any) -> Iterator[Client]:
    engine = start_engine(model, context_length=256, **options)
    try:
        assert isinstance(engine, kind)
        yield Client(engine)
    finally:
        engine.close()


@lru_cache(maxsize=1)
def load_with_references(name: str, num_requests: int) -> tuple[Any, Items, list[list[int]]]:
    """A model, requests, and what `generate` generates for them; one computation for both kinds of decoding."""
    with TemporaryDirectory() as folder:
        model = load(name, Path(folder))
    items = requests(num_requests, random.Random(f"{name} {num_requests}"))
    return model, items, greedy_ids(model, items)


@pytest.mark.parametrize("decoding", ["eager", "static"])
@sizes
@pytest.mark.parametrize("name", [*CONTINUOUS, *WHOLE, *SHIPPED])
def test_continuous_engine_equals_generate(name: str, num_requests: int, decoding: str) -> None:
    model, items, expected = load_with_references(name, num_requests)
    source = random.Random(name + decoding)
    options = {"max_num_seqs": source.choice([3, 5, 8]), "decoding": decoding}
    with engine_of(model, ContinuousBatchingEngine, **options) as client:
        pauses_s = [0, 0, 0, 0.01]  # requests join and leave at odd times
        check(model, client, items, lambda: time.sleep(source.choice(pauses_s)), expected=expected)


@sizes
@pytest.mark.parametrize("name", ["llama", "opt", "mistral-window", "gemma3", "deepseek-v3", "gpt-bigcode", "falcon"])
def test_decode_attention_kernel_equals_generate(name: str, num_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_token, "MIN_WIDTH", 0)
    was_used: list[bool] = []
    monkeypatch.setattr(attention, "attend", lambda *call: noted(one_token.attend(*call)))

    def noted(result: torch.Tensor | None) -> torch.Tensor | None:
        was_used.append(result is not None)
        return result

    model, items, expected = load_with_references(name, num_requests)
    with engine_of(model, ContinuousBatchingEngine, max_num_seqs=5) as client:
        check(model, client, items, expected=expected)
    assert sum(was_used) > num_requests


@pytest.mark.parametrize("name", [*BATCH])
def test_batch_engine_equals_generate(name: str) -> None:
    model, items, expected = load_with_references(name, NUM_BATCH_REQUESTS)
    with engine_of(model, BatchEngine, max_num_seqs=5) as client:
        check(model, client, items, expected=expected)
