# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captured at load, by numbers of tokens and rows alone; the log says why a model runs eagerly."""

import copy
import gc
import inspect
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.protocols import Observer
from hf_triton.errors import CheckpointError
from hf_triton.runner import device_step
from hf_triton.runner.cuda import fuse
from hf_triton.runner.device_step import step_sizes
from hf_triton.runner.lora import adapter_slots
from hf_triton.runner.lora.adapter_slots import MAX_SLOTS
from hf_triton.runner.lora.model_adapters import Adapter, Adapters
from hf_triton.runner.model_runner import PACKED, ModelRunner
from hf_triton.runner.step import AdmittedSequence, Step, TokenRange
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.gpu.conftest import Replays
from tests.support.adapters import generate_with, save_adapter
from tests.support.architectures import load, requests
from tests.support.engine import Client, check, greedy_ids, start_engine, token_ids
from tests.support.simulated_gpu import HAS_GPU, Device

pytestmark = pytest.mark.full
PROMPT = [5, 6, 7, 8]


class Proposals(Observer):
    num_accepted = 0

    def on_proposal(self, num_proposed: int, num_accepted: int) -> None:
        self.num_accepted += num_accepted


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[tuple[ContinuousBatchingEngine, Any]]:
    """An engine and a copy of its model on the CPU."""
    plain = load("llama", tmp_path)
    model = copy.deepcopy(plain).to("cuda")
    with closing(start_engine(model, max_num_seqs=6, context_length=1024, decoding="cuda_graphs")) as engine:
        yield engine, model if HAS_GPU else plain


def test_steps_with_and_without_chunks_replay_the_same_graphs(
    llama: tuple[ContinuousBatchingEngine, Any], replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, reference = llama
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)  # none is captured after the load
    items = requests(24, random.Random(5))
    check(reference, Client(engine), items, expected=greedy_ids(reference, items))
    assert replays.num_eager == 0
    assert len({size.num_tokens for size in replays.sizes}) > 4, "of a token for each sequence, and of chunks"


