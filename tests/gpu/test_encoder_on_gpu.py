# SPDX-License-Identifier: Apache-2.0
"""Encoders on CUDA devices: packed rows, attended to by one operation, have the outputs that the CPU has."""

import copy
from typing import Any

import pytest
import torch
from accelerate import dispatch_model

from hf_triton.encoder.forward import build_forward
from hf_triton.runner import step_attention
from hf_triton.runner.cuda import attention as cuda_attention
from hf_triton.runner.model_comparison import HALF_LIMIT
from tests.support.encoders import HEADS, build_model, expected_outputs, random_inputs

pytestmark = pytest.mark.full
IN_TWO: dict[str, Any] = {
    "bert": {"bert.embeddings": "cuda:0", "bert.encoder.layer.0": "cuda:0"}
    | dict.fromkeys(("bert.encoder.layer.1", "bert.pooler", "classifier"), "cuda:1"),
    "modernbert": dict.fromkeys(("model.embeddings", "model.rotary_emb", "model.layers.0"), "cuda:0")
    | dict.fromkeys(("model.layers.1", "model.layers.2", "model.final_norm", "head", "classifier"), "cuda:1"),
}
"""Where the parts of a model are."""


@pytest.fixture(autouse=True)
def _no_attention_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_attention, "attend_row", None)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        *(("bert", head) for head in HEADS),
        *(("roberta", "answers"), ("albert", "sequence"), ("modernbert", "answers"), ("qwen3", "sequence")),
    ],
)
def test_packed_rows_equal_each_alone(family: str, head: str) -> None:
    _, outputs, per_token = HEADS[head]
    model = build_model(family, head)
    inputs = random_inputs([5, 60, 3, 60, 12], with_types=family == "bert")
    expected = [expected_outputs(model, each, outputs, per_token=per_token) for each in inputs]
    forward = build_forward(copy.deepcopy(model).to("cuda"), outputs, per_token=per_token, decoding="eager")
    assert forward.way == "packed"
    for one, reference in zip(forward(inputs), expected, strict=True):
        assert one.device.type == "cuda"
        torch.testing.assert_close(one.cpu(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_packed_rows_of_16_bits_equal_those_of_32(family: str, dtype: torch.dtype) -> None:
    _, outputs, per_token = HEADS["embeddings"]
    model = build_model(family, "embeddings")
    inputs = random_inputs([5, 60, 3, 60, 12], with_types=family == "bert")
    expected = [expected_outputs(model, each, outputs, per_token=per_token) for each in inputs]
    forward = build_forward(copy.deepcopy(model).to("cuda", dtype), outputs, per_token=per_token, decoding="eager")
    assert forward.way == "packed"
    for one, reference in zip(forward(inputs), expected, strict=True):
        largest = float(reference.abs().max())
        torch.testing.assert_close(one.float().cpu(), reference, rtol=0, atol=HALF_LIMIT * largest)


def test_a_large_row_is_computed_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, attend_packed = set(), cuda_attention.attend_packed

    def note(query: torch.Tensor, *others: Any) -> torch.Tensor:
        num_tokens.add(len(query))
        return attend_packed(query, *others)

    _, outputs, per_token = HEADS["embeddings"]
    model = build_model("bert", "embeddings").to("cuda")
    eager: dict[str, Any] = {"per_token": per_token, "decoding": "eager"}
    build_forward(copy.deepcopy(model), outputs, **eager)  # tries the operation, with large rows too
    monkeypatch.setattr(cuda_attention, "attend_packed", note)
    build_forward(copy.deepcopy(model), outputs, **eager)
    assert max(num_tokens) > 1024


@pytest.mark.parametrize("family", IN_TWO)
def test_a_model_on_two_devices_is_packed(family: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    model = build_model(family, "sequence")
    inputs = random_inputs([5, 60, 3, 60, 12])
    expected = [expected_outputs(model, each, ("logits",), per_token=False) for each in inputs]
    forward = build_forward(dispatch_model(model, IN_TWO[family]), ("logits",), per_token=False)
    assert forward.way == "packed"
    for one, reference in zip(forward(inputs), expected, strict=True):
        torch.testing.assert_close(one.cpu(), reference, rtol=1e-4, atol=1e-4)
