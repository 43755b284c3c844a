# SPDX-License-Identifier: Apache-2.0
"""The batch engine, the sampler and checkpoint loading on CUDA devices."""

import copy
import dataclasses
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.hub.checkpoint import Checkpoint, Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import sample_tokens
from hf_triton.sampling.sequence_sampler import SequenceSampler
from hf_triton.settings import ModelSettings
from hf_triton.testing import build_tiny_checkpoint
from tests.support.architectures import BATCH, build, requests
from tests.support.engine import Client, check, greedy_ids, start_engine
from tests.support.reference import load_reference
from tests.support.sampling import ONE_BY_ONE, VOCABULARY, RandomSequence
from tests.support.simulated_gpu import HAS_GPU

pytestmark = pytest.mark.full


def check_beside_generate(engine: Any, reference: Any) -> None:
    items = requests(12, random.Random(5))
    check(reference, Client(engine), items, expected=greedy_ids(reference, items))


@pytest.mark.parametrize("name", ["deepseek-v3.2", "reformer"])
def test_batch_engine_equals_generate(name: str) -> None:
    plain = build(*BATCH[name])
    model = copy.deepcopy(plain).to("cuda")
    with closing(start_engine(model, max_num_seqs=4, context_length=128)) as engine:
        assert not isinstance(engine, ContinuousBatchingEngine)
        check_beside_generate(engine, model if HAS_GPU else plain)


def test_device_samples_what_the_host_samples() -> None:
    source = random.Random(0)
    logits = torch.randn(4 * len(ONE_BY_ONE), VOCABULARY, generator=torch.Generator().manual_seed(0)) * 4

    def samplers() -> list[SequenceSampler]:
        source.seed(1)
        rows = []
        for number, arguments in enumerate([*ONE_BY_ONE.values()] * 4):
            plan = SamplingParams(99, do_sample=number % 2 == 0, seed=number, **arguments)
            rows.append(RandomSequence(source).sampler(dataclasses.replace(plan, logprobs=number % 3 or None)))
        return rows

    on_host, on_device = sample_tokens(logits, samplers()), sample_tokens(logits.to("cuda"), samplers())
    assert [pick.token_id for pick in on_device] == [pick.token_id for pick in on_host]
    for found, wanted in zip(on_device, on_host, strict=True):
        assert (found.logprobs is None) is (wanted.logprobs is None)
        if found.logprobs and wanted.logprobs:
            assert found.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-4)


def load(folder: Path, placement: Placement, **settings: Any) -> Checkpoint:
    chosen = ModelSettings(huggingface_model=str(folder), **settings)
    return load_checkpoint(Hub(folder, chosen, {}), chosen, placement)


@pytest.mark.parametrize(("name", "is_continuous"), [("llama", True), ("falcon", True), ("t5", False), ("bart", False)])
def test_a_checkpoint_is_served_from_its_device(name: str, is_continuous: bool, tmp_path: Path) -> None:
    last = torch.cuda.device_count() - 1
    build_tiny_checkpoint(tmp_path, name, eos_token_id=None)
    model = load(tmp_path, Placement("GPU", last)).model
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda", last)}
    with closing(start_engine(model, max_num_seqs=5, context_length=128)) as engine:
        assert isinstance(engine, ContinuousBatchingEngine) is is_continuous
        check_beside_generate(engine, model if HAS_GPU else load_reference(tmp_path).model)


def test_a_device_that_is_not_there_is_said() -> None:
    num_devices = torch.cuda.device_count()
    with pytest.raises(Exception, match=f"on GPU {num_devices}, and PyTorch .* sees {num_devices} GPUs"):
        Placement("GPU", num_devices).device_map()
