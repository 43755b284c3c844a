# SPDX-License-Identifier: Apache-2.0
"""Folders whose own model.py changes one thing, in under ten lines: each hook of the base class on a real server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_triton.server import TritonServer
from hf_triton.testing import build_tiny_checkpoint
from tests.client import generate
from tests.reference import Reference, load_reference

HEAD = """import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
"""
FOLDERS = {
    "plain": '    """As it is."""\n',
    "load": """    def load(self, checkpoint):
        checkpoint.model.lm_head.weight.data.mul_(-1)
        return checkpoint
""",
    "prompt": """    def build_prompt(self, text):
        return f"Question: {text}\\nAnswer:"
""",
    "processor": """    def logits_processor(self):
        def only_even(token_ids, scores):
            scores[1::2] = float("-inf")
            return scores

        return only_even
""",
    "rule": """    def is_complete(self, text):
        return len(text) >= 5
""",
    "after": """    def postprocess(self, text):
        return text.strip().upper()
""",
    "broken": """    def postprocess(self, text):
        raise ValueError(f"a fault that quotes {text}")
""",
}
PROMPT, NUM_TOKENS = "Where does the river go", 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return load_reference(checkpoint)


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]
) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("repository")
    for name, body in FOLDERS.items():
        folder = make_folder(root, name, huggingface_model=checkpoint, exclude_input_in_output="true")
        text = HEAD + body
        assert len(text.splitlines()) <= 11
        (folder / "1" / "model.py").write_text(text)
    with TritonServer(root) as running:
        yield running


def ask(server: TritonServer, name: str) -> str:
    reply = generate(server, name, PROMPT, max_new_tokens=NUM_TOKENS)
    assert reply.status == 200, reply.body
    return str(reply.json()["text_output"])


def continuation(reference: Reference, prompt: str, num_tokens: int = NUM_TOKENS) -> str:
    return reference.text(prompt, num_tokens).removeprefix(prompt)


def test_what_was_loaded_can_be_changed(server: TritonServer, reference: Reference) -> None:
    reference.model.lm_head.weight.data.mul_(-1)
    try:
        wanted = continuation(reference, PROMPT)
    finally:
        reference.model.lm_head.weight.data.mul_(-1)
    assert ask(server, "load") == wanted != ask(server, "plain")


def test_a_prompt_can_be_built(server: TritonServer, reference: Reference) -> None:
    assert ask(server, "prompt") == continuation(reference, f"Question: {PROMPT}\nAnswer:")
    reply = generate(server, "prompt", PROMPT, max_new_tokens=3, exclude_input_in_output=False)
    assert reply.json()["text_output"].startswith(PROMPT)


def test_scores_can_be_processed(server: TritonServer, reference: Reference) -> None:
    ids = reference.tokenizer(PROMPT).input_ids
    text = ask(server, "processor")
    assert text != ask(server, "plain")
    tokens = list(ids)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            scores = reference.model(torch.tensor([tokens])).logits[0, -1]
            scores[1::2] = float("-inf")
            tokens.append(int(scores.argmax()))
    before, whole = (reference.tokenizer.decode(each, skip_special_tokens=True) for each in (ids, tokens))
    assert text == whole[len(before) :]


def test_a_text_can_be_ended(server: TritonServer) -> None:
    whole, text = ask(server, "plain"), ask(server, "rule")
    assert whole.startswith(text)
    assert 5 <= len(text) < len(whole)


def test_a_text_can_be_changed(server: TritonServer) -> None:
    assert ask(server, "after") == ask(server, "plain").strip().upper()


def test_a_hook_that_fails_refuses_its_request_and_shows_nothing_of_it(server: TritonServer) -> None:
    reply = generate(server, "broken", PROMPT, max_new_tokens=3)
    assert reply.status == 400
    assert "internal: putting the answer together failed" in reply.body
    assert "quotes" not in reply.body
    assert "quotes" not in server.log_tail(200)
    assert server.is_model_ready("broken")
