# SPDX-License-Identifier: Apache-2.0
"""Cached checkpoints are not downloaded again: second start, offline, damaged cache, two instances at once."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_triton.testing import LoopbackHub, TritonServer, build_tiny_checkpoint
from tests.support.client import generate, post

pytestmark = pytest.mark.full

GATED, SHARED, TOKENIZER = "meta-llama/Llama-2-7b-hf", "tiiuae/falcon-7b", "org/tokenizer"
TWO_INSTANCES = "instance_group [{ kind: KIND_CPU, count: 2 }]"
PROMPT = "Where does the river go"


@dataclass(frozen=True)
class Site:
    """A Hub with three models, and a cache that the first start fills."""

    root: Path
    hub: LoopbackHub
    make_folder: Callable[..., Path]

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def environment(self, **variables: str) -> dict[str, str]:
        places = {"HF_HOME": str(self.root / "home"), "TRANSFORMERS_CACHE": str(self.cache)}
        return self.hub.environment() | places | variables

    def paths(self, method: str = "") -> list[str]:
        return [request.path for request in self.hub.requests if request.method.startswith(method)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("cache")
    falcon = build_tiny_checkpoint(root / "falcon", "falcon")
    llama = build_tiny_checkpoint(root / "llama", "llama")
    bare = build_tiny_checkpoint(root / "bare", "llama", seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with LoopbackHub() as hub:
        hub.add(SHARED, falcon)
        hub.add(GATED, llama, gated=True, revisions={"bare": bare})
        hub.add(TOKENIZER, llama)
        yield Site(root, hub, make_folder)


def states_of(server: TritonServer) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in post(server, "/v2/repository/index", {}).json()}


def texts_of(server: TritonServer, *models: str) -> dict[str, str]:
    replies = {model: generate(server, model, PROMPT, max_new_tokens=8) for model in models}
    return {model: reply.json()["text_output"] for model, reply in replies.items()}


def command_lines() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


@dataclass(frozen=True)
class FirstStart:
    texts: dict[str, str]
    log: str
    index: str
    requests: list[str]
    command_lines: str


@pytest.fixture(scope="module")
def first_start(site: Site) -> FirstStart:
    repository = site.root / "first"
    site.make_folder(repository, "twins", config=TWO_INSTANCES, huggingface_model=SHARED)
    site.make_folder(repository, "gated", huggingface_model=GATED)
    site.make_folder(repository, "parts", huggingface_model=GATED, revision="bare", tokenizer=TOKENIZER)
    site.hub.slow(f"/cdn/{SHARED}", bytes_per_s=200_000)  # 3 s, so that both instances want it at once
    environment = site.environment(PRIVATE_REPO_TOKEN=site.hub.access_token)
    server = TritonServer(repository, environment=environment)
    seen = []
    try:
        server.start()
        while server.is_running() and not server.is_live():
            seen.append(command_lines())
            time.sleep(0.05)
        states = states_of(server)
        assert {state["state"] for state in states.values()} == {"READY"}, states
        texts = texts_of(server, "twins", "gated", "parts")
        return FirstStart(texts, server.read_log(), str(states), site.paths("GET"), "\n".join(seen))
    finally:
        server.stop()
        site.hub.heal()


def test_two_instances_download_the_weights_once(first_start: FirstStart) -> None:
    assert len([path for path in first_start.requests if path.startswith(f"/cdn/{SHARED}")]) == 1


def test_log_names_the_source_of_each_setting(site: Site, first_start: FirstStart) -> None:
    assert f"twins: {SHARED} (revision main): downloading to {site.cache}" in first_start.log
    assert f"parts: {GATED} (revision bare): downloading to {site.cache}" in first_start.log
    assert f"parts: {TOKENIZER} (revision main): downloading to {site.cache}" in first_start.log
    assert f"twins: {SHARED}: downloaded in " in first_start.log


def test_a_revision_and_a_separate_tokenizer_are_used(first_start: FirstStart) -> None:
    assert first_start.texts["parts"] != first_start.texts["gated"]
    assert not [path for path in first_start.requests if TOKENIZER in path and "safetensors" in path]


def test_access_token_is_in_no_log_and_no_answer(site: Site, first_start: FirstStart) -> None:
    assert "hf_triton.hub.download" in first_start.command_lines
    for text in (first_start.log, first_start.index, first_start.command_lines):
        assert site.hub.access_token not in text


def test_offline_the_cache_serves_without_a_token_or_a_request(site: Site, first_start: FirstStart) -> None:
    repository = site.root / "offline"
    site.make_folder(repository, "gated", huggingface_model=GATED)
    site.make_folder(repository, "absent", huggingface_model="org/absent")
    site.make_folder(repository, "relative", huggingface_model="../../falcon")
    site.hub.requests.clear()
    with TritonServer(repository, environment=site.environment(HF_HUB_OFFLINE="1")) as server:
        states = states_of(server)
        texts = texts_of(server, "gated", "relative")
        log = server.read_log()
    assert site.hub.requests == []
    assert texts == {"gated": first_start.texts["gated"], "relative": first_start.texts["twins"]}
    assert f"gated: {GATED}: found in the cache {site.cache}" in log
    assert "offline_and_not_cached: org/absent" in states["absent"]["reason"]
    assert "unset it once, or mount a cache" in states["absent"]["reason"]


def test_a_second_start_asks_nothing_and_mends_a_damaged_cache(site: Site, first_start: FirstStart) -> None:
    repository = site.root / "second"
    site.make_folder(repository, "twins", config=TWO_INSTANCES, huggingface_model=SHARED)
    site.make_folder(repository, "gated", huggingface_model=GATED)
    (weights,) = site.cache.glob("models--tiiuae--falcon-7b/snapshots/*/model.safetensors")
    content = weights.read_bytes()
    weights.resolve().write_bytes(b"\xff" * 8 + content[8:])
    site.hub.requests.clear()
    with TritonServer(repository, environment=site.environment()) as server:
        states = states_of(server)
        assert {state["state"] for state in states.values()} == {"READY"}, states
        texts = texts_of(server, "twins", "gated")
        log = server.read_log()
    assert texts == {name: first_start.texts[name] for name in ("twins", "gated")}
    assert "twins: model.safetensors damaged in the cache (checkpoint_invalid); downloading again" in log
    assert weights.read_bytes() == content
    assert not [path for path in site.paths() if GATED in path]
    assert len([path for path in site.paths("GET") if path.startswith(f"/cdn/{SHARED}")]) == 1
