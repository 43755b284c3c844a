# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints that see, with random weights, and all files of a processor; images for them."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_triton.testing.checkpoints import _build_tokenizer
from tests.support.sentence_checkpoints import quietly

TEMPLATE = """{%- if tools %}{{ tools | tojson }}
{% endif -%}
{%- for message in messages -%}
<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
"""transformers looks for it once, when `transformers.image_utils` is imported: later it does not help."""


@dataclass(frozen=True)
class Family:
    config: str
    settings: dict[str, Any]
    processor: str
    image_processor: str
    image_settings: dict[str, Any]
    tokens: dict[str, str] = field(default_factory=lambda: {"image_token": "<image>"})
    """Special tokens by the attribute of the tokenizer; `settings` names their ids by `_id` behind that."""
    part: str = "<image>"
    """What the chat template writes for an image."""
    processor_settings: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    """The other parts of the processor, by argument: classes."""
    needs_torchvision: bool = False


TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
EYE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
QWEN_EYE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 4,
    "patch_size": 8,
    "out_hidden_size": 32,
}
QWEN_IMAGE: dict[str, Any] = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
"""16 pixels a side for a token; from 1 to 16 tokens for an image."""
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN: dict[str, Any] = {
    "image_processor": "Qwen2VLImageProcessor",
    "image_settings": QWEN_IMAGE,
    "tokens": QWEN_TOKENS,
    "part": "<|vision_start|><|image_pad|><|vision_end|>",
    "needs_torchvision": True,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
WINDOWS: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Family] = {
    "llava": Family(
        "LlavaConfig",
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": EYE | {"model_type": "clip_vision_model"}},
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        processor_settings={
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "gemma3": Family(
        "Gemma3Config",
        {"text_config": TEXT | WINDOWS | {"query_pre_attn_scalar": 2}, "vision_config": EYE, "mm_tokens_per_image": 4},
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": {"height": 28, "width": 28}},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        {"image_seq_length": 4},
    ),
    "mistral3": Family(
        "Mistral3Config",
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": EYE | {"model_type": "pixtral", "image_size": 56, "head_dim": 8},
            "vision_feature_layer": -1,
        },
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 56}, "patch_size": 7},
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        "[IMG]",
        {"patch_size": 7, "spatial_merge_size": 2},
        needs_torchvision=True,
    ),
    "idefics3": Family(
        "Idefics3Config",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": EYE | {"model_type": "idefics3_vision"},
            "scale_factor": 2,
        },
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        }
        | {f"row_{row}_col_{col}": f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)},
        processor_settings={"image_seq_len": 4},
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig",
        {"text_config": TEXT | SECTIONS, "vision_config": QWEN_EYE | {"window_size": 32, "fullatt_block_indexes": [1]}},
        "Qwen2_5_VLProcessor",
        others={"video_processor": "Qwen2VLVideoProcessor"},
        **QWEN,
    ),
    "qwen3-vl": Family(
        "Qwen3VLConfig",
        {
            "text_config": TEXT | SECTIONS,
            "vision_config": QWEN_EYE | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        },
        "Qwen3VLProcessor",
        others={"video_processor": "Qwen3VLVideoProcessor"},
        **QWEN,
    ),
    "qwen3.5": Family(
        "Qwen3_5Config",
        {"text_config": TEXT | SECTIONS | LINEAR, "vision_config": QWEN_EYE | {"num_position_embeddings": 16}},
        "Qwen3VLProcessor",
        others={"video_processor": "Qwen3VLVideoProcessor"},
        **QWEN,
    ),
    "gemma4": Family(
        "Gemma4Config",
        {
            "text_config": TEXT
            | WINDOWS
            | {
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 400,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": None,
        },
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video_token": "<|video|>",
        },
        "<|image|>",
        {"image_seq_length": 70},
        {"feature_extractor": "Gemma4AudioFeatureExtractor", "video_processor": "Gemma4VideoProcessor"},
        needs_torchvision=True,
    ),
}
ALL = [
    pytest.param(
        name, marks=pytest.mark.skipif(each.needs_torchvision and not HAS_TORCHVISION, reason="needs torchvision")
    )
    for name, each in FAMILIES.items()
]
"""The families, as parameters of a test."""


def build_seeing_checkpoint(folder: Path, name: str, **settings: Any) -> Path:
    """Write a model that sees, with random weights, and everything that `AutoProcessor` reads."""
    import transformers

    family = FAMILIES[name]
    build: Any = transformers.PreTrainedTokenizerFast
    core = _build_tokenizer(adds_bos=False, adds_eos=False, has_pad=True).backend_tokenizer
    tokenizer = build(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<pad>",
        extra_special_tokens=family.tokens,
    )
    processor = _build_processor(family, tokenizer)
    config = _build_config(family, tokenizer, settings)
    with quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        auto_class: Any = transformers.AutoModelForImageTextToText
        model = auto_class.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)  # by default images hardly differ
        model.eval().save_pretrained(folder)
        processor.save_pretrained(folder)
    return folder


def _build_processor(family: Family, tokenizer: Any) -> Any:
    import transformers

    name = family.image_processor + ("" if HAS_TORCHVISION else "Pil")
    parts = {part: getattr(transformers, kind)() for part, kind in family.others.items()}
    return getattr(transformers, family.processor)(
        image_processor=getattr(transformers, name)(**family.image_settings),
        tokenizer=tokenizer,
        chat_template=TEMPLATE.replace("IMAGE", family.part),
        **parts,
        **family.processor_settings,
    )


def _build_config(family: Family, tokenizer: Any, settings: dict[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, family.config)
    text = family.settings["text_config"] | {"vocab_size": len(tokenizer)} | settings
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in family.tokens.items()}
    ids |= {f"{name.removesuffix('_id')}_index": number for name, number in ids.items()}
    known = {name: number for name, number in ids.items() if name in kind().to_dict()}
    return kind(**(family.settings | {"text_config": text, "tie_word_embeddings": False} | known))
