# SPDX-License-Identifier: Apache-2.0
"""Probe an encoder at load: how sequences share a forward is measured, not looked up by architecture."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, Final, Literal

import torch

from hf_triton.encoder.jobs import EncoderInput
from hf_triton.runner.faults import described
from hf_triton.runner.model_comparison import Comparison
from hf_triton.runner.positions import max_positions, shares_positions

logger = logging.getLogger(__name__)

Way = Literal["packed", "padded", "alone"]
"""How sequences share a forward: one row without padding, a padded batch of similar lengths, or not at all."""

MEANING: Final = {"packed": "in one row, without padding", "padded": "in batches of similar lengths"}
"""The log's words for ways."""
TOLERANCE: Final = 1e-4
"""Part of the largest output that rounding may change."""
WINDOWS: Final = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size")
"""Configs say here how far attention reaches."""
MAX_WINDOW: Final = 1024
"""The probe's sequences are longer than windows up to this; for larger ones they would take too long on a CPU."""
MAX_CONTEXT: Final = 1 << 30
"""No text is as long: what changes at some length counts as a change."""
SHORT: Final = 7
LONG: Final = 21
"""Tokens of the probe's sequences; the long ones have as many more than the model's window."""


Forward = Callable[[list[EncoderInput]], list[torch.Tensor]]


def probe_way(
    model: Any,
    inputs: list[EncoderInput],
    build: Callable[[Way], Forward],
    build_base: Callable[[Way], Forward],
    slower: list[str],
) -> Way:
    """How sequences share a forward with the outputs that each has alone; logs which way and why.

    `build_base` builds the model without its head, which may hide what the layers get wrong. `slower` gets why
    sequences do not share a row, see `Worker.slower`.
    """
    if shares_positions(model, MAX_CONTEXT):
        slower.append("computes every text alone: its positions would change with the longest one in its company")
        logger.info("the model %s", slower[-1])
        return "alone"
    tries: dict[Way, tuple[Callable[[Way], Forward], ...]] = {"packed": (build_base, build), "padded": (build,)}
    comparisons: dict[Callable[[Way], Forward], Comparison] = {}
    for way, builds in tries.items():
        failures = (_failure(model, each, way, inputs, comparisons) for each in builds)
        failure = next((failure for failure in failures if failure), None)
        if failure is None:
            logger.info("sequences run %s (%s): in a probe each has the outputs that it has alone", way, MEANING[way])
            return way
        slower.append(f"does not compute texts {MEANING[way]}: {failure}")
        logger.info("the model %s", slower[-1])
    logger.warning("every sequence runs alone, which is slow under load: batched outputs would differ")
    return "alone"


def probe_inputs(model: Any, *, per_token: bool) -> list[EncoderInput]:
    """Sequences of four lengths: two longer than the window, two equally long; one has a padding token, one a mask."""
    config = model.config.get_text_config()
    windows = [size for name in WINDOWS if isinstance(size := getattr(config, name, None), int)]
    window = max((size for size in windows if size <= MAX_WINDOW), default=0)
    limit = max_positions(model) or window + LONG + 9
    rng = random.Random(0)
    values = [value for name, value in config.to_dict().items() if name.endswith("token_id")]
    special = {each for value in values for each in _ids(value)}
    vocabulary = model.get_input_embeddings().weight.shape[0]
    plain = [token_id for token_id in range(min(vocabulary, 30000)) if token_id not in special] or [0]
    end = _ids(getattr(config, "eos_token_id", None))[:1]  # BART looks for it
    lengths = (SHORT, window + LONG + 9, SHORT, window + LONG, SHORT + 2)
    sequences = [[*rng.choices(plain, k=min(length, limit) - len(end)), *end] for length in lengths]
    pad_id = getattr(config, "pad_token_id", None)
    if isinstance(pad_id, int) and 0 <= pad_id < vocabulary and pad_id not in end:
        sequences[0][2] = pad_id
    mask_id = getattr(config, "mask_token_id", None)  # ESM scales a sequence by its masks
    if isinstance(mask_id, int) and 0 <= mask_id < vocabulary:
        sequences[1][3] = mask_id
    has_types = (getattr(config, "type_vocab_size", None) or 0) > 1
    return [
        EncoderInput(
            ids,
            type_ids=[0] * 3 + [1] * (len(ids) - 3) if has_types else None,
            output_positions=[1, len(ids) - 1] if per_token and number == 0 else None,
        )
        for number, ids in enumerate(sequences)
    ]


def _ids(value: object) -> list[int]:
    """The token ids of a config's value: none, one or several."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]


def _failure(
    model: Any,
    build: Callable[[Way], Forward],
    way: Way,
    inputs: list[EncoderInput],
    comparisons: dict[Callable[[Way], Forward], Comparison],
) -> str | None:
    """Why sequences cannot go a way; None: they can. Outputs of each alone are kept in `comparisons` for all ways."""

    def compute(way: Way) -> torch.Tensor:
        return torch.cat([output.flatten() for output in build(way)(inputs)])[None].cpu()

    try:
        if build not in comparisons:
            comparisons[build] = Comparison(model, lambda: compute("alone"), limit=TOLERANCE)
        verdict = comparisons[build].judge(lambda: compute(way))
    except Exception as error:  # an unusual architecture: what cannot be probed is not relied on
        return described(error)
    return None if verdict.is_right else f"outputs differ from those of each alone by {verdict.text}"
