# SPDX-License-Identifier: Apache-2.0
"""Encoders on CUDA devices: packed rows have the outputs that the CPU has."""

import copy

import pytest
import torch

from hf_triton.encoder.forward import build_forward
from tests.support.encoders import HEADS, build_model, expected_outputs, random_inputs

pytestmark = pytest.mark.full


@pytest.mark.parametrize("head", ["embeddings", "sequence", "answers"])
@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "modernbert", "qwen3"])
def test_packed_rows_equal_each_alone(family: str, head: str) -> None:
    _, outputs, per_token = HEADS[head]
    model = build_model(family, head)
    inputs = random_inputs([5, 60, 3, 60, 12], with_types=family == "bert")
    expected = [expected_outputs(model, each, outputs, per_token=per_token) for each in inputs]
    forward = build_forward(copy.deepcopy(model).to("cuda"), outputs, per_token=per_token)
    assert forward.way == "packed"
    for one, reference in zip(forward(inputs), expected, strict=True):
        assert one.device.type == "cuda"
        torch.testing.assert_close(one.cpu(), reference, rtol=1e-4, atol=1e-4)
