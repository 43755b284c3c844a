# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states: a state cannot go back, so no step may run on it twice."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from hf_triton.engine.plan import ScheduledStep
from hf_triton.runner.decode import DecodingMode
from hf_triton.runner.kv_cache import COLUMN_STEP, KVCache
from hf_triton.runner.states import states_of
from tests.support.running_sequences import RunningSequences, prompts

from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.executor import Executor
from hf_triton.errors import HfTritonError, RequestError
from hf_triton.runner.budget import TokenBudget
from hf_triton.runner.calling import Forward
from hf_triton.runner.device import ChunkSizes
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import STATES, build, requests
from tests.support.engine import Client, PreemptCounter, PrefixHits, token_ids
from tests.support.reference import solo_ids

pytestmark = pytest.mark.full

NAMES = ("granite4", "falcon-h1", "qwen3-next", "lfm2", "mamba2")
"""States beside attention in other layers, in the same; linear attention; convolutions alone; no attention at all."""
MODES: tuple[DecodingMode, ...] = ("eager", "static")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> DecodingMode:
    found: DecodingMode = request.param
    return found


@pytest.fixture(params=NAMES, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return build(*STATES[request.param])


def check(model: Any, client: Client, items: list[tuple[list[int], SamplingParams]]) -> None:
    wanted = [
        solo_ids(model, prompt, params.max_new_tokens, repetition_penalty=params.repetition_penalty)
        for prompt, params in items
    ]
    assert [token_ids(outcome) for outcome in client.outcomes()] == [[ids] for ids in wanted]


@pytest.mark.parametrize("chunk_size", [3, 16])
def test_chunked_prefill_beside_running_sequences_equals_generate(
    chunk_size: int, model: Any, mode: DecodingMode
) -> None:
    config = EngineConfig(chunk_sizes=ChunkSizes(64, chunk_size, per_weights=16))
    items = requests(40, random.Random(chunk_size))
    with closing(ContinuousBatchingEngine(model, max_num_seqs=7, decoding=mode, config=config)) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        check(model, client, items)


def test_chunks_of_many_short_prompts_are_wider_than_their_padding(model: Any) -> None:
    """Layers take a single column for a decoding step, in which no row is padding."""
    config = EngineConfig(chunk_sizes=ChunkSizes(64, 1, per_weights=16))
    items = [(prompt, SamplingParams(1 + index % 7)) for index, prompt in enumerate(prompts(60, longest=4))]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=20, config=config)) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        check(model, client, items)


@pytest.mark.parametrize("name", ["mamba2", "granite4"])
def test_no_prompt_token_is_computed_as_a_decoding_step(name: str) -> None:
    """transformers applies `time_step_limit` in a prefill and not in a decoding step."""
    config = EngineConfig(chunk_sizes=ChunkSizes(16, 16, per_weights=8))
    config_name, arguments = STATES[name]
    model = build(config_name, arguments | {"time_step_limit": (0.0, 0.1)})
    items = [(random_tokens(length, length), SamplingParams(12)) for length in (1, 2, 16, 17, 18, 33, 49, 50)]
    items += [([*prompt, *random_tokens(extra, extra)], params) for prompt, params in items[4:] for extra in (1, 2)]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3, config=config)) as engine:
        for prompt, params in items:
            (answer,) = token_ids(Client(engine).ask(prompt, params))
            assert answer == solo_ids(model, prompt, params.max_new_tokens)
            turn = [*prompt, *answer, 5, 6]
            assert token_ids(Client(engine).ask(turn, params)) == [solo_ids(model, turn, params.max_new_tokens)]


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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")], ids=str)
def test_a_step_that_fails_half_way_changes_no_output(error: Exception, model: Any, mode: DecodingMode) -> None:
    source = random.Random(3)
    items = [
        (prompt, SamplingParams(1 + index % 17, do_sample=True, seed=index, num_return_sequences=1 + index % 3))
        for index, prompt in enumerate(prompts(30))
    ]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=7, decoding=mode)) as engine:
        calm = Client(engine)
        for item in items:
            calm.submit(*item)
        wanted = [token_ids(outcome) for outcome in calm.outcomes()]
        breaking = Breaking(model, error, lambda rows, new: rows > 1 and new == 1 and source.random() < 0.1)
        client = Client(engine)
        try:
            for item in items:
                client.submit(*item)
                time.sleep(source.choice([0, 0.002]))
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
    assert not Forward(model).recomputes
    return model


