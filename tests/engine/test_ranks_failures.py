# SPDX-License-Identifier: Apache-2.0
"""A rank that fails half way through a load refuses it by name, nothing remains, and the next load works."""

import itertools
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from hf_triton.errors import CheckpointError
from hf_triton.hub import ranks as hub_ranks
from hf_triton.runner.ranks import processes
from hf_triton.runner.ranks.processes import Ranks
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import load
from tests.support.engine import PROMPT, Client, error_code
from tests.support.failing_rank import PLACES, STEP
from tests.support.ranks import load_in_ranks, process_ids, start_small_engine
from tests.support.serving import wait_until_gone

pytestmark = pytest.mark.full

REASONS = {"memory": r"failed: OutOfMemoryError: CUDA out of memory", "kill": r"has ended \(exit code -9"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    load("llama", folder)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Ranks]:
    """The ranks that start, whose folder is in `tmp_path`; each fails."""
    ranks: list[Ranks] = []
    prepare = Ranks.__init__

    def note(self: Ranks, *given: object, **options: object) -> None:
        ranks.append(self)
        prepare(self, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Ranks, "__init__", note)
    monkeypatch.setattr(hub_ranks, "MODULE", "tests.support.failing_rank")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return ranks


@pytest.mark.parametrize(("place", "how"), [*zip(PLACES, itertools.cycle(REASONS), strict=False)])
def test_load_that_fails_on_another_rank_is_refused_and_leaves_nothing(
    place: str, how: str, folder: Path, started: list[Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", f"{place}:{how}")
    monkeypatch.setattr(processes, "JOIN_S", 5.0)
    with pytest.raises(CheckpointError, match=f"rank 1 of 2 {REASONS[how]}"):
        serve(folder)
    [ranks] = started
    wait_until_gone(process_ids(ranks))
    assert not any(tmp_path.glob("hf_triton_ranks*"))
    assert not distributed.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_triton-ranks"]


def test_snapshot_without_a_shard_is_refused_in_the_words_of_one_process(tmp_path: Path) -> None:
    load("llama", tmp_path).save_pretrained(tmp_path, max_shard_size="50KB")
    (tmp_path / "model.safetensors").unlink()
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="model-0"):
        load_in_ranks(tmp_path)
    assert not distributed.is_initialized()


def test_load_after_those_that_failed_serves(folder: Path) -> None:
    engine = serve(folder)
    try:
        assert isinstance(Client(engine).ask(PROMPT, SamplingParams(4)), list)
    finally:
        engine.close()


def test_lack_of_memory_in_a_step_on_another_rank_answers_every_request(
    folder: Path, started: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", f"{STEP}:memory")
    is_fatal = threading.Event()
    engine = serve(folder, on_fatal=is_fatal.set)
    try:
        client = Client(engine)
        assert isinstance(client.ask(PROMPT, SamplingParams(4)), list)
        for number in range(12):
            client.submit([*PROMPT, number], SamplingParams(60))
        assert {error_code(outcome) for outcome in client.outcomes()[1:]} == {"engine_failed"}
        assert is_fatal.wait(10)
    finally:
        engine.close()
    assert "rank 1 of 2 failed: OutOfMemoryError" in started[0].fault
    wait_until_gone(process_ids(started[0]))


def serve(folder: Path, **options: Any) -> Any:
    ranks, model = load_in_ranks(folder)
    with ranks.loading():
        return start_small_engine(model, ranks, **options)
