# SPDX-License-Identifier: Apache-2.0
"""Which engine runs a model: tried out at load, logged, and never looked up by architecture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Literal

from hf_triton.engine.batch import BatchEngine
from hf_triton.engine.interface import Engine
from hf_triton.engine.probe import probe_rolling, probe_sharing
from hf_triton.errors import CheckpointError

logger = logging.getLogger(__name__)

EngineName = Literal["auto", "rolling", "batch"]

GENERATE_ONLY: Final = (
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_length",
    "min_new_tokens",
    "stop_strings",
    "max_time",
    "guidance_scale",
    "watermarking_config",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "renormalize_logits",
    "prompt_lookup_num_tokens",
)
"""What a checkpoint's generation_config may ask for and only `model.generate` does."""
NEUTRAL: Final[tuple[object, ...]] = (None, False, 0, 0.0, 1.0, [], {})


def build_engine(model: Any, wanted: EngineName, *, max_rows: int, on_fatal: Callable[[], None]) -> Engine:
    """Start the engine for a model.

    Args:
        model: In eval mode, on its device.
        wanted: `auto` takes the rolling engine where it gives what the model's own `generate` gives.
        max_rows: Texts that are written at a time.
        on_fatal: Called after the engine has failed for good.

    Raises:
        CheckpointError: `rolling` was asked for by name and cannot run this model right.
    """
    obstacle = _obstacle(model) if wanted != "batch" else "the setting engine says batch"
    if obstacle is None:
        from hf_triton.engine.rolling import RollingEngine

        logger.info("engine rolling: up to %d rows at a time", max_rows)
        return RollingEngine(model, max_rows=max_rows, on_fatal=on_fatal)
    if wanted == "rolling":
        raise CheckpointError(
            "unsupported_model", f"engine rolling cannot run this model ({obstacle}): set engine to auto"
        )
    sharing = probe_sharing(model)
    logger.info("engine batch, because %s: up to %d rows, sharing a batch: %s", obstacle, max_rows, sharing)
    return BatchEngine(model, max_rows=max_rows, sharing=sharing, on_fatal=on_fatal)


def _obstacle(model: Any) -> str | None:
    """Why the rolling engine is not for this model; None where it is."""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    config = model.generation_config
    asked = [name for name in GENERATE_ONLY if getattr(config, name, None) not in NEUTRAL]
    if asked:
        return f"its generation_config has {', '.join(asked)}"
    return None if probe_rolling(model) else "its logits in rolling rows are not those of generate"
