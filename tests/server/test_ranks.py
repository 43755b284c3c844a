# SPDX-License-Identifier: Apache-2.0
"""A folder in ranks behind a real Triton: the same text, and no death of one leaves a client or a process behind."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_triton.protocol.model_info import ModelInfo
from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import Reply, generate, infer, post
from tests.support.gateway import num_running, wait_until
from tests.support.serving import descendants, wait_until_gone
from tests.support.slow_model import slow_model

pytestmark = pytest.mark.full

ONE_OF_KIND_MODEL = "instance_group [{ kind: KIND_MODEL, count: 1 }]"
PROMPTS = ["The canary sings", "Where does the river go", "Numbers such as 3, 14, 159"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("repository")
    checkpoint = build_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None, max_position_embeddings=512
    )
    make_folder(root, "whole", huggingface_model=checkpoint)
    ranks = {"huggingface_model": checkpoint, "tensor_parallel_size": 2}
    ranked = make_folder(root, "ranked", config=ONE_OF_KIND_MODEL, **ranks)
    (ranked / "1" / "model.py").write_text(slow_model(0.02))
    make_folder(root, "misplaced", config="instance_group [{ kind: KIND_CPU }]", **ranks)
    return root


def start(repository: Path, *names: str) -> TritonServer:
    loaded = [f"--load-model={name}" for name in names]
    return TritonServer(repository, arguments=["--model-control-mode=explicit", *loaded])


def rank_ids(pids: list[int]) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
    return [pid for pid, command in commands.items() if b"hf_triton.hub.ranks" in command]


def test_ranks_write_the_same_text_and_their_death_answers_all(repository: Path) -> None:
    with start(repository, "ranked", "whole") as server:
        assert server.process is not None
        refused = post(server, "/v2/repository/models/misplaced/load", {}, timeout_s=120)
        assert refused.status == 400
        assert "has KIND_CPU: write instance_group [{ kind: KIND_MODEL, count: 1 }]" in refused.body
        for prompt in PROMPTS:
            for more in ({}, {"temperature": 1.5, "seed": 7}):
                texts = {generate(server, name, prompt, max_new_tokens=20, **more).body for name in ("ranked", "whole")}
                assert len({text.partition("text_output")[2] for text in texts}) == 1, texts
        check_shares(server)
        pids = descendants(server.process.pid)
        [rank] = rank_ids(pids)
        with ThreadPoolExecutor(4) as pool:
            calls = start_calls(pool, server)
            os.kill(rank, signal.SIGKILL)
            replies = [call.result(timeout=30) for call in calls]
        assert {(reply.status, reply.error.partition(":")[0]) for reply in replies} == {(503, "engine_failed")}
        server.process.wait(timeout=15)
        wait_until_gone(pids)
        assert "rank 1 of 2 has ended" in server.read_log()


def start_calls(pool: ThreadPoolExecutor, server: TritonServer) -> list[Future[Reply]]:
    """Long requests, of which some run."""
    calls = [
        pool.submit(infer, server, "ranked", [prompt], parameters={"max_new_tokens": 400}) for prompt in (*PROMPTS, "a")
    ]
    wait_until(lambda: num_running(server) > 0)
    return calls


def check_shares(server: TritonServer) -> None:
    """What each rank holds is in its model's info, and in the log."""
    whole, ranked = (
        ModelInfo.from_json(answer.json()["outputs"][0]["data"][0])
        for name in ("whole", "ranked")
        if (answer := infer(server, name, [""], parameters={"model_info": True}))
    )
    assert whole.ranks == ()
    assert [each["device"] for each in ranked.ranks] == ["cpu"] * 2
    weights = [each["weights_bytes"] for each in ranked.ranks]
    assert len({*weights}) == 1
    assert max(weights) < whole.memory_bytes < sum(weights)  # norms are whole in each
    assert all(each["cache_bytes"] > 0 for each in ranked.ranks)
    assert "rank 1 of 2 on cpu: " in server.read_log()


def test_stopped_rank_0_ends_the_server_and_closes_its_connections(repository: Path) -> None:
    with start(repository, "ranked") as server:
        assert server.process is not None
        pids = descendants(server.process.pid)
        [rank] = rank_ids(pids)
        stub = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        with ThreadPoolExecutor(4) as pool:
            calls = start_calls(pool, server)
            os.kill(stub, signal.SIGSTOP)
            ends = [call.exception(timeout=45) for call in calls]
        assert all(isinstance(end, ConnectionError) for end in ends), ends
        server.process.wait(timeout=15)
        wait_until_gone(pids)
        assert "rank 0 is stopped" in server.read_log()


def test_killed_server_leaves_no_rank(repository: Path) -> None:
    with start(repository, "ranked") as server:
        assert server.process is not None
        pids = descendants(server.process.pid)
        [rank] = rank_ids(pids)
        os.kill(rank, signal.SIGSTOP)  # one that cannot see its pipe close
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until_gone([rank])
