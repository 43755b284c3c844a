# SPDX-License-Identifier: Apache-2.0
"""Models are added, changed, rolled back and removed while clients ask them: no request is lost or wrongly answered."""

import contextlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from hf_triton.testing import LoopbackHub, TritonServer, build_tiny_checkpoint
from tests.support.client import Reply, get, post
from tests.support.gateway import wait_until
from tests.support.haproxy import Front, haproxy, needs_haproxy
from tests.support.paths import ROOT
from tests.support.reference import load_reference
from tests.support.sentence_checkpoints import reference_embeddings, save_sentence_model
from tests.support.traffic import Questions, Traffic

pytestmark = pytest.mark.full

PROMPTS = ("How far is it", "The harbour", "Der Zug fährt")
NUM_TOKENS = 8
TEXT, EMBED, STREAM = "text", "embed", "text_stream"
MAIN, V2 = "main", "v2"
"""The revisions on the Hub."""
NOT_LOADED = "has no available versions"
NUM_REQUESTS = 200


# --- two models in two revisions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """A model that generates and an encoder, each in two revisions, on a Hub of the tests."""

    environment: Mapping[str, str]
    texts: Mapping[str, list[str]]
    """The completion of each prompt, by revision."""
    vectors: Mapping[str, Any]

    def questions(self, model: str, version: str = "") -> Questions:
        """What clients ask a model, with the revision that an answer comes from."""
        path = f"/v2/models/{model}{version and f'/versions/{version}'}"
        if model == STREAM:
            return Questions(f"{path}/generate_stream", [{"text_input": text} for text in PROMPTS], self._read_stream)
        name = "text" if model.startswith(EMBED) else "text_input"
        read = self._read_vector if name == "text" else self._read_text
        return Questions(f"{path}/generate", [{name: text} for text in PROMPTS], read)

    def _read_text(self, client: int, reply: Reply) -> str:
        return self._revision_of(client, reply.json()["text_output"]) if reply.status == 200 else reply.error

    def _read_stream(self, client: int, reply: Reply) -> str:
        events = [json.loads(event.removeprefix("data: ")) for event in reply.body.split("\n\n") if event]
        if "error" in events[-1]:
            return str(events[-1]["error"])
        return self._revision_of(client, "".join(event["text_output"] for event in events))

    def _revision_of(self, client: int, text: str) -> str:
        return next((revision for revision, texts in self.texts.items() if texts[client] == text), f"wrong: {text!r}")

    def _read_vector(self, client: int, reply: Reply) -> str:
        if reply.status != 200:
            return reply.error
        vector = np.array(reply.json()["embedding"])
        same = (name for name, vectors in self.vectors.items() if np.allclose(vector, vectors[client], atol=1e-5))
        return next(same, "wrong vector")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    root = tmp_path_factory.mktemp("checkpoints")
    generating = {
        revision: build_tiny_checkpoint(root / f"text-{revision}", "llama", seed=seed, eos_token_id=None)
        for seed, revision in enumerate((MAIN, V2))
    }
    encoding = {
        revision: save_sentence_model(root / f"embed-{revision}", pooling=pooling)
        for revision, pooling in ((MAIN, "mean"), (V2, "cls"))
    }
    references = {revision: load_reference(folder) for revision, folder in generating.items()}
    with LoopbackHub() as hub:
        hub.add("acme/text", generating[MAIN], revisions={V2: generating[V2]})
        hub.add("acme/embed", encoding[MAIN], revisions={V2: encoding[V2]})
        yield Models(
            {**hub.environment(), "HF_HOME": str(root / "home")},
            {
                revision: [reference.text(text, NUM_TOKENS).removeprefix(text) for text in PROMPTS]
                for revision, reference in references.items()
            },
            {revision: reference_embeddings(folder, PROMPTS) for revision, folder in encoding.items()},
        )


Configure = Callable[..., Path]
"""Makes a folder, or gives it another config.pbtxt."""


