# SPDX-License-Identifier: Apache-2.0
"""A model that sleeps gives its memory back, keeps its process, and answers the next request as if it had not slept."""

import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hf_triton.engine.protocols import Nap
from hf_triton.runner.lora.model_adapters import Adapters
from hf_triton.sampling.params import SamplingParams
from tests.support.adapters import save_adapter
from tests.support.architectures import load, requests
from tests.support.engine import DRAWN, PROMPT, WAIT_S, Client, start_engine, token_ids
from tests.support.resident import resident_bytes

PARAMS = (
    SamplingParams(12),
    DRAWN,
    SamplingParams(9, do_sample=True, seed=4, num_return_sequences=3),
    SamplingParams(20, prompt_logprobs=1, logprobs=2, repetition_penalty=1.2),
    SamplingParams(30, do_sample=True, seed=3, best_of=3),
)


def turn(engine: Any, is_sleeping: bool) -> Nap:
    nap: Nap = engine.set_sleeping(is_sleeping).result(WAIT_S)
    return nap


@contextmanager
def naps(engine: Any, source: random.Random) -> Iterator[list[Nap]]:
    """Two threads have the engine sleep and wake at random moments; its naps."""
    is_over, found = threading.Event(), list[Nap]()

    def run(seed: int) -> None:
        own = random.Random(seed)
        while not is_over.wait(own.expovariate(200)):
            found.append(turn(engine, own.random() < 0.8))

    threads = [threading.Thread(target=run, args=(source.random(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_blocks_go_back_to_the_system_and_the_next_answer_is_the_same(tmp_path: Path) -> None:
    with closing(start_engine(load("llama", tmp_path), max_num_seqs=6, context_length=512)) as engine:
        client = Client(engine)
        before = [client.ask(PROMPT * 40, params) for params in PARAMS]
        assert sum(resident_bytes(blocks.keys) for blocks in engine.runner.cache.blocks()) > 0
        assert engine.memory.pool.num_kept > 0
        nap = turn(engine, True)
        assert nap.is_sleeping
        assert nap.seconds > 0
        assert engine.is_sleeping
        assert engine.is_healthy()
        assert not engine.runner.cache.blocks()
        assert engine.memory.pool.num_touched == 0, "the prefix cache is lost"
        after = [client.ask(PROMPT * 40, params) for params in PARAMS]
        assert not engine.is_sleeping, "a request wakes it"
        assert before == after


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_requests_of_all_kinds_are_answered_alike_beside_naps_at_random(name: str, tmp_path: Path) -> None:
    source, model = random.Random(7), load(name, tmp_path)
    options: dict[str, Any] = {"max_num_seqs": 6, "context_length": 256, "prompt_lookup": 4 if name == "llama" else 0}
    chosen: list[Any] = [None]
    if name == "llama":
        options["adapters"] = adapters = Adapters(model)
        folder = save_adapter(Path(model.config.name_or_path), tmp_path / "adapter")
        chosen.append(adapters.load(folder, "adapter"))
    items = [(prompt, source.choice(PARAMS), source.choice(chosen)) for prompt, _ in requests(24, source)]
    with closing(start_engine(model, **options)) as engine:
        expected = [Client(engine).ask(prompt, params, adapter=adapter) for prompt, params, adapter in items]
        with naps(engine, source) as found:
            clients = [Client(engine) for _ in range(4)]

            def run(client: Client, own: list[Any]) -> None:
                for prompt, params, adapter in own:
                    client.submit(prompt, params, adapter=adapter)
                    if source.random() < 0.4:
                        client.outcomes()

            threads = [threading.Thread(target=run, args=(client, items[at::4])) for at, client in enumerate(clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            outcomes = [client.outcomes() for client in clients]
        assert any(nap.is_sleeping and nap.seconds for nap in found)
    for at, client_outcomes in enumerate(outcomes):
        for outcome, other in zip(client_outcomes, expected[at::4], strict=True):
            assert token_ids(outcome) == token_ids(other)
