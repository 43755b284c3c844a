# SPDX-License-Identifier: Apache-2.0
"""Probe a model at load: which sequences may share a batch is measured, not looked up by architecture."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from hf_triton.runner.faults import described
from hf_triton.runner.numerics import agree
from hf_triton.runner.padding import pad

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Sharing = Literal["padded", "equal_length", "alone"]
PrefillMode = Literal["in_pieces", "whole"]
"""How a prompt may be prefilled: in chunks of any length, or in one forward."""

PLAIN: Final[dict[str, Any]] = {
    "do_sample": False,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": None,
    "min_new_tokens": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "prompt_lookup_num_tokens": None,
    "return_dict_in_generate": False,
}
"""Arguments of `generate` that switch off what the engine does itself, and what it does not support. Greedy `generate`
ignores all other sampling settings of the checkpoint."""
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
NUM_STEPS = 3


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
    short, equal, long = (_prompt(model, *shape) for shape in PROMPTS)
    alone = _logits(model, [short])
    try:
        if same_logits(model, alone, _logits(model, [short, long])):
            return "padded"
        return "equal_length" if same_logits(model, alone, _logits(model, [short, equal])) else "alone"
    except Exception as error:  # an unusual architecture: what cannot be probed is not relied on
        logger.warning("the probe of batching failed (%s): every prompt runs alone", error)
        return "alone"


def probe_continuous_batching(model: Any) -> PrefillMode | None:
    """How to prefill a prompt so that in a running batch it has the logits that it has alone in `generate`.

    None if the logits differ either way.
    """
    try:
        alone = sample_logits(model)
        if not same_logits(model, alone, _continuous_logits(model)):
            return None
        if same_logits(model, alone[:1], _logits_in_chunks(model)):
            return "in_pieces"
        return "whole" if same_logits(model, alone[-1:], _logits_read_again(model, alone)) else None
    except Exception as error:  # no cache, or one of another kind
        logger.info("the probe of continuous batching failed (%s)", described(error))
        return None


def _continuous_logits(model: Any) -> torch.Tensor:
    """The logits of a short prompt's first tokens beside a longer one, `[NUM_STEPS, 1, vocabulary]` float32 on the CPU.

    As in the continuous engine: the prompt is prefilled apart, joins the running row, and both decode together.
    """
    import torch

    from hf_triton.runner.decode import Decoder
    from hf_triton.runner.forward import Forward
    from hf_triton.runner.kv_cache import KVCache

    short, _, long = (_prompt(model, *shape) for shape in PROMPTS)
    forward = Forward(model)
    decoder, rows = Decoder(forward, "eager"), KVCache(forward.device)

    def join(prompt: list[int]) -> torch.Tensor:
        prefilled, logits = forward.prefill(prompt)
        rows.add(prefilled, 0, len(prompt))
        return logits

    with torch.inference_mode():
        logits = decoder.step(rows, join(long).argmax(-1))
        steps = [join(short)]
        logits = torch.cat([logits, steps[0]])
        for _ in range(NUM_STEPS - 1):
            logits = decoder.step(rows, logits.argmax(-1))
            steps.append(logits[1:])
    return torch.stack(steps).float().cpu()


def _logits_in_chunks(model: Any) -> torch.Tensor:
    """The first logits of a short prompt prefilled beside a longer one, `[1, 2, vocabulary]` float32 on the CPU.

    In chunks, as in the continuous engine: the first holds only padding of the short prompt, the second a
    part of it. A model whose state does not continue from a chunk (Mamba 1) fails here.
    """
    short, _, long = (_prompt(model, *shape) for shape in PROMPTS)
    num_padding = len(long) - len(short)
    return _logits_read(model, [short, long], (0, num_padding // 2, num_padding + 1, len(long)))


def _logits_read_again(model: Any, alone: torch.Tensor) -> torch.Tensor:
    """The last logits of a preempted sequence: prefilled with its output, beside a longer one.

    `[1, 2, vocabulary]` float32 on the CPU. A model in which tokens attend to later ones (Gemma 3 with bidirectional
    attention) fails here.

    Args:
        model: On its device.
        alone: Of its prompt, `[steps, rows, vocabulary]`.
    """
    short, _, long = (_prompt(model, *shape) for shape in PROMPTS)
    written = alone[:-1, 0].argmax(-1).tolist()
    return _logits_read(model, [short + written, long], (0, len(long)))


def _logits_read(model: Any, contexts: list[list[int]], ends: tuple[int, ...]) -> torch.Tensor:
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


def sample_logits(model: Any, length: int = PROMPTS[0][0]) -> torch.Tensor:
    """The logits of a prompt's first tokens in `generate`, `[NUM_STEPS, 1, vocabulary]` float32 on the CPU.

    Args:
        model: On its device.
        length: Of the prompt, in tokens.
    """
    return _logits(model, [_prompt(model, length, PROMPTS[0][1])])


def same_logits(model: Any, alone: torch.Tensor, beside: torch.Tensor) -> bool:
    """Whether row 0 is the same in both, `[steps, rows, vocabulary]`, up to the rounding of the model's dtype.

    If rounding breaks a tie of the two most likely tokens differently, the sequences diverge, and later steps are not
    compared.
    """
    steps = min(len(alone), len(beside))
    parted = (alone[:steps, 0].argmax(-1) != beside[:steps, 0].argmax(-1)).tolist()
    steps = parted.index(True) + 1 if True in parted else steps
    return agree(alone[:steps, 0], beside[:steps, 0], model.dtype)


def _prompt(model: Any, length: int, seed: int) -> list[int]:
    size = model.get_input_embeddings().weight.shape[0]
    return [(seed * 7919 + index * 104729) % size for index in range(length)]


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
            pad_token_id=0,
            **PLAIN | {"min_length": 0, "output_logits": True, "return_dict_in_generate": True},
        )
    return torch.stack(output.logits).float().cpu()