UNRECOMPUTABLE = [("nemotron-h", {}), ("zamba2", {}), ("granite4", {"time_step_limit": (0.3, 0.6)})]


@pytest.mark.full
@pytest.mark.parametrize(("name", "options"), UNRECOMPUTABLE)
def test_unrecomputable_sequences_are_admitted_if_they_fit_to_their_end(
    name: str, options: dict[str, Any], mode: DecodingMode
) -> None:
    model, source, preempted = unrecomputable(name, **options), random.Random(5), PreemptCounter()
    items = [(random_tokens(20, source.randrange(99)), SamplingParams(120)) for _ in range(5)]
    with closing(
        ContinuousBatchingEngine(model, max_num_seqs=5, decoding=mode, max_cache_tokens=700, observer=preempted)
    ) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        check(model, client, items)
    assert preempted.num_sequences == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("boom")], ids=str)
def test_sequences_of_a_failed_step_are_refused_and_later_ones_run(error: Exception, mode: DecodingMode) -> None:
    model, failures = unrecomputable("nemotron-h"), [error]
    items = [(random_tokens(1 + number, number), SamplingParams(20)) for number in range(6)]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=6, decoding=mode)) as engine:
        client = Client(engine)
        breaking = Breaking(model, error, lambda rows, new: rows > 1 and new == 1 and bool(failures and failures.pop()))
        try:
            for item in items:
                client.submit(*item)
            outcomes = client.outcomes()
        finally:
            breaking.remove()
        assert breaking.num_hits == 1
        assert engine.is_healthy()
        code = "out_of_memory" if isinstance(error, torch.OutOfMemoryError) else "generation_failed"
        refused = [outcome for outcome in outcomes if isinstance(outcome, HfTritonError)]
        assert refused
        assert {outcome.code for outcome in refused} == {code}
        later = Client(engine)
        for item in items:
            later.submit(*item)
        check(model, later, items)


def test_a_seed_gives_the_same_output_alone_and_in_a_batch(model: Any, mode: DecodingMode) -> None:
    all_params = [SamplingParams(12, do_sample=True, top_k=20, seed=seed, num_return_sequences=2) for seed in range(12)]
    items = list(zip(prompts(12), all_params, strict=True))
    with closing(ContinuousBatchingEngine(model, max_num_seqs=7, decoding=mode)) as engine:
        batched = Client(engine)
        for item in items:
            batched.submit(*item)
        for item, outcome in zip(items, batched.outcomes(), strict=True):
            assert token_ids(Client(engine).ask(*item)) == token_ids(outcome)


@torch.inference_mode()
def test_memory_of_states_is_counted(model: Any) -> None:
    bytes_per_token, num_state_tokens = Forward(model).memory_per_token()
    running = RunningSequences(model, "eager")
    running.memory = KVCache(torch.device("cpu"), num_state_tokens)
    for number, prompt in enumerate(prompts(5)):
        running.add(number, prompt)
    buffers = [
        buffer
        for layer in running.memory.layers()
        for buffer in (*states_of(layer), *getattr(layer, "__dict__", {}).values())
        if isinstance(buffer, torch.Tensor)
    ]
    counted = running.memory.num_tokens * sum(bytes_per_token.values())
    assert num_state_tokens > 0
    assert 0.5 * counted < sum(buffer.nbytes for buffer in buffers) <= counted


def test_sequences_wait_for_memory_of_their_states(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, num_state_tokens = Forward(model).memory_per_token()
    of_sequence = num_state_tokens + COLUMN_STEP
    room = 5 * of_sequence + of_sequence // 2  # a sequence is there twice while it is copied to its slot
    monkeypatch.setattr(TokenBudget, "tokens", lambda *_: room)
    monkeypatch.setattr(TokenBudget, "most", property(lambda _: room, lambda *_: None), raising=False)
    num_running, num_used = list[int](), list[int]()
    run = Executor.run

    def counted(executor: Executor, step: ScheduledStep) -> Any:
        if step.prefill:
            num_running.append(len(engine.memory.running) + len(step.prefill.sequences))
            num_tokens = max(engine.memory.lanes.num_tokens, num_running[-1] * of_sequence)
            num_used.append(num_tokens + len(step.prefill.requests) * (step.prefill.longest + num_state_tokens))
        return run(executor, step)

    monkeypatch.setattr(Executor, "run", counted)
    items = [(prompt, SamplingParams(5 + index)) for index, prompt in enumerate(prompts(12))]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=7)) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        check(model, client, items)
        refused = client.ask([5, 6], SamplingParams(room))
    assert 3 < max(num_running) < 7
    assert max(num_used) <= room
    assert isinstance(refused, RequestError)
    assert refused.code == "memory_exceeded"