def test_a_step_s_numbers_are_one_copy(
    simulated: Device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if simulated is None:
        pytest.skip("a real device does not count")
    runner = ModelRunner(load("llama", tmp_path).to("cuda"), PACKED)
    runner.allocate(80)
    assert runner.capture(5) is None
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(Device, "from_host", lambda _, source: copied.append(source))
    for num_steps, end in enumerate((3, 600), 1):  # of a replay, and of a step that runs eagerly
        tables = list(range(40)), list(range(40, 80))
        runner.run(Step(tuple(TokenRange(at, 0, end, [5] * end, tables[at], end, samples=(at,)) for at in range(2))))
        assert len(copied) == num_steps


def test_a_long_prompt_s_steps_replay(llama: tuple[ContinuousBatchingEngine, Any], replays: Replays) -> None:
    engine, reference = llama
    source = random.Random(3)
    items = [([source.randrange(3, 380) for _ in range(600)], SamplingParams(6)), (PROMPT, SamplingParams(6))]
    check(reference, Client(engine), items, expected=greedy_ids(reference, items))
    assert replays.num_eager == 0
    assert max(size.num_tokens for size in replays.sizes) > 512


def test_sequences_that_share_a_prefix_s_blocks_many_times_replay(replays: Replays, tmp_path: Path) -> None:
    runner = ModelRunner(load("llama", tmp_path).to("cuda"), PACKED)
    runner.allocate(20)
    assert runner.capture(64) is None
    shared, num_trials = list(range(16)), replays.num_eager
    runner.run(Step((TokenRange(0, 0, 255, [5] * 255, shared, 255),)))
    logits = runner.run(Step(tuple(TokenRange(at, 255, 256, [5], shared, 256, samples=(at,)) for at in range(64))))
    assert replays.num_eager == num_trials
    assert len(logits) == 64
    assert (logits - logits[:1]).abs().max() < 1e-5


def test_a_step_of_more_blocks_than_its_graphs_have_room_for_runs_eagerly(
    llama: tuple[ContinuousBatchingEngine, Any], replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, reference = llama
    assert engine.runner._graphs is not None
    monkeypatch.setattr(engine.runner._graphs, "_num_tables", 2)
    items = [([7] * 30, SamplingParams(8))]
    check(reference, Client(engine), items, expected=greedy_ids(reference, items))
    assert replays.num_eager > 1, "those with three blocks"
    assert replays.sizes, "those with two"


def test_scored_prompts_have_a_row_for_each_token(
    llama: tuple[ContinuousBatchingEngine, Any], replays: Replays
) -> None:
    engine, reference = llama
    outcome = Client(engine).ask(PROMPT * 5, SamplingParams(2, prompt_logprobs=1))
    assert replays.num_eager == 1, "20 rows, and no graph has more than the six of its sequences"
    logprobs = reference(torch.tensor([PROMPT * 5], device=reference.device)).logits[0].log_softmax(-1).tolist()
    assert isinstance(outcome, list)
    scores = outcome[0].prompt_logprobs
    assert scores is not None
    expected = [row[token] for row, token in zip(logprobs, (PROMPT * 5)[1:], strict=False)]
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-3)


def test_a_sequence_beyond_the_switch_of_long_rope_runs_eagerly(replays: Replays, tmp_path: Path) -> None:
    plain = load("phi3-longrope", tmp_path)
    model = copy.deepcopy(plain).to("cuda")
    with closing(start_engine(model, max_num_seqs=5, context_length=128, decoding="cuda_graphs")) as engine:
        switch, num_trials = engine.runner.switch_length, len(replays.sizes)
        items = [([9] * (switch - 4), SamplingParams(12)), (PROMPT, SamplingParams(4))]
        check(plain, Client(engine), items, expected=greedy_ids(plain, items))
    assert 0 < len(replays.sizes) - num_trials <= 6, "before the switch"


# --- adapters --------------------------------------------------------------------------------------------------------


class Adapted:
    """An engine whose graphs were captured while adapters were loaded."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, configs: dict[str, dict[str, Any]]) -> None:
        monkeypatch.setattr(device_step, "NUM_TOKENS", (2, 8, 128))
        self.folder = folder
        self.checkpoint = build_tiny_checkpoint(folder / "model", "llama", eos_token_id=None, tie_word_embeddings=False)
        model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32)
        model = model.eval().to("cuda")
        fuse(model)
        self.adapters = Adapters(model)
        self.loaded = {name: self.load(name, **config) for name, config in configs.items()}
        given: dict[str, Any] = {"max_num_seqs": 12, "context_length": 128, "decoding": "cuda_graphs"}
        self.engine = start_engine(model, adapters=self.adapters, **given)
        self.num_eager = 0
        run_eagerly = ModelRunner._run_eagerly

        def count(*given: Any) -> torch.Tensor:
            self.num_eager += 1
            return run_eagerly(*given)

        monkeypatch.setattr(ModelRunner, "_run_eagerly", count)

    def load(self, name: str, **config: Any) -> Adapter:
        return self.adapters.load(save_adapter(self.checkpoint, self.folder / name, **config), name)

    def check(self, *chosen: Adapter | None) -> None:
        """Generate with these adapters side by side, and compare with peft alone."""
        client = Client(self.engine)
        prompts = [[*PROMPT, 10 + at] for at in range(len(chosen))]
        for prompt, adapter in zip(prompts, chosen, strict=True):
            client.submit(prompt, SamplingParams(8), adapter=adapter)
        found = [ids for outcome in client.outcomes() for ids in token_ids(outcome)]
        for prompt, adapter, ids in zip(prompts, chosen, found, strict=True):
            assert ids == generate_with(self.checkpoint, self.folder / adapter.name if adapter else None, prompt, 8)

    def logits(self, *chosen: Adapter | None) -> torch.Tensor:
        """Logits of a step of a chunk and one token behind it, for each of these adapters."""
        runner = self.engine.runner
        admitted = tuple(AdmittedSequence(at, each.key if each else None) for at, each in enumerate(chosen))
        ranges = [TokenRange(at, 0, 3, [5, 6, 7 + at], [at], 4) for at in range(len(chosen))]
        runner.run(Step(tuple(ranges), admitted))
        ranges = [TokenRange(at, 3, 4, [9], [at], 4, samples=(at,)) for at in range(len(chosen))]
        logits: torch.Tensor = runner.run(Step(tuple(ranges))).cpu()
        runner.run(Step((TokenRange(99, 0, 1, [5], [0], 1),), finished=tuple(range(len(chosen)))))
        return logits


ALL: dict[str, Any] = {"target_modules": "all-linear", "r": 6}
QUERY: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 20, "seed": 1}


def test_steps_with_adapters_are_replayed(
    tmp_path: Path, replays: Replays, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapted = Adapted(tmp_path, monkeypatch, {"all": ALL, "query": QUERY})
    with closing(adapted.engine):
        first, second = adapted.loaded.values()
        adapted.check(first, None, second, None, first)
        adapted.check(None)
        del first
        adapted.loaded.clear()
        others = [adapted.load(f"late{at}", seed=10 + at, r=1 + at % 4) for at in range(MAX_SLOTS)]
        gc.collect()
        adapted.adapters.sweep()
        adapted.check(None, *others)  # in the slots of the former
        adapted.check(second, *others[:3], second)
        assert adapted.num_eager == 0
        assert replays.num_eager == 0
        monkeypatch.setattr(ModelRunner, "_bring_adapters", lambda *_: False)
        adapted.check(second, None)
        assert adapted.num_eager > 0
    assert "eagerly" not in caplog.text


def test_logits_of_adapters_are_the_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = Adapted(tmp_path, monkeypatch, {"all": ALL, "query": QUERY, "more": ALL | {"seed": 7}})
    with closing(adapted.engine):
        first, second, third = adapted.loaded.values()
        rows = first, None, second, third, None, first
        replayed, base = adapted.logits(*rows), adapted.logits(*[None] * 6)
        assert adapted.num_eager == 0
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "_bring_adapters", lambda *_: False)
            eager = adapted.logits(*rows)
        assert adapted.num_eager == 2
        torch.testing.assert_close(replayed, eager, rtol=0, atol=1e-5)
        assert torch.equal(base[[1, 4]], replayed[[1, 4]]), "a token without an adapter has nothing added"
        assert (replayed - base)[[0, 2, 3, 5]].abs().amax(-1).min() > 1e-2
        assert torch.equal(adapted.logits(*[None] * 6), base)


def test_an_adapter_that_overflows_harms_no_other_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = Adapted(tmp_path, monkeypatch, {"all": ALL, "query": QUERY})
    with closing(adapted.engine):
        first, second = adapted.loaded.values()
        expected = adapted.logits(None, second)
        for layer in adapted.engine.runner.model.modules():
            if first.key in getattr(layer, "lora_A", ()):
                layer.lora_A[first.key].weight.data.fill_(3e38)
        adapted.adapters._slots._slot_of.clear()  # type: ignore[union-attr]
        found = adapted.logits(None, second, first)
        assert adapted.num_eager == 0
        assert not found[2].isfinite().all()
        torch.testing.assert_close(found[:2], expected, rtol=0, atol=1e-5)


def test_adapters_without_a_slot_run_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reasons: list[tuple[dict[str, Any], str]] = [
        ({"r": 7}, "its rank 7 is larger than 6, the largest at load"),
        ({"target_modules": ["k_proj"]}, "k_proj, which no adapter did at load"),
        ({"target_modules": ["lm_head", "q_proj"]}, "lm_head, which computes logits"),
        ({"lora_bias": True}, "q_proj by other means"),
        ({"trainable_token_indices": [5]}, "embed_tokens by other means"),
    ]
    adapted = Adapted(tmp_path, monkeypatch, {"first": {"target_modules": ["q_proj", "v_proj"], "r": 6}})
    with closing(adapted.engine):
        others = []
        for number, (config, words) in enumerate(reasons):
            others.append(adapted.load(f"other{number}", **{"target_modules": ["q_proj"], **config}))
            assert words in caplog.text
            assert f"adapter other{number}: its steps run eagerly" in caplog.text
        adapted.check(adapted.loaded["first"], None)
        assert adapted.num_eager == 0
        adapted.check(adapted.loaded["first"], *others, None)
        assert adapted.num_eager > 0


def test_more_adapters_than_slots_run_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = Adapted(tmp_path, monkeypatch, {f"number{at}": {"seed": at} for at in range(MAX_SLOTS + 1)})
    with closing(adapted.engine):
        adapted.check(*list(adapted.loaded.values())[1:])
        assert adapted.num_eager == 0
        adapted.check(*adapted.loaded.values())
        assert adapted.num_eager > 0


def test_a_layer_whose_sums_are_not_peft_s_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    add = adapter_slots._add

    def wrong(name: str, *given: Any) -> torch.Tensor:
        output = add(name, *given)
        return output + 1 if "k_proj" in name else output

    monkeypatch.setattr(adapter_slots, "_add", wrong)
    adapted = Adapted(tmp_path, monkeypatch, {"all": ALL, "query": QUERY})
    with closing(adapted.engine):
        assert "adapter all: its steps run eagerly" in caplog.text
        adapted.check(adapted.loaded["query"], None)
        assert adapted.num_eager == 0
        adapted.check(adapted.loaded["all"], None)
        assert adapted.num_eager > 0


def test_a_model_without_adapters_at_load_runs_those_that_come_eagerly(
    tmp_path: Path, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = Adapted(tmp_path, monkeypatch, {})
    with closing(adapted.engine):
        assert adapted.engine.runner._adapter_graphs is None
        adapted.check(adapted.load("late"), None)
        assert adapted.num_eager > 0
        adapted.check(None)
        assert replays.sizes


def test_steps_with_proposals_replay_graphs_that_have_a_row_for_each_token(replays: Replays, tmp_path: Path) -> None:
    plain, counts = load("llama", tmp_path), Proposals()
    plain.generation_config.eos_token_id = None
    plain.lm_head.weight.data[8:] = 0  # a text of eight tokens repeats itself
    plain.lm_head.weight.data[:8] *= 40
    items = [([start, *range(20, 32)] * 4, SamplingParams(40)) for start in range(3, 7)]
    with closing(start_engine(plain, max_num_seqs=4)) as alone:
        expected = [token_ids(Client(alone).ask(*item)) for item in items]
    config = EngineConfig(proposal_cost=1e-4)
    options: dict[str, Any] = {"prompt_lookup": 5, "config": config, "observer": counts, "context_length": 128}
    model = copy.deepcopy(plain).to("cuda")
    with closing(start_engine(model, max_num_seqs=4, decoding="cuda_graphs", **options)) as engine:
        replays.num_eager, client = 0, Client(engine)
        for item in items:
            client.submit(*item)
        assert [token_ids(outcome) for outcome in client.outcomes()] == expected
    assert counts.num_accepted > 20
    assert replays.num_eager == 0
    assert any(size.num_rows > 4 for size in replays.sizes)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_sequences", "count"), [(1, 27), (5, 27), (64, 27), (256, 43)])
def test_about_two_dozen_sizes(max_sequences: int, count: int) -> None:
    sizes = step_sizes(max_sequences)
    assert len(sizes) == count
    assert [size.num_tokens for size in sizes] == sorted(size.num_tokens for size in sizes)
    for num_tokens in range(1, 1025):
        most = min(num_tokens, max_sequences)
        fit = [size for size in sizes if size.num_tokens >= num_tokens and size.num_rows >= most <= size.num_sequences]
        assert fit[0].num_tokens < num_tokens + max(64, num_tokens // 4), "little is padded"


# --- falling back ----------------------------------------------------------------------------------------------------


def wait_in_forward(model: Any) -> None:
    forward = model.forward

    def waiting(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits.sum().item()
        return output

    waiting.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = waiting


def test_a_model_that_cannot_be_captured_runs_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = load("llama", tmp_path)
    model = copy.deepcopy(plain).to("cuda")
    wait_in_forward(model)
    with closing(start_engine(model, max_num_seqs=5, context_length=128)) as engine:
        items = requests(6, random.Random(5))
        check(plain, Client(engine), items, expected=greedy_ids(plain, items))
    assert "runs eagerly, up to four times slower while few sequences run, as there are no CUDA graphs: " in caplog.text
    assert "called a synchronizing CUDA operation" in caplog.text
    assert torch.cuda.get_sync_debug_mode() in ("default", 0)


def test_a_capture_that_fails_leaves_the_thread_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["the thread's"]

    @contextmanager
    def capture(*_: Any, **__: Any) -> Iterator[None]:
        current[0] = "the capture's"  # torch's own stays on it where the end of a capture raises
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def stream(entered: str) -> Iterator[None]:
        before, current[0] = current[0], entered
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[0])
    model = load("llama", tmp_path).to("cuda")
    runner = ModelRunner(model, PACKED)
    runner.allocate(4)
    assert "previous error during capture" in (runner.capture(2) or "")
    assert current == ["the thread's"]


def test_kernels_of_large_steps_have_run_before_the_first_request(tmp_path: Path) -> None:
    sizes: list[int] = []
    model = load("llama", tmp_path).to("cuda")
    model.register_forward_pre_hook(lambda *given: sizes.append(given[2]["input_ids"].shape[1]), with_kwargs=True)
    start_engine(model, max_num_seqs=5, context_length=128).close()
    assert {1024, 1040} <= set(sizes)


def test_a_model_whose_replay_is_wrong_runs_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load("llama", tmp_path)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda *_: None)
    with closing(start_engine(copy.deepcopy(plain).to("cuda"), max_num_seqs=5, context_length=128)) as engine:
        assert engine.runner._graphs is None
        outcome = Client(engine).ask(PROMPT, SamplingParams(5))
    assert token_ids(outcome) == [greedy_ids(plain, [(PROMPT, SamplingParams(5))])[0]]
    assert "captured logits differ from eager ones" in caplog.text


def test_graphs_that_are_required_and_cannot_be_had_are_an_error(tmp_path: Path) -> None:
    model = load("deepseek-v3", tmp_path).to("cuda")
    with pytest.raises(CheckpointError, match=r"decoding cuda_graphs .*copied at every step.*set decoding to auto"):
        start_engine(model, max_num_seqs=5, context_length=128, decoding="cuda_graphs")


def test_eager_decoding_captures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "capture", None)
    model = load("llama", tmp_path).to("cuda")
    start_engine(model, max_num_seqs=5, context_length=128, decoding="eager").close()


def test_without_a_kernel_attention_copies_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_triton.runner.cuda import attention

    def fail(*_: Any) -> torch.Tensor:
        raise ImportError("No module named 'triton'")

    attention.is_usable.cache_clear()
    monkeypatch.setattr(attention, "attend", fail)
    plain = load("gemma2", tmp_path)
    with closing(start_engine(copy.deepcopy(plain).to("cuda"), max_num_seqs=5, context_length=128)) as engine:
        items = requests(8, random.Random(5))
        check(plain, Client(engine), items, expected=greedy_ids(plain, items))
    attention.is_usable.cache_clear()
    assert "no attention kernel on cuda:0 (ImportError: No module named 'triton'): attention of heads" in caplog.text
    assert "as there are no CUDA graphs: the device has no attention kernel" in caplog.text
