# SPDX-License-Identifier: Apache-2.0
"""Many requests at random times to every architecture: greedy output equals that of `generate` alone."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.runner.cpu import paged_attention as kernel
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import ARCHITECTURES
from tests.support.architectures import BATCH, CONTINUOUS, WHOLE, build, load, requests, some_in_make_test
from tests.support.engine import NOT_CONTINUOUS, Client, Items, check, greedy_ids, only, start_engine, token_ids

NUM_BATCH_REQUESTS = 16
BLOCK_SIZE, NUM_BLOCKS = 16, 12
"""Of a pool that a few sequences fill: the longest has 8 blocks."""
SHIPPED = [name for name in ARCHITECTURES if name not in NOT_CONTINUOUS]
SHIPPED_BATCH = ["bloom", "mpt", "falcon-rw"]
NUM_REQUESTS = 24


@contextmanager
def engine_of(model: Any, kind: type, **options: Any) -> Iterator[Any]:
    engine = start_engine(model, context_length=256, **options)
    try:
        assert isinstance(engine, kind)
        yield engine
    finally:
        engine.close()


def small_pool(seed: str) -> dict[str, Any]:
    """Options of an engine that preempts, shares blocks and cuts contexts."""
    chunk_sizes = ChunkSizes(random.Random(seed).choice([7, 16, 40]), 24)
    config = EngineConfig(block_size=BLOCK_SIZE, chunk_sizes=chunk_sizes)
    options = {"max_num_seqs": 6, "max_cache_tokens": NUM_BLOCKS * BLOCK_SIZE, "config": config}
    return options | {"prefix_state_fraction": 1.0}


def load_with_references(name: str, num_requests: int) -> tuple[Any, Items, list[list[int]]]:
    with TemporaryDirectory() as folder:
        model = load(name, Path(folder))
    items = requests(num_requests, random.Random(f"{name} {num_requests}"))
    return model, items, greedy_ids(model, items)


@pytest.mark.parametrize("name", some_in_make_test([*CONTINUOUS, *WHOLE, *SHIPPED]))
def test_continuous_engine_equals_generate(name: str) -> None:
    model, items, expected = load_with_references(name, NUM_REQUESTS)
    source, pauses_s = random.Random(name), [0, 0, 0, 0.01]  # requests join and leave at odd times
    with engine_of(model, ContinuousBatchingEngine, **small_pool(name)) as engine:
        for item, ids in zip(items[:4], expected, strict=False):
            assert token_ids(Client(engine).ask(*item)) == [ids]
        check(model, Client(engine), items, lambda: time.sleep(source.choice(pauses_s)), expected=expected)
        check_prompt_logprobs(model, Client(engine), items[4][0])


def check_prompt_logprobs(model: Any, client: Client, prompt: list[int]) -> None:
    with torch.inference_mode():
        logprobs = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
    scored = only(client.ask(prompt, SamplingParams(1, prompt_logprobs=0))).prompt_logprobs
    assert scored is not None
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert [token.logprob for token in scored] == pytest.approx(expected, abs=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "mistral-window", "falcon", "lfm2"])
def test_decode_attention_kernel_equals_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MIN_WIDTH", 0)
    was_used: list[bool] = []
    attend = kernel.PagedKernel.__call__

    def noted(*call: Any) -> torch.Tensor | None:
        result = attend(*call)
        was_used.append(result is not None)
        return result

    monkeypatch.setattr(kernel.PagedKernel, "__call__", noted)
    model, items, expected = load_with_references(name, NUM_REQUESTS)
    with engine_of(model, ContinuousBatchingEngine, **small_pool(name)) as engine:
        check(model, Client(engine), items, expected=expected)
    assert sum(was_used) > len(items)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-moe"])
def test_bfloat16_differs_by_rounding_alone(name: str) -> None:
    """Nearly all texts equal those of `generate`; a softmax in another type than the model's loses half of them."""
    model = build(*CONTINUOUS[name]) if name in CONTINUOUS else load_with_references(name, 1)[0]
    model = model.bfloat16()
    items = requests(32, random.Random(name))
    with engine_of(model, ContinuousBatchingEngine, **small_pool(name)) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        found = [token_ids(outcome) for outcome in client.outcomes()]
    num_equal = sum(ids == [wanted] for ids, wanted in zip(found, greedy_ids(model, items), strict=True))
    assert num_equal >= 0.9 * len(items)


@pytest.mark.parametrize("name", some_in_make_test([*BATCH, *SHIPPED_BATCH]))
def test_batch_engine_equals_generate(name: str) -> None:
    model, items, expected = load_with_references(name, NUM_BATCH_REQUESTS)
    with engine_of(model, BatchEngine, max_num_seqs=5) as engine:
        check(model, Client(engine), items, expected=expected)
