# SPDX-License-Identifier: Apache-2.0
"""Models share one CPU, each in its own process: a busy model leaves the others their share of the cores."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import generate, post

NUM_CORES = len(os.sched_getaffinity(0))
MODEL = """import time, torch, hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    def logits_processor(self):
        def note(token_ids, scores):
            time.sleep({pause_s})
            self.num_threads = torch.get_num_threads()
            return scores
        return note

    def postprocess(self, text):
        return str(self.num_threads)
"""


def wait_for_threads(server: TritonServer, model: str, wanted: int) -> None:
    deadline_s = time.monotonic() + 60
    while (seen := generate(server, model, "a", max_new_tokens=2).json()["text_output"]) != str(wanted):
        assert time.monotonic() < deadline_s, f"{model} computes with {seen} threads"


@pytest.mark.skipif(NUM_CORES < 2, reason="one core has one thread")
@pytest.mark.serial
@pytest.mark.full
def test_model_uses_its_share_of_the_cores_beside_a_busy_model(
    tmp_path: Path, make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", "llama")
    for name, engine, pause_s in (("slow", "continuous", 0.1), ("continuous", "continuous", 0), ("batch", "batch", 0)):
        folder = make_folder(
            tmp_path / "repository", name, huggingface_model=checkpoint, engine=engine, exclude_input_in_output="true"
        )
        (folder / "1" / "model.py").write_text(MODEL.format(pause_s=pause_s))
    with TritonServer(tmp_path / "repository", exit_on_error=True) as server, ThreadPoolExecutor() as pool:
        for name in ("continuous", "batch"):
            wait_for_threads(server, name, alone := int(generate(server, name, "a").json()["text_output"]))
            long_text = pool.submit(generate, server, "slow", "a", id="long", max_new_tokens=200, ignore_eos=True)
            wait_for_threads(server, name, max(1, min(alone, NUM_CORES // 2)))
            post(server, "/v2/models/slow/generate", {"id": "long", "cancel": True})
            assert "cancelled" in long_text.result().error
            wait_for_threads(server, name, alone)
