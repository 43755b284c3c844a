# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captured at load, by numbers of tokens and rows alone; the log says why a model runs eagerly."""

import copy
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
from hf_triton.errors import CheckpointError
from hf_triton.runner.adapters import Adapters
from hf_triton.runner.device_step import step_sizes
from hf_triton.runner.model_runner import PACKED, ModelRunner
from hf_triton.runner.step import Step, TokenRange
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.gpu.conftest import Replays
from tests.support.adapters import generate_with, save_adapter
from tests.support.architectures import load, requests
from tests.support.engine import Client, check, greedy_ids, start_engine, token_ids
from tests.support.simulated_gpu import HAS_GPU, Device

pytestmark = pytest.mark.full
PROMPT = [5, 6, 7, 8]


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


def test_steps_with_an_adapter_run_eagerly_and_others_replay(replays: Replays, tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "model", "llama", eos_token_id=None, tie_word_embeddings=False)
    folder = save_adapter(checkpoint, tmp_path / "lora", target_modules="all-linear")
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().to("cuda")
    adapters = Adapters(model)
    options: dict[str, Any] = {"decoding": "cuda_graphs", "adapters": adapters}
    with closing(start_engine(model, max_num_seqs=5, context_length=128, **options)) as engine:
        client = Client(engine)
        for each in (adapters.load(folder), None):
            client.submit(PROMPT, SamplingParams(8 if each else 20), adapter=each)
        found = [ids for outcome in client.outcomes() for ids in token_ids(outcome)]
    assert found == [generate_with(checkpoint, *each) for each in ((folder, PROMPT, 8), (None, PROMPT, 20))]
    assert replays.sizes, "those without it"


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
    """Have a model's forward wait for the device."""
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
    with pytest.raises(CheckpointError, match=r"decoding cuda_graphs .*whole sequences.*set decoding to auto"):
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