def test_max_cache_tokens_does_nothing_without_keys_and_values(caplog: pytest.LogCaptureFixture) -> None:
    model = build(*STATES["mamba2"])
    prompt = random_tokens(2 * COLUMN_STEP, 0)
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3, max_cache_tokens=COLUMN_STEP)) as engine:
        assert token_ids(Client(engine).ask(prompt, SamplingParams(4))) == [solo_ids(model, prompt, 4)]
    assert "max_cache_tokens does nothing for a model without keys and values" in caplog.text


def test_max_cache_tokens_does_not_count_states(model: Any) -> None:
    items = [(prompt, SamplingParams(9)) for prompt in prompts(6)]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=7, max_cache_tokens=2 * COLUMN_STEP)) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        check(model, client, items)


@torch.inference_mode()
def test_a_forward_that_is_no_step_does_not_change_the_states(model: Any) -> None:
    running = RunningSequences(model, "eager")
    for number, prompt in enumerate(prompts(3)):
        running.add(number, prompt)
    running.step()
    memory = running.memory
    before = [state.clone() for layer in memory.layers() for state in states_of(layer)]
    memory.make_column()
    with memory.states_kept():
        running.decoder._run(memory, running.newest().unsqueeze(1))
    after = [state for layer in memory.layers() for state in states_of(layer)]
    assert before
    assert all(torch.equal(*each) for each in zip(before, after, strict=True))


def random_tokens(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 300) for _ in range(length)]


def test_a_conversation_continues_from_its_last_turn(model: Any, mode: DecodingMode) -> None:
    hits, history, lengths = PrefixHits(), list[int](), list[int]()
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3, decoding=mode, observer=hits)) as engine:
        for turn in range(4):
            history += random_tokens(40, turn)
            (answer,) = token_ids(Client(engine).ask(history, SamplingParams(10)))
            assert answer == solo_ids(model, history, 10)
            lengths.append(len(history))
            history += answer
    # All of the turn before but its last token, which was not computed; only the prompt if a step ran ahead.
    assert hits.counts[0] == 0
    for length, count in zip(lengths, hits.counts[1:], strict=False):
        assert count in (length, length + 9)
    assert mode == "static" or hits.counts[1:] == [length + 9 for length in lengths[:-1]]


def test_a_state_with_the_eos_token_is_not_reused(model: Any, mode: DecodingMode) -> None:
    """A step that ran ahead has computed the state after the eos token."""
    prompt = random_tokens(40, 7)
    whole = solo_ids(model, prompt, 20)
    end = next(place for place, token in enumerate(whole) if place > 3 and token not in whole[:place])
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3, decoding=mode)) as engine:
        engine._eos_ids = frozenset([whole[end]])
        (answer,) = token_ids(Client(engine).ask(prompt, SamplingParams(20)))
        assert answer == whole[:end]
        engine._eos_ids = frozenset()
        again = [*prompt, *answer, *random_tokens(3, 8)]
        assert token_ids(Client(engine).ask(again, SamplingParams(8))) == [solo_ids(model, again, 8)]


def test_the_state_at_the_end_of_a_common_prefix_is_stored(model: Any) -> None:
    hits, common = PrefixHits(), random_tokens(50, 0)
    contexts = [[*common, *random_tokens(30 + number, number + 1)] for number in range(4)]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3, observer=hits)) as engine:
        for context in contexts:
            assert token_ids(Client(engine).ask(context, SamplingParams(8))) == [solo_ids(model, context, 8)]
    assert hits.counts == [0, 0, 50, 50]


