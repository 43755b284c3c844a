# SPDX-License-Identifier: Apache-2.0
"""What the short prompts of a probe cannot show: models in which a long sequence depends on those beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_triton.runner.long_rope import has_long_rope


def has_positions_of_its_own(model: Any) -> bool:
    """Whether `Forward` gives each row the positions of its own length, although transformers does not (LongRoPE)."""
    return has_long_rope(model)


def shares_positions(model: Any, context_length: int) -> bool:
    """Whether positions of all rows depend on the longest one.

    transformers picks rotary frequencies so (dynamic NTK, LongRoPE) beyond the length that the model was first trained
    on, and attention temperatures that begin at a position: Llama 4's `floor_scale`, Inkling's `log_scaling_n_floor`.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    layers = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    if getattr(config, "attn_temperature_tuning", False) and context_length >= getattr(config, "floor_scale", 0):
        return True
    if config.model_type == "inkling_text" and context_length > (config.log_scaling_n_floor or math.inf):
        return True
    return any(context_length > _first_length(config, each) for each in layers)


def _first_length(config: Any, rope: Mapping[str, Any]) -> float:
    """The most tokens of a text whose rotary frequencies do not depend on its length."""
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return math.inf
    length: float = config.max_position_embeddings
    return min(length, rope.get("original_max_position_embeddings") or length)


def counts_padding(model: Any, context_length: int) -> bool:
    """Whether padding has a say in what a token sees (the sparse attention of MiniMax M3, DeepSeek V3.2 and V4, Doge).

    The prompts tried at load are shorter than a block, or than what is chosen, and then padding does nothing.
    """
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in ("index_block_size", "index_topk", "keep_window_size")]
    sizes += (getattr(config, "compress_rates", None) or {}).values()
    return any(size is not None and context_length > size for size in sizes)
