# SPDX-License-Identifier: Apache-2.0
"""GGUF files of tiny checkpoints, written as llama.cpp's own converter writes them: its names, keys and permutation."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from hf_triton.testing import build_tiny_checkpoint

SIZES = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},  # transformers reads no other
}
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}[assistant]"
KINDS = {
    str: gguf.GGUFValueType.STRING,
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
}
NORMAL, CONTROL = 1, 3
"""llama.cpp's types of tokens."""


def write_gguf(
    file: Path,
    architecture: str = "llama",
    quant: str = "Q8_0",
    *,
    chat_template: str | None = TEMPLATE,
    family: str | None = None,
    keys: Mapping[str, int | float | str | bool] = MappingProxyType({}),
    more: Mapping[str, npt.NDArray[np.float32]] = MappingProxyType({}),
    special: Mapping[int, str] = MappingProxyType({}),
    tensors_in_part: int = 0,
    **overrides: Any,
) -> Path:
    """Write a tiny model with random weights and its tokenizer; returns the file, or its first part.

    Args:
        file: The destination; the checkpoint that it is made of stands in a folder beside it, `NAME.original`.
        quant: The type of its matrices. `Q4_K` and its like have random weights, and rows of a multiple of 256.
        tensors_in_part: Divides the file into parts of so many tensors.
        keys: Values of its header in place of the right ones.
    """
    original = build_tiny_checkpoint(
        file.parent / f"{file.name}.original", architecture, **{**SIZES[architecture], **overrides}
    )
    config = json.loads((original / "config.json").read_text())
    writer = gguf.GGUFWriter(file, family or architecture, split_max_tensors=tensors_in_part)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    _add_tokenizer(writer, original, chat_template, special)
    for key, value in keys.items():
        writer.kv_data[0][key] = gguf.GGUFValue(value, KINDS[type(value)])
    _add_tensors(writer, original, config, architecture, quant)
    for name, tensor in more.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(file.parent.glob(f"{file.stem}-00001-of-*.gguf"), default=file)


def _add_tokenizer(
    writer: gguf.GGUFWriter, original: Path, chat_template: str | None, special: Mapping[int, str]
) -> None:
    model = json.loads((original / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens = [special.get(index, token) for index, token in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if index < 3 else NORMAL for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _add_tensors(writer: gguf.GGUFWriter, original: Path, config: Any, architecture: str, quant: str) -> None:
    from safetensors.numpy import load_file

    family = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(family, config["num_hidden_layers"])
    for name, tensor in load_file(original / "model.safetensors").items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            is_query = name.endswith("q_proj.weight")
            tensor = _permute(tensor, config["num_attention_heads" if is_query else "num_key_value_heads"])
        kind = gguf.GGMLQuantizationType[quant if tensor.ndim > 1 else "F32"]
        data = random_blocks(tensor.shape, kind) if kind.name.endswith("_K") else gguf.quantize(tensor, kind)
        writer.add_tensor(str(names.get_name(name, (".weight",))), data, raw_dtype=kind)


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Blocks of any bytes but their scale and minimum of 16 bits, which give weights around 0."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    source = np.random.default_rng(shape[0])
    blocks = source.integers(0, 256, (*shape[:-1], shape[-1] // weights, num_bytes), dtype=np.uint8)
    halves, scale = blocks.view(np.float16), 1e-4 if kind.name.endswith("_K") else 1e-2
    halves[..., -1 if kind.name == "Q6_K" else 0] = scale / 10 if kind.name == "Q6_K" else scale
    if kind.name in ("Q4_1", "Q4_K", "Q5_1", "Q5_K"):
        halves[..., 1] = scale * (-1 if kind.name.endswith("_1") else 1) * (15 if kind.name.startswith("Q5") else 7)
    return blocks.reshape(*shape[:-1], -1)


def _permute(tensor: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """The order of rows in which llama.cpp rotates pairs that are neighbours."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
