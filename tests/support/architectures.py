# SPDX-License-Identifier: Apache-2.0
"""More architectures than `hf_triton.testing` ships, built from their configs: tiny, with random weights."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_triton.hub.pretrained import auto_class_of
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint

BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
OLD: dict[str, Any] = {
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "eos_token_id": None,
}
HEADS: dict[str, Any] = {"head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
NEO: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 16,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
SSM: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
WINDOWS: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
}
"""The last two layers attend to the keys of the two before them."""
EYE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 32,
}
SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}
LONG_ROPE: dict[str, Any] = {
    "original_max_position_embeddings": 40,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 40,
        "short_factor": [1.0, 1.1, 1.3, 1.5],
        "long_factor": [1.2, 2.0, 4.0, 7.0],
    },
}

CONTINUOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", BASE | HEADS),
    "gemma2-window": ("Gemma2Config", BASE | HEADS | WINDOWS),
    "gemma3": ("Gemma3TextConfig", BASE | HEADS | WINDOWS),
    "gemma3n": (
        "Gemma3nTextConfig",
        BASE
        | HEADS
        | SHARED_KEYS
        | {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma4": ("Gemma4TextConfig", BASE | HEADS | SHARED_KEYS | {"global_head_dim": 16}),
    "qwen2-moe": ("Qwen2MoeConfig", BASE | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3-moe": ("Qwen3MoeConfig", BASE | HEADS | EXPERTS),
    "mixtral": ("MixtralConfig", BASE | LOCAL_EXPERTS),
    "mistral-window": ("MistralConfig", BASE | {"sliding_window": 16}),
    "codegen": ("CodeGenConfig", OLD | {"rotary_dim": 8}),
    "gpt-bigcode": ("GPTBigCodeConfig", OLD),
    "stablelm": ("StableLmConfig", BASE),
    "mistral3-with-images": ("Mistral3Config", {"text_config": BASE | {"model_type": "mistral"}, "vision_config": EYE}),
    "gemma3-with-images": (
        "Gemma3Config",
        {"text_config": BASE | HEADS | WINDOWS, "vision_config": EYE, "image_token_id": 299},
    ),
    "internvl": ("InternVLConfig", {"text_config": BASE | {"model_type": "qwen2"}, "vision_config": EYE}),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", {"text_config": BASE | SECTIONS, "vision_config": EYE}),
    "qwen3-vl": ("Qwen3VLConfig", {"text_config": BASE | HEADS | SECTIONS, "vision_config": EYE}),
    "phi3": ("Phi3Config", BASE),
    "phi3-longrope": ("Phi3Config", BASE | LONG_ROPE),
    "starcoder2": ("Starcoder2Config", BASE | {"sliding_window": 16}),
    "olmo2": ("Olmo2Config", BASE),
    "cohere": ("CohereConfig", BASE),
    "cohere2": ("Cohere2Config", BASE | WINDOWS),
    "gpt-oss": ("GptOssConfig", BASE | HEADS | LOCAL_EXPERTS | {"sliding_window": 5}),
    "mimo-v2": ("MiMoV2FlashConfig", BASE | HEADS | EXPERTS),
    "deepseek-v3": ("DeepseekV3Config", BASE | LATENT),
    "longcat": (
        "LongcatFlashConfig",
        BASE | LATENT | HEADS | {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "num_layers": 2},
    ),
    "jetmoe": ("JetMoeConfig", BASE | LOCAL_EXPERTS | {"kv_channels": 8}),
    "llama4": (
        "Llama4TextConfig",
        BASE
        | HEADS
        | {
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 16,
        },
    ),
    "granite": ("GraniteConfig", BASE),
    "glm": ("GlmConfig", BASE | HEADS),
    "nemotron": ("NemotronConfig", BASE),
    "smollm3": ("SmolLM3Config", BASE),
    "ernie4.5": ("Ernie4_5Config", BASE | HEADS),
}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 1,
            "eos_token_id": None,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        BASE | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16},
    ),
    "qwen3-next": ("Qwen3NextConfig", BASE | HEADS | EXPERTS | LINEAR),
    "qwen3.5": ("Qwen3_5TextConfig", BASE | HEADS | LINEAR),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", BASE | HEADS | LINEAR | EXPERTS),
    "bamba": ("BambaConfig", BASE | SSM | {"attn_layer_indices": [1]}),
    "granite4": (
        "GraniteMoeHybridConfig",
        BASE | SSM | LOCAL_EXPERTS | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        BASE
        | HEADS
        | {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mlp", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "lfm2": ("Lfm2Config", BASE | {"layer_types": ["conv", "full_attention"]}),
    "zamba2": (
        "Zamba2Config",
        BASE
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "hybrid_layer_ids": [1, 3],
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
        },
    ),
    "zamba": (
        "ZambaConfig",
        BASE
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
        },
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        BASE
        | LOCAL_EXPERTS
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 16,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "olmo-hybrid": ("OlmoHybridConfig", BASE | LINEAR),
}
"""State space, linear attention and hybrid models."""
CONTINUOUS |= STATES
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": (
        "JambaConfig",
        BASE
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "falcon-mamba": ("FalconMambaConfig", BASE | {"state_size": 8, "time_step_rank": 4}),
}
"""Models whose scan transformers restarts with every chunk, and `state_scans.py` continues."""
BATCH: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neo": ("GPTNeoConfig", NEO),
    "deepseek-v3.2": (
        "DeepseekV32Config",
        BASE | LATENT | {"hidden_size": 128, "index_topk": 24, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "minimax-m3": (
        "MiniMaxM3VLTextConfig",
        BASE
        | HEADS
        | LOCAL_EXPERTS
        | {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 32,  # longer than the prompts that are tried at load
            "index_topk_blocks": 2,
        },
    ),
    "deepseek-v4": (
        "DeepseekV4Config",
        BASE
        | LATENT
        | LOCAL_EXPERTS
        | {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        },
    ),
    "doge-beyond-its-window": ("DogeConfig", BASE | HEADS | {"keep_window_size": 24, "sliding_window": None}),
    "moshi-beyond-its-window": (
        "MoshiConfig",
        BASE | HEADS | {"sliding_window": 16, "ffn_dim": 64, "audio_vocab_size": 300},
    ),
    "reformer": (
        "ReformerConfig",
        {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "attention_head_size": 8,
            "attn_layers": ["local", "lsh"],
            "axial_pos_shape": [16, 16],
            "axial_pos_embds_dim": [16, 16],
            "local_attn_chunk_length": 16,  # longer than the prompts that are tried at load
            "lsh_attn_chunk_length": 16,
            "feed_forward_size": 64,
            "num_buckets": 4,
            "is_decoder": True,
            "hash_seed": 0,
            "max_position_embeddings": 256,
            "eos_token_id": None,
        },
    ),
}


KINDS = ("llama", "falcon", "gpt-neo", "mistral-window", "gemma3", "deepseek-v3", "qwen3-moe", "qwen3-next", "t5")
"""One of each kind: plain, shared keys, local layers, windows, both, latent attention, experts, states, encoder."""


def some_in_make_test(names: Iterable[str]) -> list[Any]:
    """Parameters of a test for which one architecture of each kind suffices in `make test`."""
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.full) for name in names]


def build(config_name: str, arguments: dict[str, Any]) -> Any:
    """A model with random weights, scaled up so that greedy text varies with the prompt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, config_name)(**arguments)
        model = auto_class_of(config).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    model.generation_config.eos_token_id = None
    return model


def load(name: str, folder: Path) -> Any:
    if name in CONTINUOUS | WHOLE | BATCH:
        return build(*(CONTINUOUS | WHOLE | BATCH)[name])
    build_tiny_checkpoint(folder, name, eos_token_id=None)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def requests(count: int, source: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, some with a shared prefix, which may end as a block of 16 does; most outputs are short,
    because `generate` is slow."""
    items: list[tuple[list[int], SamplingParams]] = []
    for _ in range(count):
        end = source.choice([16, 32, 48, source.randrange(60)])
        start = source.choice(items)[0][:end] if items and source.random() < 0.3 else []
        prompt = [*start, *(source.randrange(3, 300) for _ in range(source.randrange(1, 50)))]
        penalty = source.choice([1.0, 1.0, 1.0, 1.3])
        plan = SamplingParams(source.choice([1, 2, 3, 5, 8, 20]), repetition_penalty=penalty)
        items.append((prompt, plan))
    return items
