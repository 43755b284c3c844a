# SPDX-License-Identifier: Apache-2.0
"""Probe a model at load: which sequences may share a batch of `generate` is measured, not looked up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from hf_triton.runner.model_comparison import Comparison
from hf_triton.runner.reference import NUM_STEPS, check_numbers, logits_after, make_continuation, make_prompt

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Sharing = Literal["padded", "equal_length", "alone"]

NEUTRAL: Final[Mapping[str, object]] = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "top_h": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Numbers without effect, by setting; a token id or a time always has an effect."""
PROMPTS = ((3, 1), (3, 2), (11, 3))
"""Length and seed of the probe's prompts."""


def asks_for(model: Any, name: str) -> bool:
    """Whether a checkpoint's generation_config sets this to a value with an effect."""
    value = getattr(model.generation_config, name, None)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value != NEUTRAL.get(name) if is_number else bool(value)


def probe_batching(model: Any) -> Sharing:
    """Find which sequences may share a batch, by a row's logits alone and beside another row.

    Compares the first `NUM_STEPS` tokens, which are given. Recurrent models that ignore the attention mask fail with
    padding, and transformers' RWKV fails beside any other row; they are served in smaller batches. An exception on a
    prompt alone propagates: such a model cannot be served.
    """
    short, equal, long = (make_prompt(model, *shape) for shape in PROMPTS)
    after = make_continuation(model, NUM_STEPS - 1, seed=5)

    def first_row(*prompts: list[int]) -> torch.Tensor:
        return logits_after(model, list(prompts), [after] * len(prompts))[:, 0]

    comparison = Comparison(model, lambda: first_row(short))
    if bool(comparison.expected.isnan().any()):
        check_numbers(model, comparison.expected, first_row(long))
    try:
        together = comparison.judge(lambda: first_row(short, long))
        if together.is_right:
            return "padded"
        logger.info("sequences do not share a padded batch: their logits differ from those alone by %s", together.text)
        return "equal_length" if comparison.judge(lambda: first_row(short, equal)).is_right else "alone"
    except Exception as error:  # an unusual architecture: what cannot be probed is not relied on
        logger.warning("the probe of batching failed (%s): every prompt runs alone", error)
        return "alone"
