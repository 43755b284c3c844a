# SPDX-License-Identifier: Apache-2.0
"""Substituted attention gives what torch's own gives."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_triton.runner.cpu import attention, decode_attention
from hf_triton.runner.cpu.attention import FastAttention
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.support.engine import Client, start_engine

ROWS, COLUMNS, SIZE = 3, 9, 8


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernel for small heads too."""
    monkeypatch.setattr(decode_attention, "MIN_WIDTH", 0)


def sixteen_bits(heads: int, key_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(heads)
    query = torch.randn(ROWS, heads, 1, SIZE, generator=source).half()
    key, value = torch.randn(2, ROWS, key_heads, COLUMNS, SIZE, generator=source).half()
    return query, key, value


@torch.inference_mode()
def test_other_threads_have_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    monkeypatch.setattr(attention, "attend", lambda query, *_: seen.append(query.shape))
    module = torch.nn.Module()

    def ask() -> None:
        ALL_ATTENTION_FUNCTIONS["sdpa"](module, *sixteen_bits(6, 6), None)

    context = FastAttention()
    ask()
    with context:
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        assert not seen
        ask()
    assert len(seen) == 1
    ask()
    assert len(seen) == 1


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_result_has_transformers_shape() -> None:
    call = torch.nn.Module(), *sixteen_bits(6, 6), None
    with FastAttention():
        output, weights = attention.attend_fast(*call, scaling=0.3)
    expected, _ = attention.sdpa_attention_forward(*call, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-3)
    assert weights is None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "special",
    [{"softcap": 0.5}, {"position_bias": torch.zeros(1, 6, 1, COLUMNS)}, {"cache": object()}, {"dropout": 0.5}],
    ids=lambda special: next(iter(special)),
)
@torch.inference_mode()
def test_special_attention_is_left_to_transformers(special: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def plain(*_: object, **options: Any) -> None:
        calls.append(options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", plain)
    query, key, value = sixteen_bits(6, 6)
    with FastAttention():
        attention.attend_fast(
            torch.nn.Module(), query, key, value, None, sliding_window=9, softcap=None, position_bias=None, cache=None
        )
        assert not calls
        attention.attend_fast(torch.nn.Module(), query, key, value, None, **special)
    assert len(calls) == 1
    for name in special.keys() - {"dropout"}:
        assert calls[0][name] is special[name]


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
@torch.inference_mode()
def test_compiled_models_have_plain_attention(architecture: str, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    input_ids = torch.tensor([[3]])
    expected = model(input_ids=input_ids).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with FastAttention():
        torch.testing.assert_close(compiled(input_ids=input_ids).logits, expected)


@torch.inference_mode()
def test_batch_engine_has_fast_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "bart")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    monkeypatch.setattr(attention, "attend", lambda query, *_: seen.append(query.dtype))
    engine = start_engine(model, max_num_seqs=2, context_length=64)
    try:
        client = Client(engine)
        client.submit([3, 4, 5], SamplingParams(4))
        client.outcomes()
    finally:
        engine.close()
    assert set(seen) == {torch.bfloat16}


@pytest.mark.usefixtures("always")
def test_kernels_are_compiled_at_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "bart")
    calls: list[torch.dtype] = []
    monkeypatch.setattr(decode_attention, "kernel_for", lambda dtype, *_: calls.append(dtype))
    start_engine(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), max_num_seqs=2, context_length=64).close()
    assert set(calls) == {torch.float32}


def test_attention_replaced_by_other_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object) -> None: ...

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", other)
    FastAttention()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is other
