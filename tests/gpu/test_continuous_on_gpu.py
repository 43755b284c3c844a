# SPDX-License-Identifier: Apache-2.0
"""The decode step on a CUDA device: CUDA graphs, eager steps and `generate` give the same output."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_triton.runner.decode import Decoder, DecodingMode
from tests.support.running_sequences import RunningSequences, prompts, schedule
from transformers import AutoModelForCausalLM

from hf_triton.runner import decode
from hf_triton.runner import kv_cache as cache
from hf_triton.runner.calling import Forward
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import SampledTokens
from hf_triton.sampling.sequence_sampler import SequenceSampler
from hf_triton.testing import ARCHITECTURES, build_tiny_checkpoint
from tests.support.architectures import CONTINUOUS, WHOLE, build
from tests.support.engine import NOT_CONTINUOUS
from tests.support.reference import solo_ids
from tests.support.simulated_gpu import HAS_GPU, Device

pytestmark = pytest.mark.full
MODELS = ("llama", "falcon", "gemma3", "mistral-window", "phi3", "gpt-bigcode", "stablelm", "starcoder2")
NOT_CAPTURED = (
    "gpt-neo",  # its local layers take the newest column to be the last one
    "mpt",  # compares the number of columns before the new one with others, in Python
)
LLAMA: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FALCON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "multi_query": True,
    "new_decoder_architecture": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = CONTINUOUS | WHOLE | {"llama": ("LlamaConfig", LLAMA), "falcon": ("FalconConfig", FALCON)}
SHIPPED = [name for name in ARCHITECTURES if name not in (*NOT_CONTINUOUS, *CONFIGS)]


def load(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return build(*CONFIGS[name]).to("cuda", dtype)


def on_host(name: str, folder: Path) -> Any:
    if name in CONFIGS:
        return build(*CONFIGS[name])
    build_tiny_checkpoint(folder, name, eos_token_id=None)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buffers grow, shift and change their buckets often."""
    monkeypatch.setattr(cache, "COLUMN_STEP", 16)
    monkeypatch.setattr(decode, "COLUMN_STEP", 16)
    monkeypatch.setattr(cache, "CUDA_SHAPE", (2, 16))


def run(running: RunningSequences, contexts: list[list[int]]) -> dict[int, list[int]]:
    for verb, number in schedule(len(contexts), max_num_seqs=5):
        if verb == "add":
            running.add(number, contexts[number])
        elif verb == "remove":
            running.remove(number)
        else:
            running.step()
    return running.tokens


def check(name: str, mode: DecodingMode, folder: Path) -> Decoder:
    """The completions are those of `generate`; a simulated device rounds as the host does."""
    plain, contexts = on_host(name, folder), prompts(12 if HAS_GPU else 5)
    model = copy.deepcopy(plain).to("cuda")
    running = RunningSequences(model, mode)
    for number, written in run(running, contexts).items():
        found = running.comparable(contexts[number], written)
        assert found == solo_ids(model if HAS_GPU else plain, contexts[number], len(found))
    return running.decoder


@pytest.mark.parametrize("name", [*CONFIGS, *SHIPPED])
def test_greedy_output_of_graphs_equals_generate(name: str, tmp_path: Path) -> None:
    assert check(name, "cuda_graphs", tmp_path).is_static is (name not in NOT_CAPTURED)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_of_eager_steps_equals_generate(name: str, tmp_path: Path) -> None:
    assert not check(name, "eager", tmp_path).is_static


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_graphs_are_the_eager_ones(name: str, dtype: torch.dtype) -> None:
    model, contexts = load(name, dtype), prompts(12 if HAS_GPU else 5)
    eager, graphs = RunningSequences(model, "eager"), RunningSequences(model, "auto")
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for verb, number in schedule(len(contexts), max_num_seqs=5):
        for running in (eager, graphs):
            if verb == "add":
                running.add(number, contexts[number])
            elif verb == "remove":
                running.remove(number)
        if verb == "step":
            wanted, found = eager.step(), graphs.step()
            assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
            for (_, its), (_, others) in zip(graphs.slots, eager.slots, strict=True):
                its[-1] = others[-1]  # two tokens may be as likely as each other in bfloat16
    assert graphs.decoder.is_static


