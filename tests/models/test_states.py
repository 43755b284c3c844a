# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states: a state cannot go back, so no step may run on it twice."""

import mmap
import random
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.executor import Executor
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.scheduler import StepOutput
from hf_triton.errors import HfTritonError, RequestError
from hf_triton.runner.budget import TokenBudget
from hf_triton.runner.device import ChunkSizes
from hf_triton.runner.model_runner import PACKED, ModelRunner
from hf_triton.runner.state_slots import SlotStatesLayer, decodes_as_it_prefills
from hf_triton.runner.step import Step
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import STATES, build
from tests.support.engine import Client, Items, PreemptCounter, prompts, token_ids
from tests.support.reference import solo_ids

pytestmark = pytest.mark.full

NAMES = ("granite4", "falcon-h1", "qwen3-next", "lfm2", "mamba2")
"""States beside attention in other layers, in the same; linear attention; convolutions alone; no attention at all."""
BLOCK_SIZE = 16
CONFIG = EngineConfig(block_size=BLOCK_SIZE, chunk_sizes=ChunkSizes(64, 16))


@pytest.fixture(params=NAMES, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return build(*STATES[request.param])


def submit(client: Client, items: Items) -> None:
    for item in items:
        client.submit(*item)


def check(model: Any, client: Client, items: Items) -> None:
    """Submit greedy requests and compare their outcomes with `generate`."""
    expected = [[solo_ids(model, prompt, params.max_new_tokens)] for prompt, params in items]
    submit(client, items)
    assert [token_ids(outcome) for outcome in client.outcomes()] == expected


def random_tokens(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 300) for _ in range(length)]


def prompts_of(count: int) -> list[list[int]]:
    return [[token % 300 for token in prompt] for prompt in prompts(count, seed=count)]


@pytest.mark.parametrize("name", ["mamba2", "granite4"])
def test_no_prompt_token_is_computed_as_a_decoding_step(name: str) -> None:
    """transformers applies `time_step_limit` in a prefill and not in a decoding step."""
    config = EngineConfig(block_size=BLOCK_SIZE, chunk_sizes=ChunkSizes(16, 16))
    config_name, arguments = STATES[name]
    model = build(config_name, arguments | {"time_step_limit": (0.0, 0.1)})
    items = [(random_tokens(length, length), SamplingParams(12)) for length in (1, 2, 16, 17, 18, 33, 49, 50)]
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=3, config=config))) as engine:
        check(model, Client(engine), items)


def test_tiny_chunks_beside_running_sequences_equal_generate(model: Any) -> None:
    config = EngineConfig(block_size=BLOCK_SIZE, chunk_sizes=ChunkSizes(64, 3))
    items = [(prompt, SamplingParams(1 + index % 17)) for index, prompt in enumerate(prompts_of(20))]
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=7, config=config))) as engine:
        check(model, Client(engine), items)


class Breaking:
    """Makes the model's last layer fail now and then, after the others have changed their states."""

    def __init__(self, model: Any, error: Exception, is_hit: Callable[[int, int], bool]) -> None:
        layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) > 1)
        self._error, self._is_hit = error, is_hit
        self.num_hits = 0
        self._handle = layers[-1].register_forward_pre_hook(self._fail, with_kwargs=True)

    def _fail(self, _: object, arguments: tuple[Any, ...], others: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else others["hidden_states"]
        if threading.current_thread().name == "hf_triton-engine" and self._is_hit(*hidden.shape[:2]):
            self.num_hits += 1
            raise self._error

    def remove(self) -> None:
        self._handle.remove()


def test_a_step_that_fails_half_way_changes_no_output(model: Any) -> None:
    source, error = random.Random(3), RuntimeError("boom")
    all_params = [SamplingParams(1 + seed % 17, do_sample=True, seed=seed) for seed in range(30)]
    items = list(zip(prompts_of(30), all_params, strict=True))
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=7, config=CONFIG))) as engine:
        calm, client = Client(engine), Client(engine)
        submit(calm, items)
        wanted = [token_ids(outcome) for outcome in calm.outcomes()]
        breaking = Breaking(model, error, lambda rows, new: rows > 1 and new == 1 and source.random() < 0.1)
        try:
            submit(client, items)
            found = [token_ids(outcome) for outcome in client.outcomes()]
        finally:
            breaking.remove()
    assert breaking.num_hits > 0
    assert found == wanted


def unrecomputable(name: str, **options: Any) -> Any:
    """A model whose state after a prefill differs from the one after decoding steps, and whose output shows it."""
    config_name, arguments = STATES[name]
    model = build(config_name, arguments | options)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("dt_bias"):
                parameter.fill_(0.0 if options else -8.0)  # time steps many of which exceed the limit
            elif path.endswith(("A_log", ".D")):
                parameter.zero_()
            elif path.endswith("out_proj.weight") and ("mamba" in path or "mixer" in path):
                parameter.mul_(20)
    assert not decodes_as_it_prefills(model)
    return model


UNRECOMPUTABLE = [("nemotron-h", {}), ("zamba2", {}), ("granite4", {"time_step_limit": (0.3, 0.6)})]


@pytest.mark.parametrize(("name", "options"), UNRECOMPUTABLE)
def test_unrecomputable_sequences_are_admitted_if_they_fit_to_their_end(name: str, options: dict[str, Any]) -> None:
    model, preempted = unrecomputable(name, **options), PreemptCounter()
    items = [(random_tokens(20, seed), SamplingParams(120)) for seed in range(5)]
    with closing(
        ContinuousBatchingEngine(
            model, EngineOptions(max_num_seqs=5, config=CONFIG, max_cache_tokens=400, observer=preempted)
        )
    ) as engine:
        check(model, Client(engine), items)
    assert preempted.num_sequences == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")], ids=str)
