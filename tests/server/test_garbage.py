# SPDX-License-Identifier: Apache-2.0
"""An answered request leaves nothing in memory, without help of the garbage collector."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_triton.testing import build_tiny_checkpoint
from tests.support.client import Reply, generate, post
from tests.support.standard import StandardServer

MODEL = """import gc, json
from collections import Counter

import hf_triton


class TritonPythonModel(hf_triton.TritonPythonModel):
    def load(self, checkpoint):
        gc.disable()
        return checkpoint

    def postprocess(self, text):
        kinds = Counter(type(each).__name__ for each in gc.get_objects())
        return json.dumps({"frozen": gc.get_freeze_count(), **kinds})
"""
OF_A_REQUEST = (
    "TritonRequest",
    "GenerationResponse",
    "PreparedPrompt",
    "SequenceGroup",
    "Sequence",
    "SequenceSampler",
    "GenerationRequest",
)
REQUESTS: dict[str, dict[str, object]] = {
    "plain": {},
    "stopped": {"stop_strings": '["e", "a"]'},
    "several": {"num_return_sequences": 3, "best_of": 4, "temperature": 1.0, "seed": 1},
    "scored": {"logprobs": 2, "return_logprobs": True, "prompt_logprobs": 1},
    "chosen": {"guided_choice": '["yes", "no"]'},
    "streamed": {"stream": True},
    "misspelt": {"max_tokenz": 3},
    "too long": {"max_new_tokens": 1 << 20},
    "too late": {"max_time": 1e-6},
}
NUM_EACH = 4


@pytest.mark.full
def test_answered_request_is_freed(tmp_path: Path, make_folder: Callable[..., Path], standard: StandardServer) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", "llama")
    config = "model_transaction_policy { decoupled: true }"
    settings = {"huggingface_model": checkpoint, "exclude_input_in_output": "true"}
    folder = make_folder(tmp_path / "repository", "mine", config=config, **settings)
    (folder / "1" / "model.py").write_text(MODEL)
    with standard.beside(tmp_path / "repository") as server:

        def ask(**fields: object) -> Reply:
            path = f"/v2/models/mine/generate{'_stream' if fields.get('stream') else ''}"
            return post(server, path, {"text_input": "I am", "max_new_tokens": 8, "stream": False} | fields)

        statuses = {name: {ask(**fields).status for _ in range(NUM_EACH)} for name, fields in REQUESTS.items()}
        found = json.loads(generate(server, "mine", "I am", stream=False).json()["text_output"])
    refused = {"misspelt", "too long", "too late"}
    assert statuses == {name: {400 if name in refused else 200} for name in REQUESTS}
    assert found["frozen"] > 100_000
    assert {
        name: found[name] for name in OF_A_REQUEST if found.get(name, 0) > 2
    } == {}  # its own, and one on its way out
