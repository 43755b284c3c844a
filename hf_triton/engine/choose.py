# SPDX-License-Identifier: Apache-2.0
"""Which engine runs a model: tried out at load, and logged. Looked up is only what short prompts cannot show."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.config import EngineConfig
from hf_triton.engine.types import Engine, Observer
from hf_triton.errors import CheckpointError
from hf_triton.runner.faults import described
from hf_triton.runner.forward import attention_for_generate
from hf_triton.runner.long_rope import has_long_rope
from hf_triton.runner.positions import counts_padding, shares_positions
from hf_triton.runner.probe import Sharing, asks_for, probe_batching, probe_continuous_batching

if TYPE_CHECKING:
    from hf_triton.runner.decode import DecodingMode

logger = logging.getLogger(__name__)

EngineName = Literal["auto", "continuous", "batch"]

GENERATE_ONLY: Final = (
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "bad_words_ids",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_length",
    "stop_strings",
    "max_time",
    "guidance_scale",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "penalty_alpha",
    "dola_layers",
    "force_words_ids",
    "constraints",
    "token_healing",
)
"""What a checkpoint's generation_config may ask for and only `model.generate` does; the rest is in a sampling plan, or
changes no text (`renormalize_logits`, `prompt_lookup_num_tokens`, ...)."""
NOWHERE: Final = ("top_h", "epsilon_cutoff", "eta_cutoff", "watermarking_config")
"""What it may ask for and no engine does: `generate` does it after its sampler, and we have our own."""

NOT_IN_ROWS: Final = {"doge": "keep_window_size", "moshi": "sliding_window"}
"""By model type, the config entry that bounds the context under continuous batching. Which of Doge's tokens stay
depends on their columns where they score alike; Moshi's window is in transformers' cache, which the rows do not have,
and in no mask."""


def build_engine(
    model: Any,
    wanted: EngineName,
    *,
    max_num_seqs: int,
    max_cache_tokens: int | None,
    enable_prefix_caching: bool,
    decoding: DecodingMode,
    context_length: int,
    on_fatal: Callable[[], None],
    observer: Observer | None = None,
    config: EngineConfig | None = None,
) -> Engine:
    """Start the engine for a model.

    Args:
        model: In eval mode, on its device.
        wanted: `auto` takes the continuous engine where it gives what the model's own `generate` gives.
        max_num_seqs: The most sequences that run at a time.
        max_cache_tokens: The continuous engine's KV cache memory; None: what the device has free.
        enable_prefix_caching: Whether the continuous engine reuses the KV of earlier prompts.
        decoding: How the continuous engine runs a step.
        context_length: Tokens that a prompt and its continuation may have together.
        on_fatal: Called after the engine has failed for good.
        observer: Observes the engine.
        config: The engine's constants.

    Raises:
        CheckpointError: `continuous` was asked for by name and cannot run this model right, or nothing can.
    """
    asked = _asked(model, NOWHERE)
    if asked:
        raise CheckpointError(
            "unsupported_model",
            f"its generation_config has {', '.join(asked)}, which no engine does: take it out of "
            "generation_config.json",
        )
    obstacle = _obstacle(model, context_length) if wanted != "batch" else "the setting engine says batch"
    mode = probe_continuous_batching(model) if obstacle is None else None
    if mode is not None:
        from hf_triton.engine.continuous import ContinuousBatchingEngine
        from hf_triton.runner.decode import decoding_error

        unavailable = decoding_error(decoding, model.get_input_embeddings().weight.device)
        if unavailable:
            raise CheckpointError("device_unavailable", unavailable)
        how = ", each prompt prefilled whole, no prefix caching" if mode == "whole" else ""
        logger.info("engine continuous: up to %d sequences at a time%s", max_num_seqs, how)
        return ContinuousBatchingEngine(
            model,
            max_num_seqs=max_num_seqs,
            max_cache_tokens=max_cache_tokens,
            enable_prefix_caching=enable_prefix_caching,
            prefills_whole=mode == "whole",
            decoding=decoding,
            on_fatal=on_fatal,
            observer=observer,
            config=config,
        )
    has_failed = obstacle is None
    obstacle = obstacle or "its logits in a continuous batch are not those of generate"
    if wanted == "continuous":
        raise CheckpointError(
            "unsupported_model", f"engine continuous cannot run this model ({obstacle}): set engine to auto"
        )
    sharing = _sharing(model, context_length)
    level = logging.WARNING if has_failed else logging.INFO  # unexpected, and slower
    logger.log(
        level, "engine batch, because %s: up to %d sequences, sharing a batch: %s", obstacle, max_num_seqs, sharing
    )
    ignored = {"max_cache_tokens": max_cache_tokens is not None, "decoding": decoding not in ("auto", "eager")}
    for name in (name for name, is_set in ignored.items() if is_set):
        logger.warning("engine batch does nothing with the setting %s", name)
    return BatchEngine(
        model,
        max_num_seqs=max_num_seqs,
        context_length=context_length,
        sharing=sharing,
        on_fatal=on_fatal,
        observer=observer,
        config=config,
    )


def _sharing(model: Any, context_length: int) -> Sharing:
    """What may share a batch of `generate`.

    Raises:
        CheckpointError: It cannot even run alone.
    """
    try:
        with attention_for_generate():  # as the engine has it: a kernel is compiled now
            sharing = probe_batching(model)
    except Exception as error:
        raise CheckpointError(
            "unsupported_model",
            f"transformers cannot generate with this model ({described(error)}): look at its "
            "generation_config.json, or choose a model that goes on from text alone",
        ) from error
    if shares_positions(model, context_length):
        return "alone"
    return "equal_length" if sharing == "padded" and counts_padding(model, context_length) else sharing


def _obstacle(model: Any, context_length: int) -> str | None:
    """Why the continuous engine is not for this model, whatever its logits are; None where these decide."""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if shares_positions(model, context_length) and not has_long_rope(model):
        return "its positions change with the longest row beside it"
    size = NOT_IN_ROWS.get(model.config.model_type)
    if size is not None and context_length > getattr(model.config, size):
        return f"its {size} is shorter than its context, and is not kept in a continuous batch"
    asked = _asked(model, GENERATE_ONLY)
    return f"its generation_config has {', '.join(asked)}" if asked else None


def _asked(model: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if asks_for(model, name)]
