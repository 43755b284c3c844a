# SPDX-License-Identifier: Apache-2.0
"""What the kernel of CUDA devices for sequences of any length would be given: computed here by its definition."""

from typing import Any

import pytest
import torch

from hf_triton.encoder import attention
from hf_triton.encoder.forward import EncoderForward
from tests.support.encoders import build_model, random_inputs


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.attention.varlen.varlen_attn`: `[tokens, heads, head_dim]`, sequences between cumulative lengths."""
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    before, after = (len(query) if side < 0 else side for side in window_size)
    outputs = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        positions = torch.arange(end - start)
        distance = positions.unsqueeze(1) - positions
        states = (each[start:end].transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            *states, attn_mask=(distance <= before) & (-distance <= after), scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "mistral"])
def test_the_kernel_s_arguments_say_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(family, "embeddings")
    inputs = random_inputs([5, 60, 3, 60, 12])
    options: dict[str, Any] = {"per_token": True, "reduce": None, "way": "packed"}
    forward = EncoderForward(model, ("last_hidden_state",), **options)
    by_length = forward(inputs)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_has_varlen", lambda query: True)
    for one, other in zip(forward(inputs), by_length, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
