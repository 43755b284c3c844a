# SPDX-License-Identifier: Apache-2.0
"""A folder whose checkpoint cannot be loaded gives the cause and a remedy, and does not affect other folders."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hf_triton.errors import CODES
from hf_triton.testing import LoopbackHub, TritonServer, build_tiny_checkpoint, reshape_tensor
from tests.support.client import generate, post

pytestmark = pytest.mark.full

Arm = Callable[[LoopbackHub, str], object]


@dataclass(frozen=True)
class Case:
    """A folder that must fail."""

    name: str
    code: str
    remedy: str
    arm: Arm | None = None
    """What goes wrong on the Hub, given the repository's name."""
    checkpoint: str | None = "good"
    """Which files the Hub has; None: no such repository."""
    is_gated: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


CASES = (  # the others: tests/unit/test_hub_failures.py and test_hub_download.py
    Case("absent", "hub_not_found", "correct huggingface_model, or set HF_TOKEN", checkpoint=None),
    Case("gated", "hub_gated", "accept its terms at", is_gated=True),
    Case("down", "hub_unavailable", "answers 503: try again later", lambda hub, repo: hub.fail(503, path=repo)),
    Case(
        "hanging",
        "hub_timeout",
        "raise download_timeout_s",
        lambda hub, repo: hub.hang(path=repo),
        settings={"download_timeout_s": 5},
    ),
    Case("corrupted", "hub_incomplete", "look for a proxy", lambda hub, repo: hub.corrupt(f"/cdn/{repo}")),
    Case("pickle", "weights_not_safe", "set allow_pickle to true", checkpoint="pickle"),
    Case("misshaped", "weights_mismatch", "use a complete checkpoint", checkpoint="misshaped"),
    Case("no-folder", "path_not_found", "correct huggingface_model", settings={"huggingface_model": "./absent"}),
)


def repo_of(case: str) -> str:
    return f"org/{case}-7b"  # none is the beginning of another, so that a fault meets one alone


def build_checkpoints(root: Path) -> dict[str, Path]:
    good = build_tiny_checkpoint(root / "good", "falcon")
    folders = {"good": good} | {name: shutil.copytree(good, root / name) for name in ("pickle", "misshaped")}
    (folders["pickle"] / "model.safetensors").rename(folders["pickle"] / "pytorch_model.bin")
    reshape_tensor(folders["misshaped"], "transformer.h.0.mlp.dense_4h_to_h.weight")
    return folders


def make_trouble(hub: LoopbackHub, checkpoints: dict[str, Path]) -> None:
    for case in CASES:
        if case.checkpoint is not None:
            hub.add(repo_of(case.name), checkpoints[case.checkpoint], gated=case.is_gated)
        if case.arm is not None:
            case.arm(hub, repo_of(case.name))
    hub.add(repo_of("recovers"), checkpoints["good"])
    hub.fail(503, path=repo_of("recovers"), times=2)
    hub.truncate(f"/cdn/{repo_of('recovers')}", after_bytes=100_000, times=1)
    hub.corrupt(f"/cdn/{repo_of('recovers')}", times=1)


@dataclass(frozen=True)
class Scene:
    hub: LoopbackHub
    server: TritonServer
    states: dict[str, dict[str, str]]
    """The index's entry by folder."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp("hub_errors")
    checkpoints, repository = build_checkpoints(root), root / "repository"
    for case in CASES:
        make_folder(repository, case.name, **({"huggingface_model": repo_of(case.name)} | case.settings))
    make_folder(repository, "recovers", huggingface_model=repo_of("recovers"))
    make_folder(repository, "healthy", huggingface_model=checkpoints["good"])
    with LoopbackHub() as hub:
        make_trouble(hub, checkpoints)
        environment = hub.environment() | {"HF_HOME": str(root / "home"), "HF_TOKEN": hub.stranger_token}
        with TritonServer(repository, environment=environment, ready_timeout_s=280) as server:
            index = post(server, "/v2/repository/index", {}).json()
            yield Scene(hub, server, {each["name"]: each for each in index})


def test_the_reason_has_a_code_the_name_and_a_remedy(scene: Scene) -> None:
    for case in CASES:
        state = scene.states[case.name]
        name = case.settings.get("huggingface_model", repo_of(case.name))
        assert state["state"] == "UNAVAILABLE", case.name
        assert state["reason"].removeprefix("Internal: TritonModelException: ").startswith(f"{case.code}: ")
        assert case.code in CODES
        assert name in state["reason"]
        assert case.remedy in state["reason"]


def test_no_reason_holds_a_traceback(scene: Scene) -> None:
    for state in scene.states.values():
        assert "Traceback" not in state.get("reason", "")
        assert "\n" not in state.get("reason", "").split("\n\nAt:")[0]


def test_the_other_folders_answer(scene: Scene) -> None:
    assert scene.states["healthy"]["state"] == "READY"
    reply = generate(scene.server, "healthy", "The old harbour", max_new_tokens=8)
    assert reply.status == 200, reply.body


def test_transient_hub_failure_is_retried(scene: Scene) -> None:
    assert scene.states["recovers"]["state"] == "READY", scene.states["recovers"]
    answers = [
        generate(scene.server, name, "The old harbour", max_new_tokens=8).json()["text_output"]
        for name in ("recovers", "healthy")
    ]
    assert answers[0] == answers[1]


def test_a_failed_folder_can_be_asked_and_shows_nothing_inside(scene: Scene) -> None:
    for case in CASES[:3]:
        reply = generate(scene.server, case.name, "The old harbour")
        assert reply.status in (400, 404)
        assert "Traceback" not in reply.body
        assert scene.hub.stranger_token not in reply.body


def test_access_token_is_in_no_log_and_no_answer(scene: Scene) -> None:
    token = scene.hub.stranger_token
    assert any(request.had_valid_token for request in scene.hub.requests)
    assert token not in scene.server.read_log()
    assert token not in str(scene.states)


def test_the_log_has_every_reason(scene: Scene) -> None:
    log = scene.server.read_log()
    for case in CASES:
        assert f"{case.code}: " in log
        assert case.remedy in log