def test_shared_prefixes_change_no_output_in_any_batch(model: Any, mode: DecodingMode) -> None:
    source, stems = random.Random(5), [random_tokens(90, seed) for seed in range(3)]
    items = [
        (
            [*source.choice(stems)[: source.randrange(20, 90)], *random_tokens(source.randrange(1, 40), index)],
            SamplingParams(source.randrange(1, 12)),
        )
        for index in range(50)
    ]
    hits = PrefixHits()
    with closing(ContinuousBatchingEngine(model, max_num_seqs=7, decoding=mode, observer=hits)) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
            time.sleep(source.choice([0, 0.01]))
        check(model, client, items)
    assert sum(count > 0 for count in hits.counts) > 10


def test_without_prefix_caching_no_state_is_stored(model: Any) -> None:
    hits, context = PrefixHits(), random_tokens(60, 0)
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3, observer=hits, enable_prefix_caching=False)) as engine:
        for _ in range(2):
            Client(engine).ask(context, SamplingParams(8))
        assert engine.memory.prefixes.num_tokens == 0
    assert hits.counts == [0, 0]


@torch.inference_mode()
def test_nan_states_are_not_reused(model: Any) -> None:
    hits, context = PrefixHits(), random_tokens(60, 0)
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3, observer=hits)) as engine:
        Client(engine).ask(context, SamplingParams(8))
        for prefix in engine.memory.prefixes._prefixes.values():
            for states in prefix.read(len(prefix.token_ids)).states:
                for each in states:
                    for state in each.values():
                        state.fill_(torch.nan)
        again = [*context, 5, 6]
        assert token_ids(Client(engine).ask(again, SamplingParams(8))) == [solo_ids(model, again, 8)]
    assert hits.counts == [0, 0]


def test_a_context_that_is_stored_already_drops_no_other(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, num_state_tokens = Forward(model).memory_per_token()
    room = 4 * 4 * (num_state_tokens + 62)  # a fourth of it for four contexts of 60 tokens
    monkeypatch.setattr(TokenBudget, "tokens", lambda *_: room)
    contexts = [random_tokens(60, seed) for seed in range(3)]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3)) as engine:
        for context in (*contexts, contexts[0], contexts[0], contexts[0]):
            Client(engine).ask(context, SamplingParams(1))
        stored = [prefix.token_ids.tolist() for prefix in engine.memory.prefixes._prefixes.values()]
    assert all(context in stored for context in contexts)


def test_a_common_prefix_is_shared_if_two_contexts_fit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, num_state_tokens = Forward(model).memory_per_token()
    room = 2 * 4 * (num_state_tokens + 70)
    monkeypatch.setattr(TokenBudget, "tokens", lambda *_: room)
    hits, common = PrefixHits(), random_tokens(60, 0)
    with closing(ContinuousBatchingEngine(model, max_num_seqs=3, observer=hits)) as engine:
        for seed in range(5):
            Client(engine).ask([*common, *random_tokens(4, seed + 1)], SamplingParams(5))
    assert hits.counts == [0, 0, 60, 60, 60]


def test_a_prefix_cache_too_small_for_states_is_logged(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, num_state_tokens = Forward(model).memory_per_token()
    with closing(
        ContinuousBatchingEngine(model, max_num_seqs=3, max_cache_tokens=4 * (num_state_tokens + 32))
    ) as engine:
        has_keys = engine.forward.has_keys
    assert "the prefix cache stays empty" not in caplog.text
    ContinuousBatchingEngine(model, max_num_seqs=3, max_cache_tokens=4 * (num_state_tokens + 32) - 1).close()
    assert ("the prefix cache stays empty" in caplog.text) is has_keys


def test_stored_contexts_give_way_to_running_sequences(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, num_state_tokens = Forward(model).memory_per_token()
    room = 8 * (num_state_tokens + COLUMN_STEP)
    monkeypatch.setattr(TokenBudget, "tokens", lambda *_: room)
    monkeypatch.setattr(TokenBudget, "most", property(lambda _: room, lambda *_: None), raising=False)
    num_used: list[int] = []
    run = Executor.run

    def noted(executor: Executor, step: ScheduledStep) -> Any:
        if step.decode:
            num_used.append(engine.memory.num_used_tokens)
        return run(executor, step)

    monkeypatch.setattr(Executor, "run", noted)
    items = [(random_tokens(60, index), SamplingParams(9)) for index in range(20)]
    with closing(ContinuousBatchingEngine(model, max_num_seqs=7)) as engine:
        client = Client(engine)
        for item in items:
            client.submit(*item)
        check(model, client, items)
        assert 0 < engine.memory.prefixes.num_tokens <= room // 4
    assert max(num_used) <= room
