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
    transformers' RWKV fails beside any other row; they are still served right, in smaller batches. What a model raises
    on a prompt alone passes: it cannot be served at all.
    """
    short, equal, long = (_prompt(model, *place) for place in PROMPTS)
    alone = _logits(model, [short])
    try:
        if _agree(model, alone, _logits(model, [short, long])):
            return "padded"
        return "equal_length" if _agree(model, alone, _logits(model, [short, equal])) else "alone"
    except Exception as error:  # an odd architecture: what cannot be tried is not relied on
        logger.warning("batching could not be tried out (%s): every prompt runs alone", error)
        return "alone"


def probe_rolling(model: Any) -> bool:
    """Whether a prompt that joins a running row has the logits that it has alone in `generate`."""
    try:
        return _agree(model, _logits(model, [_prompt(model, *PROMPTS[0])]), _rolling_logits(model))
    except Exception as error:  # no key/value cache, or one of another kind
        logger.info("rolling rows were tried and failed (%s)", type(error).__name__)
        return False


def _rolling_logits(model: Any) -> torch.Tensor:
    """The logits of a short prompt's first two tokens beside a longer one, `[2, 1, vocabulary]` float32 on the CPU."""
    import torch

    from hf_triton.engine.cache import KeyValueRows
    from hf_triton.engine.rolling import Forward

    short, _, long = (_prompt(model, *place) for place in PROMPTS)
    forward, steps = Forward(model), []
    rows = KeyValueRows(forward.device)
    with torch.inference_mode():
        for prompt in (long, short):
            prefilled, logits = forward.prefill(prompt)
            rows.add(prefilled, 0, len(prompt))
            steps.append(logits)
            rows.make_column()
            newest = [[int(each[0].argmax())] for each in steps]
            stepped = forward(
                torch.tensor(newest, device=forward.device), rows.attention_mask(1), rows.cache, rows.lengths()
            )
            rows.clock += 1
    return torch.stack([steps[1], stepped[1:]]).float().cpu()


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
