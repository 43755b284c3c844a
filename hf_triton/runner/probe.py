# SPDX-License-Identifier: Apache-2.0
"""Probe a model at load: which sequences may share a batch is measured, not looked up by architecture."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from hf_triton.runner.faults import described
from hf_triton.runner.padding import pad
from hf_triton.runner.reference import NUM_STEPS, greedy_logits, make_prompt, same_logits

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Sharing = Literal["padded", "equal_length", "alone"]
PrefillMode = Literal["chunked", "whole"]
"""How a prompt may be prefilled: in chunks of any length, or in one forward."""

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
    """Which sequences may share a batch, by a row's logits alone and beside another row.

    Compares the first `NUM_STEPS` greedy steps. Recurrent models that ignore the attention mask fail with padding, and
    transformers' RWKV fails beside any other row; they are served in smaller batches. An exception on a prompt alone
    propagates: such a model cannot be served.
    """
    short, equal, long = (make_prompt(model, *shape) for shape in PROMPTS)
    alone = greedy_logits(model, [short])
    try:
        if same_logits(model, alone, greedy_logits(model, [short, long])):
            return "padded"
        return "equal_length" if same_logits(model, alone, greedy_logits(model, [short, equal])) else "alone"
    except Exception as error:  # an unusual architecture: what cannot be probed is not relied on
        logger.warning("the probe of batching failed (%s): every prompt runs alone", error)
        return "alone"


def probe_continuous_batching(model: Any) -> PrefillMode | None:
    """How to prefill a prompt so that in a running batch it has the logits that it has alone in `generate`.

    None if the logits differ either way.
    """
    try:
        short, _, long = (make_prompt(model, *shape) for shape in PROMPTS)
        alone = greedy_logits(model, [short])
        if not same_logits(model, alone, _continuous_logits(model, short, long)):
            return None
        # In chunks: the first holds only padding of the short prompt, the second a part of it. A model whose state does
        # not continue from a chunk (Mamba 1) fails here.
        num_padding = len(long) - len(short)
        ends = 0, num_padding // 2, num_padding + 1, len(long)
        if same_logits(model, alone[:1], _prefill_logits(model, [short, long], ends)):
            return "chunked"
        # A preempted sequence is prefilled with its output. A model in which tokens attend to later ones (Gemma 3 with
        # bidirectional attention) fails here.
        output = alone[:-1, 0].argmax(-1).tolist()
        recomputed = _prefill_logits(model, [short + output, long], (0, len(long)))
        return "whole" if same_logits(model, alone[-1:], recomputed) else None
    except Exception as error:  # no cache, or one of another kind
        logger.info("the probe of continuous batching failed (%s)", described(error))
        return None


def _continuous_logits(model: Any, short: list[int], long: list[int]) -> torch.Tensor:
    """The logits of a short prompt's first tokens beside a longer one, `[NUM_STEPS, 1, vocabulary]` float32 on the CPU.

    As in the continuous engine: the prompt is prefilled alone, gets a slot beside the running one, and both decode.
    """
    import torch

    from hf_triton.runner.decode import Decoder
    from hf_triton.runner.forward import Forward
    from hf_triton.runner.kv_cache import KVCache

    forward = Forward(model)
    decoder, cache = Decoder(forward, "eager"), KVCache(forward.device)

    def add(prompt: list[int]) -> torch.Tensor:
        prefilled, logits = forward.prefill(prompt)
        cache.add(prefilled, 0, len(prompt))
        return logits

    with torch.inference_mode():
        logits = decoder.step(cache, add(long).argmax(-1))
        steps = [add(short)]
        logits = torch.cat([logits, steps[0]])
        for _ in range(NUM_STEPS - 1):
            logits = decoder.step(cache, logits.argmax(-1))
            steps.append(logits[1:])
    return torch.stack(steps).float().cpu()


def _prefill_logits(model: Any, contexts: list[list[int]], ends: tuple[int, ...]) -> torch.Tensor:
    """The logits that follow contexts, `[1, contexts, vocabulary]` float32 on the CPU.

    Args:
        model: On its device.
        contexts: Their tokens.
        ends: The columns where chunks begin and end.
    """
    import torch

    from hf_triton.runner.forward import Forward

    forward = Forward(model)
    cache = forward.new_cache()
    input_ids, attention_mask = pad(contexts, 0, forward.device, at_left=True)
    with torch.inference_mode():
        for start, end in itertools.pairwise(ends):
            logits = forward(input_ids[:, start:end], attention_mask[:, :end], cache)
    return logits[:, -1].unsqueeze(0).float().cpu()
