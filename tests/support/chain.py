# SPDX-License-Identifier: Apache-2.0
"""A model that repeats a known text forever: every token has one successor.

The layers pass their input on, so the model sees nothing but the last token, and its output layer knows each token's
successor by the embedding of the one before.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_triton.testing import build_tiny_checkpoint


def build_chain(folder: Path, text: str, tokenizer: Any = None) -> Path:
    """Write the checkpoint.

    Args:
        text: No token may be in it twice. After a prompt that ends with its last token, the model writes it again and
            again; it never ends by itself.
    """
    build_tiny_checkpoint(folder, "llama", eos_token_id=None)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    assert len(set(ids)) == len(ids), "a token comes twice"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = model.model.embed_tokens.weight
        model.lm_head.weight.zero_()
        for token, successor in zip(ids, [*ids[1:], ids[0]], strict=True):
            model.lm_head.weight[successor] = embeddings[token]
    model.save_pretrained(folder)
    return folder
