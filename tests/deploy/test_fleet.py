# SPDX-License-Identifier: Apache-2.0
"""Three real servers behind HAProxy, one of them slow: killed, taken out, stood still, while clients ask."""

import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_triton.protocol.names import SERVER_VARIABLE
from hf_triton.server import free_ports
from hf_triton.testing import LoopbackHub, build_tiny_checkpoint
from tests.support.fleet import LENGTHS, MODEL, NAMES, NUM_CLIENTS, PROMPTS, Fleet, Load, Replica, Texts, fleet
from tests.support.gateway import wait_until
from tests.support.haproxy import needs_haproxy
from tests.support.reference import load_reference
from tests.support.runbooks import blocks, run_block
from tests.support.serving import PORTS
from tests.support.slow_model import slow_model

pytestmark = [pytest.mark.full, needs_haproxy]

V1, V2 = "v1", "v2"
STEP_S = {"a": 0.01, "b": 0.01, "c": 0.1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        revision: build_tiny_checkpoint(root / revision, "llama", seed=seed, eos_token_id=None)
        for seed, revision in enumerate((V1, V2))
    }


@pytest.fixture(scope="module")
def texts(checkpoints: dict[str, Path]) -> Texts:
    references = {revision: load_reference(folder) for revision, folder in checkpoints.items()}
    return {
        revision: {
            (prompt, length): reference.text(prompt, length).removeprefix(prompt)
            for prompt in PROMPTS
            for length in LENGTHS
        }
        for revision, reference in references.items()
    }


@pytest.fixture(scope="module")
def hub(checkpoints: dict[str, Path]) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.add("acme/text", checkpoints[V1], revisions=checkpoints)
        yield hub


@pytest.fixture(scope="module")
def servers(
    hub: LoopbackHub, make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    environment = {**hub.environment(), "HF_HOME": str(root / "home")}
    replicas = {}
    for name in NAMES:
        folder = make_folder(root / name / "repository", MODEL, huggingface_model="acme/text", revision=V1)
        (folder / "1" / "model.py").write_text(slow_model(STEP_S[name]))
        replicas[name] = Replica(root / name, environment)
    with fleet(root, replicas) as servers:
        yield servers


def num_answered(replica: Replica) -> float:
    """Requests that a server's model has answered."""
    with urllib.request.urlopen(f"http://127.0.0.1:{replica.ports[2]}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("hf_triton_requests_total"))


def revise(replica: Replica, old: str, new: str) -> None:
    """Give a server's folder another revision."""
    path = replica.repository / MODEL / "config.pbtxt"
    path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))


def run(block: str, servers: Fleet, name: str = "a") -> str:
    replica = servers.replicas[name]
    socket = str(servers.folder / "haproxy.sock")
    words = {
        "/tmp/haproxy.sock": socket,
        "server.sh drain a": f"server.sh drain {name}",
        "server.sh ready a": f"server.sh ready {name}",
        "localhost:9000": f"localhost:{replica.ports[-1]}",
        "new/": f"{replica.repository}/",
        "model_repository/": f"{replica.repository}/",
    }
    server = f"localhost:{replica.ports[1]}"
    done = run_block(block, words, HAPROXY_SOCKET=socket, **{SERVER_VARIABLE: server}, **replica.environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_killed_servers_lose_what_they_had_begun_and_nothing_else(servers: Fleet, texts: Texts) -> None:
    killed = servers.replicas["a"]
    look, replace = blocks("node-gone")
    with Load(servers, texts) as load:
        load.wait()
        for name in ("a", "b"):
            servers.replicas[name].kill()
        killed_s = time.monotonic()
        load.wait(100)
        assert "tritons,a,DOWN" in run(look, servers)
        servers.replicas["b"].start().wait_until_ready()
        killed.ports = free_ports(len(PORTS))
        killed.start().wait_until_ready()
        moved = replace.replace("gateways:9000", f"gateways:{killed.ports[-1]}")
        answer = run(moved.replace("tritons:8000", f"tritons:{killed.ports[0]}"), servers)
        assert "changed from" in answer
        wait_until(lambda: num_answered(killed) > 20)
    lost = [outcome for outcome in load.outcomes if outcome.answer != V1]
    assert all(outcome.sent_s < killed_s for outcome in lost), lost
    assert len(lost) < NUM_CLIENTS
    assert all(re.match("502: |lost: Incomplete", outcome.answer) for outcome in lost), lost


def test_a_slow_server_gets_fewer_requests(servers: Fleet, texts: Texts) -> None:
    before = {name: num_answered(replica) for name, replica in servers.replicas.items()}
    with Load(servers, texts) as load:
        load.wait(300)
    gained = {name: num_answered(replica) - before[name] for name, replica in servers.replicas.items()}
    assert load.answers().keys() == {V1}
    assert 0 < gained["c"] < min(gained["a"], gained["b"])


def test_a_server_that_stands_still_is_passed_over(servers: Fleet, texts: Texts) -> None:
    stopped = servers.replicas["b"]
    with Load(servers, texts) as load:
        load.wait()
        stopped.signal(signal.SIGSTOP)
        wait_until(lambda: run(blocks("node-gone")[0], servers).count(",b,DOWN") == 2)
        passed_over_s = time.monotonic()
        load.wait(100)
        stopped.kill()  # which answers those that wait for it
        load.wait(100)
        stopped.start().wait_until_ready()
    assert load.answers(passed_over_s).keys() == {V1}
    assert {answer[:4] for answer in load.answers()} <= {V1, "502:", "lost"}


def test_a_bad_model_gets_no_request(servers: Fleet, texts: Texts) -> None:
    replica = servers.replicas["a"]
    _, drain, _, ready, _ = blocks("upgrade")
    with Load(servers, texts) as load:
        load.wait()
        run(drain, servers)
        assert replica.stop() == 0
        revise(replica, V1, "nothing")
        assert replica.start().serving.process.wait(90) == 1
        assert "hub_revision_not_found" in replica.serving.output()
        load.wait(100)
        revise(replica, "nothing", V1)
        replica.start().wait_until_ready()
        [look] = blocks("bad-model")
        assert MODEL in run(look, servers)
        run(ready, servers)
        load.wait(100)
    assert load.answers().keys() == {V1}


def test_an_upgrade_and_a_rollback_lose_nothing(servers: Fleet, texts: Texts) -> None:
    check, drain, look, ready, _ = blocks("upgrade")
    back, _ = blocks("rollback")
    upgraded = "a", "b"  # one after the other; the third takes as long again
    with Load(servers, texts) as load:
        load.wait()
        for name in upgraded:
            replica = servers.replicas[name]
            run(drain, servers, name)
            assert replica.stop() == 0
            revise(replica, V1, V2)
            run(check, servers, name)
            replica.start()
            assert "choices" in run(look, servers, name)
            run(ready, servers, name)
        load.wait()
        for name in upgraded:
            run(back, servers, name)
        load.wait_for(V1, num_answers=60)
    assert load.answers().keys() == {V1, V2}
