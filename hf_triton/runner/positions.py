# SPDX-License-Identifier: Apache-2.0
"""What a model does with positions: how many it has, and where a long sequence depends on its batch.

The short prompts of the probe cannot show the latter.
"""

from __future__ import annotations

import math
from typing import Any


def shares_positions(model: Any, context_length: int) -> bool:
    """Whether positions of all rows depend on the longest one.

    transformers picks rotary frequencies so (dynamic NTK, LongRoPE) beyond the length that the model was first trained
    on, and attention temperatures that begin at a position: Llama 4's `floor_scale`, Inkling's `log_scaling_n_floor`.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    layers = [layer for layer in parameters.values() if isinstance(layer, dict)] or [parameters]
    if getattr(config, "attn_temperature_tuning", False) and context_length >= getattr(config, "floor_scale", 0):
        return True
    if config.model_type == "inkling_text" and context_length > (config.log_scaling_n_floor or math.inf):
        return True
    for rope in layers:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            length = min(config.max_position_embeddings, rope.get("original_max_position_embeddings") or math.inf)
            if context_length > length:
                return True
    return False


def counts_padding(model: Any, context_length: int) -> bool:
    """Whether padding changes attention (sparse attention: MiniMax M3, DeepSeek V3.2 and V4, Doge).

    The probe's prompts are shorter than a block, or than the number of attended tokens, and padding does nothing then.
    """
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in ("index_block_size", "index_topk", "keep_window_size")]
    sizes += (getattr(config, "compress_rates", None) or {}).values()
    return any(size is not None and context_length > size for size in sizes)


def max_positions(model: Any) -> int | None:
    """The tokens for which the model has position embeddings; None: it computes positions.

    RoBERTa's kind counts from behind the padding token's id, so some of its embeddings are never used.
    """
    from torch import nn

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("position_embeddings", "wpe") and isinstance(module, nn.Embedding):
            padding_id = module.padding_idx
            return module.num_embeddings - (0 if padding_id is None else padding_id + 1)
    return None
