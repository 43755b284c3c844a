# SPDX-License-Identifier: Apache-2.0
"""Try a model out at load: what may share a batch is measured, not looked up by architecture."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from hf_triton.engine.padding import pad

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Sharing = Literal["padded", "equal_length", "alone"]

PROMPTS = ((3, 1), (3, 2), (11, 3))
"""Length and seed of the prompts tried."""
NUM_STEPS = 3
TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
HALF_TOLERANCE = 5e-2  # bfloat16 keeps 8 bits


def probe_sharing(model: Any) -> Sharing:
    """What may share a batch: how a row's logits alone compare with its logits beside another row.

    Compares the first `NUM_STEPS` greedy steps. Recurrent models that ignore the attention mask fail with padding, and
    transformers' RWKV fails beside any other row; they are still served right, in smaller batches.
    """
    short, equal, long = (_prompt(model, *place) for place in PROMPTS)
    try:
        alone = _logits(model, [short])
        if _agree(model, alone, _logits(model, [short, long])):
            return "padded"
        return "equal_length" if _agree(model, alone, _logits(model, [short, equal])) else "alone"
    except Exception as error:  # an odd architecture: what cannot be tried is not relied on
        logger.warning("batching could not be tried out (%s): every prompt runs alone", error)
        return "alone"


def _agree(model: Any, alone: torch.Tensor, beside: torch.Tensor) -> bool:
    """Whether row 0 is the same in both, `[steps, rows, vocabulary]`, up to the rounding of the model's dtype."""
    steps = min(len(alone), len(beside))
    difference = (alone[:steps, 0] - beside[:steps, 0]).abs().max().item()
    tolerance = TOLERANCE.get(str(model.dtype).removeprefix("torch."), HALF_TOLERANCE)
    return bool(difference <= tolerance * alone.abs().max().item())


def _prompt(model: Any, length: int, seed: int) -> list[int]:
    size = model.get_input_embeddings().weight.shape[0]
    return [(seed * 7919 + place * 104729) % size for place in range(length)]


def _logits(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """`[steps, rows, vocabulary]` float32 on the CPU."""
    import torch

    device = model.get_input_embeddings().weight.device
    input_ids, attention_mask = pad(prompts, 0, device, at_left=not model.config.is_encoder_decoder)
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=NUM_STEPS,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.stack(output.logits).float().cpu()
