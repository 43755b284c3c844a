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

FALCON = {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "alibi": False, "bias": False}
CONFIGS: dict[str, tuple[type[PretrainedConfig], tuple[int, ...], dict[str, Any]]] = {
    "llama-3-8b": (LlamaConfig, (128256, 4096, 14336, 32, 32, 8), {"max_position_embeddings": 8192}),
    "falcon-7b": (FalconConfig, (65024, 4544, 18176, 32, 71, 1), FALCON),
    "qwen3-0.6b": (Qwen3Config, (151936, 1024, 3072, 28, 16, 8), {"head_dim": 128, "tie_word_embeddings": True}),
    "tiny": (LlamaConfig, (512, 64, 128, 2, 4, 2), {}),
}
"""Their `SIZES`, and what else their `config.json` says."""
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)


def decoder_config(name: str) -> PretrainedConfig:
    """A model of one of `CONFIGS`, without an end token: completions have the lengths that are asked for."""
    config, sizes, others = CONFIGS[name]
    no_end = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return config(**dict(zip(SIZES, sizes, strict=True)), **others, **no_end)


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


def num_layer_weights(model: Any) -> int:
    """How many parameters the layers have, embedding and head apart."""
    ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    return sum(each.numel() for each in model.parameters()) - sum(each.numel() for each in ends)
