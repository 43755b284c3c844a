# SPDX-License-Identifier: Apache-2.0
"""Attention of a packed row by one operation, as on a CUDA device, and by torch's, once for each length."""

from typing import Any

import pytest
import torch

from hf_triton.encoder.forward import EncoderForward
from hf_triton.runner import step_attention
from hf_triton.runner.cuda.attention import attend_packed
from tests.support.encoders import build_model, random_inputs


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "mistral"])
def test_both_ways_say_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(family, "embeddings")
    inputs = random_inputs([5, 60, 3, 60, 12])
    options: dict[str, Any] = {"per_token": True, "reduce": None, "way": "packed"}
    forward = EncoderForward(model, ("last_hidden_state",), **options)
    by_length = forward(inputs)
    monkeypatch.setattr(step_attention, "packed_attention_for", lambda query: attend_packed)
    monkeypatch.setattr(step_attention, "attend_row", None)
    for one, other in zip(forward(inputs), by_length, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
