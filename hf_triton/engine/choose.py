# SPDX-License-Identifier: Apache-2.0
"""Chooses the engine of a model at load by running it; only what short prompts cannot show is looked up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Literal

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import GenerationEngine
from hf_triton.errors import CheckpointError
from hf_triton.runner.batch_probe import Sharing, asks_for, probe_batching
from hf_triton.runner.faults import described, is_memory
from hf_triton.runner.image_probe import find_images
from hf_triton.runner.kept_findings import find_way_again
from hf_triton.runner.long_rope import has_long_rope
from hf_triton.runner.own_code import has_own_code
from hf_triton.runner.positions import counts_padding, shares_positions
from hf_triton.runner.way_probe import Finding, find_way
from hf_triton.start_clock import start_clock

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

IN_TURNS: Final = "where a sequence waits for the batch before it"
"""What the batch engine costs."""
NO_ROOM: Final = (
    "memory ran out while the continuous engine tried the model: set gpu_memory_fraction, or fewer max_cache_tokens or "
    "max_num_seqs, in the folders on this device, or place some elsewhere by instance_group"
)
"""Why a model is not served whose cache was allocated, or was to be."""


def build_engine(model: Any, wanted: EngineName, options: EngineOptions) -> GenerationEngine:
    """Start the engine for a model in eval mode, on its device.

    `auto` takes the continuous engine if its logits are those of the model's own `generate`.

    Raises:
        CheckpointError: The setting requires `continuous`, which cannot run this model correctly, or no engine can; or
            the device has not enough memory.
    """
    options = replace(options, has_own_code=options.has_own_code or has_own_code(model))
    with _memory_errors_named():
        finding = _continuous_way(model, wanted, options)
    start_clock.end("trial")
    way, images = finding.way, finding.images
    if options.image_sample is not None and images.mode != "continuous":
        logger.warning("images: %s, as %s", images.mode, images.obstacle)
    if images.mode == "no":
        options = replace(options, image_sample=None)
    if way is None:
        sharing = _sharing(model, options.context_length)
        logger.info("engine batch: up to %d sequences, sharing a batch: %s", options.max_num_seqs, sharing)
        ignored = {
            "max_cache_tokens": options.max_cache_tokens is not None,
            "gpu_memory_fraction": options.gpu_part.is_set,
            "decoding": options.decoding not in ("auto", "eager"),
            "prompt_lookup": options.prompt_lookup > 0,
        }
        for name in filter(ignored.get, ignored):
            logger.warning("engine batch ignores the setting %s", name)
        batch = BatchEngine(model, options, sharing, images=images.mode, image_obstacle=images.obstacle)
        batch.slower.append(f"runs in the batch engine, {IN_TURNS}: {finding.obstacle}")
        return batch
    details = ", each prompt prefilled whole, no prefix caching" if way.prefills_whole else ""
    logger.info("engine continuous: up to %d sequences at a time%s", options.max_num_seqs, details)
    with _memory_errors_named():
        engine = ContinuousBatchingEngine(model, options, way, images=images.mode, image_obstacle=images.obstacle)
    if way.prefills_whole:
        engine.slower.append(f"computes each prompt whole, so a long one holds the others: {finding.obstacle}")
    if way.gathers:
        engine.slower.append(f"copies each sequence's cache at every step: {finding.obstacle}")
    if images.mode == "generate":
        engine.slower.append(f"runs prompts with images one at a time, while the others wait: {images.obstacle}")
    return engine


@contextmanager
def _memory_errors_named() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_memory(error):
            raise CheckpointError("out_of_memory", NO_ROOM) from error
        raise


def _continuous_way(model: Any, wanted: EngineName, options: EngineOptions) -> Finding:
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
    context_length = options.context_length
    finding = None
    obstacle = _obstacle(model, context_length) if wanted != "batch" else "the setting engine says batch"
    if obstacle is None:
        finding = _find_way(model, options)
        if finding.way is not None:
            return finding
        level, obstacle = logging.WARNING, f"in a continuous batch {finding.obstacle}"  # unexpected, and slower
    else:
        level = logging.INFO
    if wanted == "continuous" or options.ranks is not None:
        what, remedy = "engine continuous", "set engine to auto"
        if options.ranks is not None:
            what, remedy = "the continuous engine, which alone runs ranks,", "leave out tensor_parallel_size"
        raise CheckpointError("unsupported_model", f"{what} cannot run this model ({obstacle}): {remedy}")
    logger.log(level, "engine batch, %s, because %s", IN_TURNS, obstacle)
    images = find_images(model, None, options.image_sample) if finding is None else finding.images
    return Finding(None, obstacle, images)


def _find_way(model: Any, options: EngineOptions) -> Finding:
    if options.ranks is None and options.image_sample is None and not options.has_own_code:
        return find_way_again(model, options.context_length)
    if options.ranks is None:
        return find_way(model, options.context_length, options.image_sample)
    from hf_triton.runner.ranks.leading import find_way_together

    return find_way_together(options.ranks, model, options.context_length)


def _sharing(model: Any, context_length: int) -> Sharing:
    """Which sequences may share a batch of `generate`; raises CheckpointError if even one alone fails."""
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
    size = getattr(model.config, "keep_window_size", None)  # within which it selects tokens by their columns
    if size is not None and context_length > size:
        return "its keep_window_size is shorter than its context, and a continuous batch does not apply it"
    asked = _asked(model, GENERATE_ONLY)
    return f"its generation_config has {', '.join(asked)}" if asked else None


def _asked(model: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if asks_for(model, name)]