@pytest.mark.parametrize("name", ["granite4", "falcon-h1"])
def test_a_graph_that_cannot_be_had_leaves_the_states_to_an_eager_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, capture = [], Decoder._capture

    def run_out(decoder: Decoder, *place: Any) -> Any:
        graph = capture(decoder, *place)
        captured.append(graph)
        if not decoder._is_on_trial and len(captured) % 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return graph

    monkeypatch.setattr(Decoder, "_capture", run_out)
    assert check(name, "cuda_graphs", tmp_path).is_static
    assert len(captured) > 5


PLANS = (SamplingParams(9), SamplingParams(9, do_sample=True, top_p=0.9, top_k=5, temperature=0.7, seed=1))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("plans", [PLANS[:1] * 3, PLANS[1:] * 3, [*PLANS, PLANS[0]]], ids=["greedy", "drawn", "mixed"])
def test_step_never_synchronizes_with_the_device(plans: list[SamplingParams]) -> None:
    samplers = [SequenceSampler(plan, 0, []) for plan in plans]
    running = RunningSequences(load("llama"), "cuda_graphs")
    for number, prompt in enumerate(prompts(3, longest=8)):
        running.add(number, prompt)
    running.step()
    SampledTokens(running.step(), samplers).read()  # what is allocated at the first time
    picks = SampledTokens(running.decoder.step(running.memory, running.newest()), samplers)
    try:
        torch.cuda.set_sync_debug_mode("error")
        ahead = SampledTokens(running.decoder.step(running.memory, picks.tokens), samplers, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(picks.read()) == len(ahead.read()) == 3


@pytest.mark.skipif(HAS_GPU, reason="a real device does not say who waited for it")
@pytest.mark.parametrize("name", ["llama", "falcon", "gemma3", "mixtral", "phi3", "deepseek-v3"])
def test_no_layer_of_a_prompt_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    wait = Device.wait

    def note(device: Device, operation: object) -> None:
        waits.append(operation)
        wait(device, operation)

    counts = []
    for num_layers in (2, 4):
        config, arguments = CONFIGS[name]
        forward = Forward(build(config, arguments | {"num_hidden_layers": num_layers, "layer_types": None}).to("cuda"))
        forward.prefill([5, 6, 7])  # what is kept on the device goes there
        with monkeypatch.context() as patch:
            patch.setattr(Device, "wait", note)
            waits.clear()
            forward.prefill([8, 9, 10, 11])
        counts.append(len(waits))
    assert counts[0] == counts[1] <= 5


def test_graphs_survive_when_all_sequences_finish() -> None:
    running = RunningSequences(load("llama"), "cuda_graphs")
    for number in range(2):
        running.add(number, [5, 6, 7])
        running.step()
        before = dict(running.decoder._graphs)
        running.remove(0)
        assert number == 0 or running.decoder._graphs == before
    assert len(running.decoder._graphs) == 1


class Waiting(Forward):
    """A model that looks at its own numbers, which no graph can hold."""

    def __call__(self, *arguments: Any, **others: Any) -> torch.Tensor:
        logits = super().__call__(*arguments, **others)
        return logits if logits.sum().item() > 0 else logits + 0


def test_a_model_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model = load("llama")
    with caplog.at_level(logging.WARNING):
        decoder = Decoder(Waiting(model), "auto")
    assert not decoder.is_static
    assert [record.name for record in caplog.records] == [decode.__name__]
    running, contexts = RunningSequences(model, "eager"), prompts(12)
    running.decoder = decoder
    assert run(running, contexts) == run(RunningSequences(model, "eager"), contexts)
    torch.cuda.empty_cache()  # raises where a capture has broken off
    assert Decoder(Forward(model), "auto").is_static
