# SPDX-License-Identifier: Apache-2.0
"""A model in several processes computes what it computes in one; one that dies ends all, and every request is answered.

Each rank is a process that imports torch and transformers, so most of these tests are `full`.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_triton.errors import CheckpointError
from hf_triton.hub.ranks import rank_bytes
from hf_triton.runner.gpu_memory import own_part
from hf_triton.runner.ranks.parts import check_parts
from hf_triton.runner.step import Step
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import load, requests
from tests.support.engine import PROMPT, Client, Items, PreemptCounter, error_code, slow_down, token_ids
from tests.support.ranks import load_in_ranks, process_ids, start_small_engine
from tests.support.serving import wait_until_gone

DIED = {signal.SIGKILL: "has ended", signal.SIGSTOP: "has said nothing"}


def mixed_items() -> Items:
    source = random.Random(3)
    items = requests(12, source)
    drawn = [
        (prompt, SamplingParams(8, do_sample=True, temperature=1.3, seed=number, num_return_sequences=1 + number % 2))
        for number, (prompt, _) in enumerate(items[:6])
    ]
    long = [([*range(5 * number, 5 * number + 40)], SamplingParams(50)) for number in range(3, 8)]
    return items + drawn + long


def save(name: str, folder: Path) -> Any:
    """The whole model, whose checkpoint is in the folder."""
    model = load(name, folder)
    if not (folder / "config.json").exists():
        model.save_pretrained(folder)
    return model


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama", 2),
        *(
            pytest.param(name, size, marks=pytest.mark.full)
            for name, size in [("qwen3-moe", 2), ("gemma3", 2), ("qwen3", 2), ("gemma4", 2)]
        ),
    ],
)
def test_ranks_compute_what_one_process_computes(name: str, size: int, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    preempted = PreemptCounter()
    engine = start_small_engine(whole)
    items = mixed_items()
    try:
        expected = ask_all(engine, items)
    finally:
        engine.close()
    ranks, model = load_in_ranks(tmp_path, size)
    with ranks.loading():
        engine = start_small_engine(model, ranks, observer=preempted)
    pids = process_ids(ranks)
    own_bytes = sum(own_part(tensor).nbytes for tensor in model.parameters())
    assert own_bytes == rank_bytes(whole, size) < whole.get_memory_footprint()
    try:
        assert ask_all(engine, items) == expected
        assert ask_all(engine, items[::-1]) == expected[::-1]  # by what the prefix cache has of them
        engine.runner._captured = (4, 0)  # as on GPUs: a wake captures again, here in vain on all ranks
        assert engine.set_sleeping(True).result(60).is_sleeping
        assert ask_all(engine, items[:4]) == expected[:4]
    finally:
        engine.close()
    assert preempted.num_sequences > 0
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_whose_parts_compute_something_else_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save("llama", tmp_path).to(dtype)
    check_parts(model)
    projection = model.model.layers[1].mlp.down_proj  # as a plan puts a forward of its own there
    projection.forward = lambda x: 1.05 * type(projection).forward(projection, x)
    with pytest.raises(CheckpointError, match=r"in ranks model\.layers\.1 computes something else"):
        check_parts(model)


def ask_all(engine: Any, items: Items) -> list[list[list[int]]]:
    client = Client(engine)
    for item in items:
        client.submit(*item)
    return [token_ids(outcome) for outcome in client.outcomes()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save("llama", folder)
    return folder


@pytest.fixture
def fatal() -> threading.Event:
    return threading.Event()


@pytest.fixture
def engine(folder: Path, fatal: threading.Event) -> Iterator[Any]:
    ranks, model = load_in_ranks(folder)
    with ranks.loading():
        engine = start_small_engine(model, ranks, on_fatal=fatal.set)
    yield engine
    engine.close()
    assert not any(map(is_running, process_ids(ranks)))


@pytest.mark.parametrize("died", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_death_of_a_rank_answers_every_request_and_ends_all(
    engine: Any, fatal: threading.Event, died: signal.Signals
) -> None:
    client = Client(engine)
    slow_down(engine, 0.05)
    for _ in range(8):  # more than run at a time
        client.submit(PROMPT, SamplingParams(100))
    time.sleep(0.2)
    ranks = engine.options.ranks
    os.kill(process_ids(ranks)[0], died)
    assert {error_code(outcome) for outcome in client.outcomes()} == {"engine_failed"}
    assert fatal.wait(5)
    assert DIED[died] in ranks.fault
    assert not engine.is_healthy()


@pytest.mark.full
def test_idle_engine_ends_with_a_rank(engine: Any, fatal: threading.Event) -> None:
    os.kill(process_ids(engine.options.ranks)[0], signal.SIGKILL)
    assert fatal.wait(10)
    assert error_code(Client(engine).ask(PROMPT, SamplingParams(2))) == "engine_failed"


@pytest.mark.full
def test_step_that_fails_on_one_rank_ends_all(
    engine: Any, fatal: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: Step) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.runner.cache, "begin", fail)  # of rank 0; the other waits in its first operation
    assert error_code(Client(engine).ask(PROMPT, SamplingParams(2))) == "engine_failed"
    assert fatal.wait(10)


SERVES = """
import sys, time
from pathlib import Path
from tests.support.ranks import *
ranks, model = load_in_ranks(Path(sys.argv[1]))
engine = start_small_engine(model, ranks)
print(*process_ids(ranks), flush=True)
time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_ranks_end_with_rank_0(folder: Path, is_stopped: bool) -> None:
    rank_0 = subprocess.Popen([sys.executable, "-c", SERVES, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert rank_0.stdout is not None
        [pid] = map(int, rank_0.stdout.readline().split())
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        rank_0.kill()
        rank_0.communicate()
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


@pytest.mark.full
def test_rank_that_dies_while_the_model_is_tried_refuses_it(folder: Path) -> None:
    ranks, model = load_in_ranks(folder)
    [pid] = process_ids(ranks)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="rank 1 of 2 has ended"), ranks.loading():
        start_small_engine(model, ranks)
    assert not is_running(pid)


@pytest.mark.full
def test_rank_0_that_is_stopped_is_ended(folder: Path) -> None:
    rank_0 = subprocess.Popen([sys.executable, "-c", SERVES, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert rank_0.stdout is not None
        [pid] = map(int, rank_0.stdout.readline().split())
        os.kill(rank_0.pid, signal.SIGSTOP)
        assert rank_0.wait(20) == -signal.SIGKILL
    finally:
        rank_0.kill()
        rank_0.communicate()
    wait_until_gone([pid])
