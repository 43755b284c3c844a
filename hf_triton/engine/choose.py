# SPDX-License-Identifier: Apache-2.0
"""Chooses the engine of a model at load by running it; only what short prompts cannot show is looked up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.config import EngineConfig
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.decoding import DecodingMode
from hf_triton.engine.types import GenerationEngine, Observer
from hf_triton.errors import CheckpointError
from hf_triton.runner.batch_probe import Sharing, asks_for, probe_batching
from hf_triton.runner.faults import described, is_memory
from hf_triton.runner.gpu_memory import WHOLE_GPU, GpuPart
from hf_triton.runner.long_rope import has_long_rope
from hf_triton.runner.lora.model_adapters import Adapters
from hf_triton.runner.positions import counts_padding, shares_positions
from hf_triton.runner.way_probe import Finding, find_way

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
"""Options of a generation_config that only `model.generate` implements. The others are sampling parameters, or change
no output (`renormalize_logits`, `prompt_lookup_num_tokens`, ...)."""
UNSUPPORTED_SETTINGS: Final = ("watermarking_config",)
UNSUPPORTED_WARPERS: Final = ("top_h", "epsilon_cutoff", "eta_cutoff")
"""Options that no engine supports: `generate` applies them in its own sampler, which is not used here. Like all that
warp the distribution, the latter have an effect only if the checkpoint samples."""

CONTEXT_LIMITS: Final = {"doge": "keep_window_size"}
"""By model type, the config entry that limits the context under continuous batching. Doge selects among tokens of
equal score by their columns."""
IN_TURNS: Final = "where a sequence waits for the batch before it"
"""What the batch engine costs."""
NO_ROOM: Final = (
    "memory ran out while the continuous engine tried the model: set gpu_memory_fraction, or fewer max_cache_tokens or "
    "max_num_seqs, in the folders on this device, or place some elsewhere by instance_group"
)
"""Why a model is not served whose cache was allocated, or was to be."""


def build_engine(
    model: Any,
    wanted: EngineName,
    *,
    max_num_seqs: int,
    max_cache_tokens: int | None,
    gpu_part: GpuPart = WHOLE_GPU,
    enable_prefix_caching: bool,
    decoding: DecodingMode,
    context_length: int,
    on_fatal: Callable[[], None],
    observer: Observer | None = None,
    config: EngineConfig | None = None,
    adapters: Adapters | None = None,
) -> GenerationEngine:
    """Start the engine for a model.

    Args:
        model: In eval mode, on its device.
        wanted: `auto` takes the continuous engine if its logits are those of the model's own `generate`.
        max_num_seqs: The most sequences that run at a time.
        max_cache_tokens: The continuous engine's KV cache memory; None: a part of the device's.
        gpu_part: What the model may take of a GPU.
        enable_prefix_caching: Whether the continuous engine reuses the KV of earlier prompts.
        decoding: How the continuous engine runs a step.
        context_length: Tokens that a prompt and its continuation may have together.
        on_fatal: Called after the engine has failed for good.
        observer: Observes the engine.
        config: The engine's constants.
        adapters: The model's LoRA adapters.

    Raises:
        CheckpointError: The setting requires `continuous`, which cannot run this model correctly, or no engine can; or
            the device has not enough memory.
    """
    shared: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "on_fatal": on_fatal,
        "observer": observer,
        "config": config,
        "adapters": adapters,
    }
    with _memory_errors_named():
        finding = _continuous_way(model, wanted, context_length)
    way = finding.way
    if way is None:
        sharing = _sharing(model, context_length)
        logger.info("engine batch: up to %d sequences, sharing a batch: %s", max_num_seqs, sharing)
        ignored = {
            "max_cache_tokens": max_cache_tokens is not None,
            "gpu_memory_fraction": gpu_part.is_set,
            "decoding": decoding not in ("auto", "eager"),
        }
        for name in filter(ignored.get, ignored):
            logger.warning("engine batch ignores the setting %s", name)
        batch = BatchEngine(model, context_length=context_length, sharing=sharing, **shared)
        batch.slower.append(f"runs in the batch engine, {IN_TURNS}: {finding.obstacle}")
        return batch
    details = ", each prompt prefilled whole, no prefix caching" if way.prefills_whole else ""
    logger.info("engine continuous: up to %d sequences at a time%s", max_num_seqs, details)
    with _memory_errors_named():
        engine = ContinuousBatchingEngine(
            model,
            way=way,
            max_cache_tokens=max_cache_tokens,
            gpu_part=gpu_part,
            context_length=context_length,
            enable_prefix_caching=enable_prefix_caching,
            decoding=decoding,
            **shared,
        )
    if way.prefills_whole:
        engine.slower.append(f"computes each prompt whole, so a long one holds the others: {finding.obstacle}")
    if way.gathers:
        engine.slower.append(f"copies each sequence's cache at every step: {finding.obstacle}")
    return engine


@contextmanager
def _memory_errors_named() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_memory(error):
            raise CheckpointError("out_of_memory", NO_ROOM) from error
        raise


def _continuous_way(model: Any, wanted: EngineName, context_length: int) -> Finding:
    """The way in which the continuous engine runs this model; without one the batch engine runs it.

    Raises:
        CheckpointError: No engine can run the model as its generation_config asks, or not the one that is wanted.
    """
    warpers = UNSUPPORTED_WARPERS if model.generation_config.do_sample else ()
    unsupported = _asked(model, UNSUPPORTED_SETTINGS + warpers)
    if unsupported:
        raise CheckpointError(
            "unsupported_model",
            f"its generation_config has {', '.join(unsupported)}, which no engine supports: remove it from "
            "generation_config.json",
        )
    obstacle = _obstacle(model, context_length) if wanted != "batch" else "the setting engine says batch"
    if obstacle is None:
        finding = find_way(model, context_length)
        if finding.way is not None:
            return finding
        level, obstacle = logging.WARNING, f"in a continuous batch {finding.obstacle}"  # unexpected, and slower
    else:
        level = logging.INFO
    if wanted == "continuous":
        raise CheckpointError(
            "unsupported_model", f"engine continuous cannot run this model ({obstacle}): set engine to auto"
        )
    logger.log(level, "engine batch, %s, because %s", IN_TURNS, obstacle)
    return Finding(None, obstacle)


def _sharing(model: Any, context_length: int) -> Sharing:
    """Which sequences may share a batch of `generate`.

    Raises:
        CheckpointError: `generate` fails even for one sequence.
    """
    try:
        sharing = probe_batching(model)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            "unsupported_model",
            f"transformers cannot generate with this model ({described(error)}): look at its "
            "generation_config.json, or choose a model that generates from text alone",
        ) from error
    if shares_positions(model, context_length):
        return "alone"
    return "equal_length" if sharing == "padded" and counts_padding(model, context_length) else sharing


def _obstacle(model: Any, context_length: int) -> str | None:
    """Why the continuous engine cannot run this model, whatever its logits are; None: they decide."""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if shares_positions(model, context_length) and not has_long_rope(model):
        return "its positions change with the longest sequence of the batch"
    size = CONTEXT_LIMITS.get(model.config.model_type)
    if size is not None and context_length > getattr(model.config, size):
        return f"its {size} is shorter than its context, and a continuous batch does not apply it"
    asked = _asked(model, GENERATE_ONLY)
    return f"its generation_config has {', '.join(asked)}" if asked else None


def _asked(model: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if asks_for(model, name)]
