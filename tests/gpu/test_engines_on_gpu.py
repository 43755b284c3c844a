# SPDX-License-Identifier: Apache-2.0
"""Both engines, the sampler and checkpoint loading on CUDA devices."""

import copy
import dataclasses
import random
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from hf_triton.runner.decode import DecodingMode
from tests.support.running_sequences import prompts

from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.executor import Executor
from hf_triton.engine.scheduler import Scheduler
from hf_triton.hub.checkpoint import Checkpoint, Placement, load_checkpoint
from hf_triton.hub.resolve import Hub
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import sample_tokens
from hf_triton.sampling.sequence_sampler import SequenceSampler
from hf_triton.settings import ModelSettings
from hf_triton.testing import build_tiny_checkpoint
from tests.support.architectures import BATCH, CONTINUOUS, WHOLE, build
from tests.support.engine import Client, PrefixHits, start_engine, token_ids
from tests.support.reference import load_reference, solo_ids
from tests.support.sampling import ONE_BY_ONE, VOCABULARY, RandomSequence
from tests.support.simulated_gpu import CAPTURE, HAS_GPU, Device

pytestmark = pytest.mark.full
PLANS = {
    "greedy": SamplingParams(40),
    "drawn": SamplingParams(40, do_sample=True, temperature=0.8, top_k=20, top_p=0.9, seed=3),
    "penalised": SamplingParams(40, repetition_penalty=1.2),
}


def check(engine: Any, reference: Any, count: int = 12) -> None:
    """Output is that of `generate`, also for prompts that begin alike."""
    client, source = Client(engine), random.Random(1)
    contexts = prompts(count, longest=40)
    contexts += [[*source.choice(contexts), 5, number + 6] for number in range(count)]
    items = [(prompt, SamplingParams(1 + number % 23)) for number, prompt in enumerate(contexts)]
    for item in items:
        client.submit(*item)
    for (prompt, plan), outcome in zip(items, client.outcomes(), strict=True):
        assert token_ids(outcome) == [solo_ids(reference, prompt, plan.max_new_tokens)]


@pytest.mark.parametrize("decoding", ["eager", "cuda_graphs"])
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "phi3-longrope", "granite4"])
def test_continuous_engine_equals_generate(name: str, decoding: DecodingMode) -> None:
    plain = build(*CONTINUOUS[name])
    model = copy.deepcopy(plain).to("cuda")
    with closing(ContinuousBatchingEngine(model, max_num_seqs=5, decoding=decoding)) as engine:
        check(engine, model if HAS_GPU else plain)


@pytest.mark.parametrize("decoding", ["eager", "cuda_graphs"])
@pytest.mark.parametrize("name", ["granite4", "falcon-h1"])
def test_cached_states_on_a_device_are_continued(name: str, decoding: DecodingMode) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(64, 32, per_weights=4))
    plain, shares = build(*CONTINUOUS[name]), PrefixHits()
    model = copy.deepcopy(plain).to("cuda")
    with closing(
        ContinuousBatchingEngine(model, max_num_seqs=5, decoding=decoding, observer=shares, config=config)
    ) as engine:
        check(engine, model if HAS_GPU else plain)
    assert sum(count > 0 for count in shares.counts) > 5


@pytest.mark.parametrize("decoding", ["eager", "cuda_graphs"])
@pytest.mark.parametrize("name", [*WHOLE])
def test_prompts_without_chunked_prefill(name: str, decoding: DecodingMode) -> None:
    plain = build(*WHOLE[name])
    model = copy.deepcopy(plain).to("cuda")
    with closing(start_engine(model, max_num_seqs=5, context_length=128, decoding=decoding)) as engine:
        assert isinstance(engine, ContinuousBatchingEngine)
        check(engine, model if HAS_GPU else plain)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "reformer"])
def test_batch_engine_equals_generate(name: str) -> None:
    plain = build(*BATCH[name])
    model = copy.deepcopy(plain).to("cuda")
    with closing(start_engine(model, max_num_seqs=4, context_length=128)) as engine:
        assert not isinstance(engine, ContinuousBatchingEngine)
        check(engine, model if HAS_GPU else plain, count=6)


@pytest.mark.parametrize(
    "name", ["granite", "codegen", "gpt-bigcode", "deepseek-v3", "llama4", "phi3-longrope", "qwen3-next"]
)
def test_a_model_on_several_devices(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    plain = build(*CONTINUOUS[name])
    model = copy.deepcopy(plain)
    with closing(ContinuousBatchingEngine(dispatch_model(model, in_two(model)), max_num_seqs=5)) as engine:
        assert engine.forward.device == torch.device("cuda", 0)
        check(engine, plain)


def in_two(model: torch.nn.Module) -> dict[str, str]:
    """A device map: the first half of the layers and what is before them, and the rest."""
    base = next(iter(model.named_children()))[0]
    layers = [name for name, child in getattr(model, base).named_children() if isinstance(child, torch.nn.ModuleList)]
    places = {}
    for name, child in getattr(model, base).named_children():
        if name in layers[:1]:
            half = len(child) // 2
            places |= {f"{base}.{name}.{index}": f"cuda:{int(index >= half)}" for index in range(len(child))}
        else:
            places[f"{base}.{name}"] = "cuda:1" if places and "emb" not in name else "cuda:0"
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return places | {name: "cuda:0" if is_tied else "cuda:1" for name, _ in model.named_children() if name != base}


# --- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(HAS_GPU, reason="a real device does not say who waited for it")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_decoding_waits_for_its_tokens_alone(plan: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    reads = threading.local()
    wait = Device.wait

    def note(device: Device, operation: object) -> None:
        wait(device, operation)
        if threading.current_thread().name == "hf_triton-engine" and not getattr(reads, "now", False):
            waits.append(str(operation))

    def during_prefill(owner: type, name: str) -> None:
        """Prefill may wait for the device."""
        method = getattr(owner, name)

        def run(*arguments: object, **options: object) -> object:
            reads.now = True
            try:
                return method(*arguments, **options)
            finally:
                reads.now = False

        monkeypatch.setattr(owner, name, run)

    during_prefill(Scheduler, "_schedule_prefill")
    during_prefill(Scheduler, "_update_prefill")
    during_prefill(Executor, "_prefill")
    with closing(ContinuousBatchingEngine(build(*CONTINUOUS["granite"]).to("cuda"), max_num_seqs=8)) as engine:
        monkeypatch.setattr(Device, "wait", note)
        client = Client(engine)
        for prompt in prompts(12):
            client.submit(prompt, plan)
        assert all(len(ids) == 40 for outcome in client.outcomes() for ids in token_ids(outcome))
    assert set(waits) <= {CAPTURE}


# --- sampler ---------------------------------------------------------------------------------------------------------


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


# --- from a checkpoint -----------------------------------------------------------------------------------------------


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
        check(engine, model if HAS_GPU else load_reference(tmp_path).model)


def test_a_device_that_is_not_there_is_said() -> None:
    num_devices = torch.cuda.device_count()
    with pytest.raises(Exception, match=f"on GPU {num_devices}, and PyTorch .* sees {num_devices} GPUs"):
        Placement("GPU", num_devices).device_map()
