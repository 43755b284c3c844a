# SPDX-License-Identifier: Apache-2.0
"""What each hook of the base class changes, in a model.py of under ten lines; tests/server/test_hooks.py has faults."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chat import build_chat_checkpoint
from tests.support.hooks import HEAD
from tests.support.image_serving import WAIT_S, Served
from tests.support.reference import Reference, load_reference

HOOKS = {
    "load": """    def load(self, checkpoint):
        checkpoint.model.lm_head.weight.data.mul_(-1)
        return checkpoint
""",
    "prompt": """    def build_prompt(self, text):
        return f"Question: {text}\\nAnswer:"

    def postprocess(self, text):
        return text.strip().upper()
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
}
PICKY = """    def logits_processor(self):
        def process(token_ids, scores):
            if len(token_ids) == 30:
                raise RuntimeError("a fault that quotes")
            return scores

        return process
"""
TAUGHT = """    def load(self, checkpoint):
        import copy

        import torch

        checkpoint.tokenizer = copy.deepcopy(checkpoint.tokenizer)
        checkpoint.tokenizer.add_tokens(["<ebb>", "<flow>"])
        checkpoint.model.resize_token_embeddings(len(checkpoint.tokenizer))
        base = checkpoint.model.model
        base.norm = torch.nn.Sequential(base.norm, torch.nn.Dropout(0.5))
        return checkpoint
"""
PROMPT, NUM_TOKENS = "Where does the river go", 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return load_reference(checkpoint)


@pytest.fixture
def serve(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Served]]:
    """Serve the checkpoint by a class whose body is given."""
    with ExitStack() as stack:

        def start(body: str) -> Served:
            (tmp_path / "model.py").write_text(HEAD + body)
            spec = importlib.util.spec_from_file_location("model", tmp_path / "model.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, "model", module)
            spec.loader.exec_module(module)
            return stack.enter_context(closing(Served(checkpoint, hooks=module.TritonPythonModel())))

        yield start


def ask(served: Served, prompt: str = PROMPT, **asked: Any) -> str:
    row = served.ask(prompt, **{"max_new_tokens": NUM_TOKENS, "exclude_input_in_output": True, **asked})
    return str(row.text_output)


def continuation(reference: Reference, prompt: str) -> str:
    return reference.text(prompt, NUM_TOKENS).removeprefix(prompt)


def test_each_is_short() -> None:
    assert all(len((HEAD + body).splitlines()) <= 11 for body in HOOKS.values())


def test_load_can_change_the_checkpoint(serve: Callable[[str], Served], reference: Reference) -> None:
    plain = continuation(reference, PROMPT)
    reference.model.lm_head.weight.data.mul_(-1)
    try:
        wanted = continuation(reference, PROMPT)
    finally:
        reference.model.lm_head.weight.data.mul_(-1)
    assert ask(serve(HOOKS["load"])) == wanted != plain


def test_load_can_add_tokens_and_layers(serve: Callable[[str], Served], reference: Reference) -> None:
    """New tokens are the model's as the others are; new layers are in eval mode."""
    ebb = len(reference.tokenizer)
    flow, taught = ebb + 1, serve(TAUGHT)
    assert ask(taught, logit_bias={ebb: -100, flow: -100}) == continuation(reference, PROMPT)
    assert ask(taught, "The <ebb> and", logit_bias={flow: 100}, max_new_tokens=2) == "<flow><flow>"
    refused = taught.start(PROMPT, logit_bias={flow + 1: 1})
    assert refused.is_finished.wait(WAIT_S)
    words = f"names the token {flow + 1}, and the model's token ids are below {flow + 1}"
    assert words in str(refused.results[0])
    assert taught.ask("x", eos_token_id=(ebb,), max_new_tokens=1)


def test_build_prompt_and_postprocess_change_the_texts(serve: Callable[[str], Served], reference: Reference) -> None:
    text, served = continuation(reference, f"Question: {PROMPT}\nAnswer:"), serve(HOOKS["prompt"])
    assert ask(served) == text.strip().upper() != text
    assert ask(served, exclude_input_in_output=False).startswith(PROMPT)


def test_logits_processor_changes_the_scores(serve: Callable[[str], Served], reference: Reference) -> None:
    ids = reference.tokenizer(PROMPT).input_ids
    tokens = list(ids)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            scores = reference.model(torch.tensor([tokens])).logits[0, -1]
            scores[1::2] = float("-inf")
            tokens.append(int(scores.argmax()))
    before, whole = (reference.tokenizer.decode(each, skip_special_tokens=True) for each in (ids, tokens))
    text = ask(serve(HOOKS["processor"]))
    assert text == whole[len(before) :]
    assert text != continuation(reference, PROMPT)


def test_is_complete_ends_the_completion(serve: Callable[[str], Served], reference: Reference) -> None:
    whole, text = continuation(reference, PROMPT), ask(serve(HOOKS["rule"]))
    assert whole.startswith(text)
    assert 5 <= len(text) < len(whole)


def test_failing_processor_affects_no_other_request(
    serve: Callable[[str], Served], reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    """All are written side by side; those of one length fail in the middle of their texts."""
    short, served = "The", serve(PICKY)
    caplog.set_level(logging.INFO, logger="hf_triton")
    replies = [
        served.start(text, max_new_tokens=tokens, exclude_input_in_output=True)
        for text, tokens in [(short, NUM_TOKENS), (PROMPT, 60)] * 4
    ]
    assert all(reply.is_finished.wait(WAIT_S) for reply in replies)
    ends: list[Any] = [result for reply in replies for result in reply.results]
    assert [row.text_output for [row] in ends[::2]] == [continuation(reference, short)] * 4
    assert [(each.code, "logits_processor" in each.sentence) for each in ends[1::2]] == [("hook_failed", True)] * 4
    assert "again" not in caplog.text
