# SPDX-License-Identifier: Apache-2.0
"""Any model is a copied folder with one edited line, and gives the output of transformers."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from hf_triton.testing import LoopbackHub, TritonServer, build_tiny_checkpoint
from tests.support.client import generate, infer
from tests.support.paths import ROOT
from tests.support.reference import Reference, load_reference

pytestmark = pytest.mark.full

NAMED = {"opt": "facebook/opt-125m"}
"""Served by the Hub under this name; the others are folders on disk."""
ARCHITECTURES = (*NAMED, "qwen3_5", "t5")
PROMPTS = ["I am going", "x", "Where does the river go after the bridge?", "Der Zug fährt", "🙂", "3, 14"]
MAX_NEW_TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda architecture: build_tiny_checkpoint(root / architecture, architecture))


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    with LoopbackHub() as hub:
        for architecture, name in NAMED.items():
            hub.add(name, checkpoint(architecture))
        for architecture in ARCHITECTURES:
            copy_folder(repository / architecture, NAMED.get(architecture, str(checkpoint(architecture))))
        environment = hub.environment() | {"HF_HOME": str(tmp_path_factory.mktemp("home"))}
        with TritonServer(repository, environment=environment) as server:
            yield server


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda architecture: load_reference(checkpoint(architecture)))


def copy_folder(folder: Path, model: str) -> None:
    shutil.copytree(ROOT / "falcon7b", folder)
    config = folder / "config.pbtxt"
    before = config.read_text()
    after = before.replace("tiiuae/falcon-7b", model)
    assert sum(old != new for old, new in zip(before.split("\n"), after.split("\n"), strict=True)) == 1
    config.write_text(after)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_equals_transformers(
    architecture: str, server: TritonServer, reference: Callable[[str], Reference]
) -> None:
    assert server.is_model_ready(architecture), server.log_tail()
    wanted = [reference(architecture).text(prompt, MAX_NEW_TOKENS) for prompt in PROMPTS]
    assert len(set(wanted)) == len(PROMPTS)
    together = infer(server, architecture, PROMPTS, parameters={"max_new_tokens": MAX_NEW_TOKENS}).json()
    assert together["outputs"][0]["data"] == wanted
    alone = [generate(server, architecture, prompt, max_new_tokens=MAX_NEW_TOKENS).json() for prompt in PROMPTS]
    assert [each["text_output"] for each in alone] == wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_answer_begins_with_the_prompt_but_for_an_encoder_decoders(architecture: str, server: TritonServer) -> None:
    for excludes in (True, False):
        answer = generate(server, architecture, "I am going", max_new_tokens=8, exclude_input_in_output=excludes).json()
        begins = answer["text_output"].startswith("I am going")
        assert begins == (not excludes and architecture != "t5")


def test_all_at_once_each_its_own(server: TritonServer, reference: Callable[[str], Reference]) -> None:
    questions = [(architecture, prompt) for prompt in PROMPTS for architecture in ARCHITECTURES]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: generate(server, *each, max_new_tokens=6).json(), questions))
    assert [each["text_output"] for each in answers] == [reference(name).text(text, 6) for name, text in questions]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_prompt_s_log_probabilities_are_transformers_own(
    architecture: str, server: TritonServer, reference: Callable[[str], Reference]
) -> None:
    reply = generate(server, architecture, PROMPTS[2], max_new_tokens=2, prompt_logprobs=0)
    if architecture == "t5":
        sentence = "prompt_logprobs needs a model that continues its prompt, and this one is an encoder-decoder"
        assert (reply.status, reply.error) == (400, f"invalid_parameter: {sentence}: leave it out")
        return
    known = reference(architecture)
    ids = known.tokenizer(PROMPTS[2]).input_ids
    with torch.inference_mode():
        logprobs = known.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    first, *places = json.loads(reply.json()["prompt_logprobs"])
    assert first is None
    found = [(int(token_id), entry["logprob"]) for place in places for token_id, entry in place.items()]
    assert [token_id for token_id, _ in found] == ids[1:]
    expected = [logprobs[place, token_id].item() for place, token_id in enumerate(ids[1:])]
    assert [logprob for _, logprob in found] == pytest.approx(expected, abs=1e-4)


def test_encoder_decoder_generates_max_new_tokens_after_any_prompt(server: TritonServer) -> None:
    """Its prompt and its answer do not share the context."""
    long = "the river goes to the sea " * 30
    assert generate(server, "t5", long, max_new_tokens=100).status == 200
