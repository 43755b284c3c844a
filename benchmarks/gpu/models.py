# SPDX-License-Identifier: Apache-2.0
"""Models of real shapes with random weights, made on the device from their configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    FalconConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

NO_END: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Completions have the lengths that are asked for."""
MODELS = ("llama-3-8b", "falcon-7b", "qwen3-0.6b", "tiny")


def decoder_config(name: str) -> PretrainedConfig:
    """Of one of `MODELS`, as in its `config.json`."""
    if name == "llama-3-8b":
        return LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            **NO_END,
        )
    if name == "falcon-7b":
        return FalconConfig(
            vocab_size=65024,
            hidden_size=4544,
            num_hidden_layers=32,
            num_attention_heads=71,
            multi_query=True,
            parallel_attn=True,
            new_decoder_architecture=False,
            alibi=False,
            bias=False,
            **NO_END,
        )
    if name == "qwen3-0.6b":
        return Qwen3Config(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
            max_position_embeddings=40960,
            **NO_END,
        )
    return LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **NO_END,
    )


def build_decoder(name: str, device: torch.device) -> Any:
    """A model that generates, in bfloat16."""
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(decoder_config(name), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = None
    return model.eval()


def build_encoder_model(device: torch.device, dtype: torch.dtype, *, is_small: bool) -> Any:
    """An encoder of all-MiniLM-L6-v2's shape or a tiny one, always of the same weights but for rounding."""
    size, num_layers = (48, 2) if is_small else (384, 6)
    config = BertConfig(
        hidden_size=size, intermediate_size=4 * size, num_hidden_layers=num_layers, num_attention_heads=12
    )
    torch.manual_seed(0)
    return AutoModel.from_config(config).to(device, dtype).eval()  # type: ignore[no-untyped-call]


def weight_bytes(model: Any) -> int:
    """Bytes of the parameters that a step reads: all but the input embedding, of which it reads a few rows."""
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    total = sum(each.numel() * each.element_size() for each in model.parameters())
    return int(total if is_tied else total - embedding.numel() * embedding.element_size())
