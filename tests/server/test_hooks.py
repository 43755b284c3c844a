# SPDX-License-Identifier: Apache-2.0
"""Hooks that are slow or at fault, on a real server; tests/tasks/test_text_hooks.py has what hooks change."""

import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_triton.server import TritonServer
from hf_triton.tasks.text_generation.service import NUM_HOOK_THREADS
from tests.support.client import generate, post
from tests.support.hooks import FAILED, HEAD, NOTHING, WRONG
from tests.support.standard import StandardServer

pytestmark = pytest.mark.full
BROKEN = (
    HEAD
    + """    def build_prompt(self, text):
        self.fault = text
        if text == "chatty: é":
            print(text)
        if text == "rude":
            raise hf_triton.errors.RequestError("too_rude", "our \\ud800 words")
        if text == "its own build_prompt":
            raise ValueError(f"a fault that quotes {text}")
        return {"build_prompt: nothing": None, "build_prompt: a list": [text]}.get(text, text)

    def logits_processor(self):
        if self.fault == "making a processor":
            raise KeyError(f"a fault that quotes {self.fault}")
        return "a fault that quotes" if self.fault == "a processor: a text" else self.process

    def process(self, token_ids, scores):
        if self.fault == "running a processor":
            raise IndexError(f"a fault that quotes {token_ids}")
        if self.fault == "scores: nan":
            return scores * float("nan")
        results = {"scores: nothing": None, "scores: some": scores[:10], "scores: a list": scores.tolist()}
        return results.get(self.fault, scores)

    def is_complete(self, text):
        if self.fault == "its own is_complete":
            raise RuntimeError(f"a fault that quotes {text}")
        return None if self.fault == "is_complete: nothing" else False

    def postprocess(self, text):
        import json

        if self.fault == "in a library":
            json.loads(f"a fault that quotes {text}")
        if self.fault == "an error of ours":
            raise hf_triton.errors.RequestError("invalid_input", "our own words")
        return text.encode() if self.fault == "postprocess: bytes" else text
"""
)
"""What fails is said by the prompt."""
SLOW_S = 4.0
SLOW = f"""    def postprocess(self, text):
        import time

        time.sleep({SLOW_S})
        return text
"""
RAISING_LOAD = """    def load(self, checkpoint):
        raise ValueError("no adapter here")
"""
PROMPT = "Where does the river go"


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path], standard: StandardServer
) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("repository")
    for name, text in {"slow_hook": HEAD + SLOW, "raising_load": HEAD + RAISING_LOAD, "broken": BROKEN}.items():
        folder = make_folder(root, name, huggingface_model=standard.checkpoint, exclude_input_in_output="true")
        (folder / "1" / "model.py").write_text(text)
    standard.serve("plain")
    with standard.beside(root) as running:
        yield running


def test_slow_hook_delays_no_stop_and_skips_cancelled_requests(server: TritonServer) -> None:
    names = [str(number) for number in range(NUM_HOOK_THREADS + 3)]
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [pool.submit(generate, server, "slow_hook", PROMPT, max_new_tokens=3, id=name) for name in names]
        time.sleep(1)  # as many as there are threads are being changed, and the others wait for that
        while not all(each.done() for each in asked):
            for name in names:
                started_s = time.monotonic()
                assert post(server, "/v2/models/slow_hook/generate", {"id": name, "cancel": True}).status == 200
                assert time.monotonic() - started_s < SLOW_S / 2
    ends = [each.result() for each in asked]
    assert [each.status for each in ends].count(200) <= NUM_HOOK_THREADS
    assert {each.error for each in ends if each.status != 200} == {CANCELLED}


CANCELLED = "cancelled: the client cancelled the request, or another request with its id did (`cancel` true)"
SCORES = "scores of shape [384]"


def failed(hook: str, error: str, line: str) -> str:
    """What is said of an exception that comes through the line of `BROKEN` that has a part in it."""
    [number] = [number for number, each in enumerate(BROKEN.splitlines(), start=1) if line in each]
    return FAILED.format(hook, error, number)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("its own build_prompt", failed("build_prompt", "ValueError", "raise ValueError")),
        ("making a processor", failed("logits_processor", "KeyError", "raise KeyError")),
        ("running a processor", failed("logits_processor", "IndexError", "raise IndexError")),
        ("its own is_complete", failed("is_complete", "RuntimeError", "raise RuntimeError")),
        ("in a library", failed("postprocess", "JSONDecodeError", "json.loads")),
        ("build_prompt: nothing", NOTHING.format("build_prompt", "a string")),
        ("build_prompt: a list", WRONG.format("build_prompt", "a string", "a value of type list")),
        (
            "a processor: a text",
            WRONG.format("logits_processor", "a function of token_ids and scores, or None", "a value of type str"),
        ),
        ("scores: nothing", NOTHING.format("logits_processor", SCORES)),
        ("scores: some", WRONG.format("logits_processor", SCORES, "[10]")),
        ("scores: a list", WRONG.format("logits_processor", SCORES, "a value of type list")),
        ("scores: nan", WRONG.format("logits_processor", SCORES, "nan")),
        ("is_complete: nothing", NOTHING.format("is_complete", "True or False")),
        ("postprocess: bytes", WRONG.format("postprocess", "a string", "a value of type bytes")),
    ],
)
def test_failing_hook_is_named_without_showing_the_prompt(server: TritonServer, fault: str, sentence: str) -> None:
    reply = generate(server, "broken", fault, max_new_tokens=3)
    assert reply.status == 400
    assert reply.error == f"hook_failed: {sentence}"
    deadline_s = time.monotonic() + 10
    while f"broken: {sentence}" not in (log := server.read_log()) and time.monotonic() < deadline_s:
        time.sleep(0.02)  # the log is written by another process
    assert log.count(f"broken: {sentence}") == 1
    assert "quotes" not in log
    assert fault not in log
    assert generate(server, "broken", PROMPT, max_new_tokens=3).status == 200


def test_request_error_of_a_hook_is_the_answer(server: TritonServer) -> None:
    reply = generate(server, "broken", "an error of ours", max_new_tokens=3)
    assert reply.error == "invalid_input: our own words"


def counted(server: TritonServer, model: str) -> str:
    """The metrics' lines of a model's requests."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return "\n".join(line for line in lines if line.startswith("hf_triton_requests_total") and f'"{model}"' in line)


def test_own_error_code_is_counted_as_hook_failed(server: TritonServer) -> None:
    before = counted(server, "broken")
    assert generate(server, "broken", "rude", max_new_tokens=3).error == "too_rude: our ? words"
    deadline_s = time.monotonic() + 10
    while (lines := counted(server, "broken")) == before and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert 'outcome="hook_failed"' in lines
    assert "rude" not in lines


def test_output_of_a_hook_is_logged_at_once(server: TritonServer) -> None:
    told, plain = (generate(server, name, "chatty: é", max_new_tokens=3) for name in ("broken", "plain"))
    assert told.json()["text_output"] == plain.json()["text_output"]
    assert "chatty: é\n" in server.read_log()


def test_folder_that_cannot_load_says_why(server: TritonServer) -> None:
    [state] = [each for each in server.models() if each.name == "raising_load"]
    assert f"hook_failed: {FAILED.format('load', 'ValueError', 6)}: no adapter here" in state.reason
    assert "Traceback" not in state.reason