@pytest.fixture(scope="module")
def configure(make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Configure:
    def configure(repository: Path, name: str, config: str = "", **settings: str) -> Path:
        settings = {"huggingface_model": f"acme/{TEXT if name == TEXT else EMBED}", **settings}
        if name == TEXT:
            settings |= {"max_output_length": str(NUM_TOKENS), "exclude_input_in_output": "true"}
        else:
            settings["task"] = "embeddings"
        made = make_folder(tmp_path_factory.mktemp("new"), name, config=config, **settings)
        if (repository / name).exists():
            os.replace(made / "config.pbtxt", repository / name / "config.pbtxt")
        else:
            made.rename(repository / name)
        return repository / name

    return configure


def start(configure: Configure, repository: Path, models: Models, *arguments: str) -> TritonServer:
    for name in (TEXT, EMBED):
        configure(repository, name)
    return TritonServer(repository, arguments=arguments, environment=models.environment)


@pytest.fixture(scope="module")
def polling(models: Models, configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Looks at its repository every second; serves main, then v2."""
    root = tmp_path_factory.mktemp("polling")
    with start(configure, root, models, "--model-control-mode=poll", "--repository-poll-secs=1") as server:
        yield server


@pytest.fixture(scope="module")
def explicit(models: Models, configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Loads and unloads on request; has a stream door."""
    root = tmp_path_factory.mktemp("explicit")
    shutil.copytree(ROOT / "stream_door", root / STREAM)
    # Triton 24.10 counts a model that failed to load beside an older one as live, and waits for it when it stops.
    arguments = ("--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=3")
    with start(configure, root, models, *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def client(explicit: TritonServer) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(explicit.grpc_url) as client:
        yield client


def count_loads(server: TritonServer) -> int:
    return server.read_log().count("TRITONBACKEND_ModelInstanceInitialize")


@contextlib.contextmanager
def asked(server: TritonServer, models: Models, *names: str) -> Iterator[list[Traffic]]:
    """Traffic to some models, each of which answers as it should, in one of its revisions, to the end."""
    with contextlib.ExitStack() as stack:
        all_traffic = [stack.enter_context(Traffic(server, models.questions(name))) for name in names]
        for traffic in all_traffic:
            traffic.wait_for(MAIN)
        yield all_traffic
    for traffic in all_traffic:
        assert set(traffic.answers()) <= {MAIN, V2}, traffic.answers()


def wait_for(all_traffic: list[Traffic], revision: str) -> None:
    """Wait until every model answers in a revision."""
    for traffic in all_traffic:
        traffic.wait_for(revision)


def state_of(server: TritonServer, name: str) -> set[str]:
    return {model.state for model in server.models() if model.name == name}


# --- the modes of model control --------------------------------------------------------------------------------------


def test_polling_server_takes_folders_as_they_come_change_and_go(
    polling: TritonServer, models: Models, configure: Configure, tmp_path: Path
) -> None:
    repository = polling.model_repository
    with asked(polling, models, TEXT, EMBED) as traffic:
        configure(repository, "embed_added")
        for name in (TEXT, EMBED):
            configure(repository, name, revision=V2)
        wait_for(traffic, V2)
        wait_until(lambda: polling.is_model_ready("embed_added"), 120)
        with Traffic(polling, models.questions("embed_added")) as added:
            added.wait_for(MAIN)
            changed_s = time.monotonic()
            (repository / "embed_added").rename(tmp_path / "removed")  # 24.10 keeps what it sees half removed
            wait_until(lambda: any(NOT_LOADED in answer for answer in added.answers()), 120)
        for answer in added.answers():
            assert answer == MAIN or NOT_LOADED in answer
        assert {V2} == set(traffic[0].answers(changed_s)) == set(traffic[1].answers(changed_s))


@needs_haproxy
def test_haproxy_sends_a_tenth_to_the_new_server(
    polling: TritonServer, explicit: TritonServer, models: Models, configure: Configure, tmp_path: Path
) -> None:
    names = (TEXT, EMBED)
    for name in names:  # as they are after the test above
        configure(polling.model_repository, name, revision=V2)
        with Traffic(polling, models.questions(name)) as traffic:
            traffic.wait_for(V2)
    with canary(tmp_path, explicit, polling) as (front, _):
        wait_until(lambda: get_status(front) == 200)
        for name in names:
            answers = ask_often(models, front, name)
            assert Counter(answers) == {MAIN: 180, V2: 20}


def test_explicit_server_reloads_without_a_gap(
    explicit: TritonServer, client: Any, models: Models, configure: Configure
) -> None:
    repository = explicit.model_repository
    with asked(explicit, models, TEXT, EMBED, STREAM) as traffic:
        configure(repository, EMBED, revision="nothing")
        with pytest.raises(InferenceServerException, match="hub_revision_not_found"):
            client.load_model(EMBED)
        for name in (TEXT, EMBED):
            configure(repository, name, revision=V2)
            client.load_model(name)
        wait_for(traffic, V2)
        assert max(each.slowest_s(0) for each in traffic) < 10  # gRPC; a load over HTTP delays other responses


def test_unloaded_model_is_refused_and_the_others_serve(explicit: TritonServer, client: Any, models: Models) -> None:
    with Traffic(explicit, models.questions(EMBED)) as other, Traffic(explicit, models.questions(TEXT)) as traffic:
        wait_until(lambda: len(other.answers()) == len(traffic.answers()) == 1)
        (revision,) = traffic.answers()
        client.unload_model(TEXT)
        wait_until(lambda: any(NOT_LOADED in answer for answer in traffic.answers()))
        client.load_model(TEXT)
        traffic.wait_for(revision)
    assert len(other.answers()) == 1
    for answer in traffic.answers():
        assert answer == revision or NOT_LOADED in answer


# --- versions --------------------------------------------------------------------------------------------------------


def version_of_the_documents() -> str:
    """The model.py of docs/operations.md that chooses a revision."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```\n", text, flags=re.S | re.M)
    return str(block)


@pytest.fixture(scope="module")
def two_versions(explicit: TritonServer, client: Any, configure: Configure) -> None:
    """Version 1 of both folders has main, and version 2 has v2."""
    for name in (TEXT, EMBED):
        folder = configure(explicit.model_repository, name, "version_policy { all { } }")
        (folder / "2").mkdir()
        (folder / "2" / "model.py").write_text(version_of_the_documents())
        client.load_model(name)


@pytest.mark.usefixtures("two_versions")
def test_versions_have_their_own_revisions(explicit: TritonServer, models: Models) -> None:
    for name in (TEXT, EMBED):
        for version, revision in (("1", MAIN), ("2", V2), ("", V2)):
            questions = models.questions(name, version)
            for number, body in enumerate(questions.bodies):
                assert questions.read(number, post(explicit, questions.path, body)) == revision


@pytest.mark.usefixtures("two_versions")
@needs_haproxy
def test_haproxy_sends_a_tenth_to_the_new_version(explicit: TritonServer, models: Models, tmp_path: Path) -> None:
    with canary(tmp_path, explicit, explicit) as (_, front):
        answers = ask_often(models, front, EMBED)
    assert answers.count(MAIN) + answers.count(V2) == NUM_REQUESTS
    assert 3 <= answers.count(V2) <= 45  # 20 on average; outside with a probability below 1e-6


@pytest.mark.usefixtures("two_versions")
def test_rollback_to_the_first_version_loads_nothing(
    explicit: TritonServer, client: Any, models: Models, configure: Configure
) -> None:
    all_traffic = [Traffic(explicit, models.questions(name)) for name in (TEXT, EMBED, STREAM)]
    with contextlib.ExitStack() as stack:
        for traffic in all_traffic:
            stack.enter_context(traffic)
        wait_for(all_traffic, V2)
        num_loads = count_loads(explicit)
        for name in (TEXT, EMBED):
            configure(explicit.model_repository, name, "version_policy { specific { versions: [1] } }")
            client.load_model(name)
        assert count_loads(explicit) == num_loads > 0
        wait_for(all_traffic, MAIN)
        wait_until(lambda: "UNLOADING" not in state_of(explicit, TEXT) | state_of(explicit, EMBED))
    for traffic in all_traffic:
        assert set(traffic.answers()) == {MAIN, V2}


# --- a canary --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def canary(folder: Path, stable: TritonServer, canary: TritonServer) -> Iterator[tuple[Front, Front]]:
    """HAProxy with the example's configuration: its ports for two servers, and for two versions."""
    with haproxy("canary.cfg", folder, {8000: stable.http_port, 8100: canary.http_port}) as ports:
        yield Front(f"http://127.0.0.1:{ports[8080]}"), Front(f"http://127.0.0.1:{ports[8081]}")


def get_status(front: Front) -> int:
    with contextlib.suppress(OSError):
        return get(front, "/v2/health/ready").status
    return 0


def ask_often(models: Models, front: Front, model: str) -> list[str]:
    questions = models.questions(model)
    clients = [number % len(questions.bodies) for number in range(NUM_REQUESTS)]
    return [questions.read(client, post(front, questions.path, questions.bodies[client])) for client in clients]
