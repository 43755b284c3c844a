# SPDX-License-Identifier: Apache-2.0
"""Checks of the hooks in a folder's own 1/model.py; tests/server/test_hooks.py has the hooks on a real server."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_triton.errors import HfTritonError
from hf_triton.tasks.checked_hooks import CheckedHooks, check_hooks, checked_load
from hf_triton.tasks.hooks import Hooks
from tests.support.hooks import FAILED, HEAD, NOTHING, WRONG

RUDE = """    def build_prompt(self, text):
        code = {"a number": 400, "nothing": None, "a sentence": "do not do this", "ok": "ok"}.get(text, "too_rude")
        if text == "half a letter":
            return "\\ud800"
        if text == "long":
            return "word " * 100_000
        raise hf_triton.errors.RequestError(code, "our \\ud800 words")
"""


class Checkpoint:
    """Has what `checked_load` needs of a checkpoint."""

    model: Any = None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The class of a folder whose model.py has this body."""

    def load(body: str) -> Any:
        path = tmp_path / "1" / "model.py"
        path.parent.mkdir()
        path.write_text(HEAD + body)
        spec = importlib.util.spec_from_file_location("model", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "model", module)
        spec.loader.exec_module(module)
        return module.TritonPythonModel

    return load


def test_hook_with_wrong_arguments_is_named(folder: Callable[[str], type[Hooks]]) -> None:
    hooks = CheckedHooks(folder('    def build_prompt(self):\n        return ""\n')())
    with pytest.raises(HfTritonError) as error:
        hooks.build_prompt("x")
    assert str(error.value) == (
        "hook_failed: build_prompt of the folder's own 1/model.py failed (TypeError as it was called: "
        "must it take (self, text), as docs/hooks.md shows?)"
    )


@pytest.mark.parametrize("fault", ["a number", "nothing", "a sentence", "ok"])
def test_error_with_an_invalid_code_is_the_fault_of_the_hook(folder: Callable[[str], Any], fault: str) -> None:
    with pytest.raises(HfTritonError) as error:
        CheckedHooks(folder(RUDE)()).build_prompt(fault)
    sentence = "raised an error whose code is not a word of a-z, 0-9 and _, other than ok"
    assert str(error.value) == f"hook_failed: build_prompt of the folder's own 1/model.py {sentence}"


def test_built_prompt_is_checked(folder: Callable[[str], Any]) -> None:
    hooks = CheckedHooks(folder(RUDE)(), max_prompt_bytes=4096)
    with pytest.raises(HfTritonError) as error:
        hooks.build_prompt("half a letter")
    wrong = WRONG.format("build_prompt", "a string that UTF-8 can encode", "a value of type str")
    assert str(error.value) == f"hook_failed: {wrong}"
    with pytest.raises(HfTritonError) as error:
        hooks.build_prompt("long")
    assert str(error.value) == (
        "context_exceeded: build_prompt of the folder's own 1/model.py makes 500000 bytes of the prompt, more than the "
        "4096 that are accepted (setting max_prompt_bytes)"
    )


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("pass", NOTHING.format("load", "the checkpoint")),
        ("return self", WRONG.format("load", "the checkpoint", "a value of type TritonPythonModel")),
        ('raise ValueError("no adapter here")', FAILED.format("load", "ValueError", 6) + ": no adapter here"),
    ],
)
def test_load_that_fails_is_named(folder: Callable[[str], Any], body: str, sentence: str) -> None:
    model = folder(f"    def load(self, checkpoint):\n        {body}\n")()
    with pytest.raises(HfTritonError) as error:
        checked_load(model, Checkpoint())  # type: ignore[arg-type]
    assert str(error.value) == f"hook_failed: {sentence}"


def test_hook_that_is_no_method_is_refused(folder: Callable[[str], Any]) -> None:
    sentence = "hook_failed: logits_processor of the folder's own 1/model.py is not a method: define it with def"
    with pytest.raises(HfTritonError, match=sentence):
        check_hooks(folder("    logits_processor = None\n"))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("def build_prompt(self)", "self, text"),
        ("def logits_processor(self, token_ids, scores)", "self"),
        ("def load(self)", "self, checkpoint"),
        ("def is_complete(self, text, more=1)", None),
        ("def postprocess(*args)", None),
    ],
)
def test_hooks_take_the_arguments_that_they_get(folder: Callable[[str], Any], line: str, wanted: str | None) -> None:
    model = folder(f"    {line}:\n        return None\n")
    if wanted is None:
        check_hooks(model)
        return
    with pytest.raises(HfTritonError, match=rf"must take \({wanted}\), as docs/hooks.md shows"):
        check_hooks(model)