def test_sequences_of_a_failed_step_are_refused_and_later_ones_run(error: Exception) -> None:
    model, failures = unrecomputable("nemotron-h"), [error]
    items = [(random_tokens(1 + number, number), SamplingParams(20)) for number in range(6)]
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=6))) as engine:
        client = Client(engine)
        breaking = Breaking(model, error, lambda rows, new: rows > 1 and new == 1 and bool(failures and failures.pop()))
        try:
            submit(client, items)
            outcomes = client.outcomes()
        finally:
            breaking.remove()
        assert breaking.num_hits == 1
        assert engine.is_healthy()
        code = "out_of_memory" if isinstance(error, torch.OutOfMemoryError) else "generation_failed"
        assert {outcome.code for outcome in outcomes if isinstance(outcome, HfTritonError)} == {code}
        check(model, Client(engine), items)


def test_a_seed_gives_the_same_output_alone_and_in_a_batch(model: Any) -> None:
    all_params = [SamplingParams(12, do_sample=True, top_k=20, seed=seed, num_return_sequences=2) for seed in range(12)]
    items = list(zip(prompts_of(12), all_params, strict=True))
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=7, config=CONFIG))) as engine:
        batched = Client(engine)
        submit(batched, items)
        for item, outcome in zip(items, batched.outcomes(), strict=True):
            assert token_ids(Client(engine).ask(*item)) == token_ids(outcome)


def test_memory_of_states_is_counted(model: Any) -> None:
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=5))) as engine:
        check(model, Client(engine), [(prompt, SamplingParams(20)) for prompt in prompts_of(9)])
        layers = [layer for layer in engine.runner.cache.layers if hasattr(layer, "states")]
        of_slot = sum(state[0].nbytes for layer in layers for state in layer.states())
    bytes_per_token, slot_tokens = ModelRunner(model, PACKED).memory_per_token()
    counted = slot_tokens * sum(bytes_per_token.values())
    assert 0 < of_slot <= counted < of_slot + sum(bytes_per_token.values())


def test_sequences_wait_for_memory_of_their_states(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, slot_tokens = ModelRunner(model, PACKED).memory_per_token()
    room = 4 * (slot_tokens + 2 * BLOCK_SIZE)
    monkeypatch.setattr(TokenBudget, "tokens", lambda *_: room)
    monkeypatch.setattr(TokenBudget, "most", property(lambda _: room, lambda *_: None), raising=False)
    num_running, num_used = list[int](), list[int]()
    run = Executor.run

    def noted(executor: Executor, step: Step) -> StepOutput:
        num_running.append(len(engine.scheduler.running))
        num_used.append(engine.memory.pool.num_held * BLOCK_SIZE + num_running[-1] * slot_tokens)
        return run(executor, step)

    monkeypatch.setattr(Executor, "run", noted)
    items = [(prompt, SamplingParams(5 + index)) for index, prompt in enumerate(prompts_of(12))]
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=7, config=CONFIG))) as engine:
        check(model, Client(engine), items)
        refused = Client(engine).ask([5, 6], SamplingParams(room))
    assert 1 < max(num_running) < 7
    assert max(num_used) <= room
    assert isinstance(refused, RequestError)
    assert refused.code == "memory_exceeded"


def test_max_cache_tokens_does_nothing_without_keys_and_values(caplog: pytest.LogCaptureFixture) -> None:
    model = build(*STATES["mamba2"])
    with closing(
        ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=3, max_cache_tokens=BLOCK_SIZE, config=CONFIG))
    ) as engine:
        check(model, Client(engine), [(random_tokens(2 * BLOCK_SIZE, 0), SamplingParams(4))])
    assert "max_cache_tokens does nothing for a model without keys and values" in caplog.text


def test_max_cache_tokens_does_not_count_states(model: Any) -> None:
    items = [(prompt, SamplingParams(9)) for prompt in prompts_of(6)]
    with closing(
        ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=7, max_cache_tokens=80, config=CONFIG))
    ) as engine:
        check(model, Client(engine), items)


@torch.inference_mode()
def test_a_sequence_begins_without_its_slots_former_state(model: Any) -> None:
    with closing(ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=1, config=CONFIG))) as engine:
        check(model, Client(engine), [([5, 6, 7], SamplingParams(3))])
        for layer in engine.runner.cache.layers:
            for state in layer.states() if hasattr(layer, "states") else ():
                state.fill_(torch.nan)
        check(model, Client(engine), [(random_tokens(length, length), SamplingParams(4)) for length in (1, 30)])


def test_states_that_are_kept_take_no_memory_of_slots_that_nobody_has_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    layer, size = SlotStatesLayer(), 1 << 22
    layer.begin(SimpleNamespace(ranges=[SimpleNamespace(slot=0, start=0)]))  # type: ignore[arg-type]
    layer.recurrent_states[0] = torch.zeros(1, size // 4)
    layer.recurrent_states[0].fill_(7)
    before = resident()
    for slot in range(64, 68):
        layer.recurrent_states.copy_slots([(slot - 1 if slot > 64 else 0, slot)])
        assert layer.states()[0][slot, -1] == 7
    layer.trim(64)
    assert resident() - before < 16 * size
    assert layer.states()[0][0, -1] == 7
