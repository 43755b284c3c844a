# SPDX-License-Identifier: Apache-2.0
"""Sampling on a CUDA device: one copy there, one wait, and logits that may change as soon as tokens are chosen."""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_triton.sampling import draw
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import SampledToken, SampledTokens, sample_tokens
from hf_triton.sampling.sequence_sampler import SequenceSampler
from tests.support.simulated_gpu import HAS_GPU, Device, OnDevice

simulated = pytest.mark.skipif(HAS_GPU, reason="a real device does not say")
VOCABULARY = 300
DRAWN = SamplingParams(8, do_sample=True, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    draw.is_usable.cache_clear()
    yield
    draw.is_usable.cache_clear()
    torch.cuda.set_sync_debug_mode("default")


def samplers(**changes: Any) -> list[SequenceSampler]:
    params = (dataclasses.replace(DRAWN, seed=seed, **changes) for seed in range(6))
    return [SequenceSampler(each, 0, [1, 2]) for each in params]


def random_logits() -> torch.Tensor:
    return 3 * torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("changes", [{}, {"logprobs": 2}, {"typical_p": 0.9}, {"repetition_penalty": 1.3}], ids=str)
def test_tokens_are_the_host_s_and_nothing_waits_before_they_are_read(changes: dict[str, Any]) -> None:
    expected = sample_tokens(random_logits(), samplers(**changes))
    logits = random_logits().to("cuda")
    draw.prepare_draws(logits)
    torch.cuda.set_sync_debug_mode("error")
    sampled = SampledTokens(logits, samplers(**changes))
    logits.fill_(torch.nan)  # as the next step's graph does
    check(sampled.read(), expected)


def check(found: list[SampledToken], expected: list[SampledToken]) -> None:
    assert [pick.token_id for pick in found] == [pick.token_id for pick in expected]
    for pick, wanted in zip(found, expected, strict=True):
        assert (pick.logprobs is None) is (wanted.logprobs is None)
        if pick.logprobs and wanted.logprobs:
            assert pick.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-4)
            assert [token for token, _ in pick.logprobs.top] == [token for token, _ in wanted.logprobs.top]


class Launches(TorchDispatchMode):
    """Counts operations on the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(each, OnDevice) for each in args)
        return func(*args, **kwargs or {})


@simulated
def test_reading_launches_nothing() -> None:
    sampled = SampledTokens(random_logits().to("cuda"), samplers(logprobs=3))
    with Launches() as launches:
        sampled.read()
    assert launches.count == 0


@simulated
def test_all_parameters_are_one_copy_and_the_draw_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits().to("cuda")
    draw.prepare_draws(logits)
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(Device, "from_host", lambda _, source: copied.append(source))
    with Launches() as launches:
        SampledTokens(logits, samplers())
    assert len(copied) == 1
    # the draw, five rows of what was copied, two of them as float64, and the copy of the tokens to the host
    assert launches.count <= 10


def test_torch_draws_where_the_kernel_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    expected = sample_tokens(random_logits(), samplers())
    monkeypatch.setattr(draw, "draw", fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(sample_tokens(random_logits().to("cuda"), samplers()), expected)
    (record,) = caplog.records
    assert record.getMessage() == (
        "no sampling kernel for torch.float32 on cuda:0 (RuntimeError: Failed to find C compiler): torch draws tokens, "
        "slower"
    )


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = draw.draw
    monkeypatch.setattr(draw, "draw", lambda scores, params: right(scores, params) + int(scores.is_cuda))
    check(sample_tokens(random_logits().to("cuda"), samplers()), sample_tokens(random_logits(), samplers()))


@pytest.mark.skipif(not HAS_GPU, reason="there is no real device")
def test_the_kernel_is_used() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert draw.is_usable(torch.device("cuda", 0), dtype, 128_256)
