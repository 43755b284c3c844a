# SPDX-License-Identifier: Apache-2.0
"""Try a model out at load: what may share a batch is measured, not looked up by architecture."""

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
"""How contexts may be read: a piece of any length at a time, which goes on from the last one, or in one forward."""

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
"""Arguments of `generate` that switch off what reaches an engine in a sampling plan, and what no engine does. Greedy
`generate` looks at no other sampling setting of the checkpoint."""
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
"""The numbers that ask for nothing, where there are such; a token id or a time asks for something whatever it is."""
PROMPTS = ((3, 1), (3, 2), (11, 3))
"""Length and seed of the prompts tried."""
NUM_STEPS = 3


def asks_for(model: Any, name: str) -> bool:
    """Whether a checkpoint's generation_config asks for something by this name."""
    value = getattr(model.generation_config, name, None)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value != NEUTRAL.get(name) if is_number else bool(value)


def probe_batching(model: Any) -> Sharing:
    """What may share a batch: how a row's logits alone compare with its logits beside another row.

    Compares the first `NUM_STEPS` greedy steps. Recurrent models that ignore the attention mask fail with padding, and
    transformers' RWKV fails beside any other row; they are still served right, in smaller batches. What a model raises
    on a prompt alone passes: it cannot be served at all.
    """
    short, equal, long = (_prompt(model, *place) for place in PROMPTS)
    alone = _logits(model, [short])
    try:
        if same_logits(model, alone, _logits(model, [short, long])):
            return "padded"
        return "equal_length" if same_logits(model, alone, _logits(model, [short, equal])) else "alone"
    except Exception as error:  # an odd architecture: what cannot be tried is not relied on
        logger.warning("batching could not be tried out (%s): every prompt runs alone", error)
        return "alone"


def probe_continuous_batching(model: Any) -> PrefillMode | None:
    """How a prompt is to be read to have, once it joins a running row, the logits that it has alone in `generate`.

    None where they are others however it is read.
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

    As the continuous engine does it: a prompt is read apart, joins the running row after a step of its own, and both go
    on together.
    """
    import torch

    from hf_triton.runner.decode import Decoder
    from hf_triton.runner.forward import Forward
    from hf_triton.runner.kv_cache import KVCache

    short, _, long = (_prompt(model, *place) for place in PROMPTS)
    forward = Forward(model)
    decoder, rows = Decoder(forward, "eager"), KVCache(forward.device)

    def join(prompt: list[int]) -> torch.Tensor:
        prefilled, logits = forward.prefill(prompt)
        rows.add(prefilled, 0, len(prompt))
        return logits

    with torch.inference_mode():
        logits = decoder.step(rows, join(long).argmax(-1))
        found = [join(short)]
        logits = torch.cat([logits, found[0]])
        for _ in range(NUM_STEPS - 1):
            logits = decoder.step(rows, logits.argmax(-1))
            found.append(logits[1:])
    return torch.stack(found).float().cpu()


def _logits_in_chunks(model: Any) -> torch.Tensor:
    """The first logits of a short prompt that is read beside a longer one, `[1, 2, vocabulary]` float32 on the CPU.

    In chunks, as the continuous engine does: the first holds nothing but padding of the short prompt, the second a
    part of it. A model whose state does not go on from a piece (Mamba's first kind) shows here.
    """
    short, _, long = (_prompt(model, *place) for place in PROMPTS)
    num_padding = len(long) - len(short)
    return _logits_read(model, [short, long], (0, num_padding // 2, num_padding + 1, len(long)))


def _logits_read_again(model: Any, alone: torch.Tensor) -> torch.Tensor:
    """The last logits of a text that is put back: read with what it has written, beside a longer one.

    `[1, 2, vocabulary]` float32 on the CPU. A model in which tokens see those behind them (Gemma 3 with bidirectional
    attention) shows here.

    Args:
        model: On its device.
        alone: Of its prompt, `[steps, rows, vocabulary]`.
    """
    short, _, long = (_prompt(model, *place) for place in PROMPTS)
    written = alone[:-1, 0].argmax(-1).tolist()
    return _logits_read(model, [short + written, long], (0, len(long)))


def _logits_read(model: Any, contexts: list[list[int]], ends: tuple[int, ...]) -> torch.Tensor:
    """The logits that follow contexts, `[1, contexts, vocabulary]` float32 on the CPU.

    Args:
        model: On its device.
        contexts: Their tokens.
        ends: The columns where pieces begin and end.
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

    Where rounding turns a tie of the two likeliest tokens, the texts part, and the steps behind it say nothing.
    """
    steps = min(len(alone), len(beside))
    parted = (alone[:steps, 0].argmax(-1) != beside[:steps, 0].argmax(-1)).tolist()
    steps = parted.index(True) + 1 if True in parted else steps
    return agree(alone[:steps, 0], beside[:steps, 0], model.dtype)


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
            pad_token_id=0,
            **PLAIN | {"min_length": 0, "output_logits": True, "return_dict_in_generate": True},
        )
    return torch.stack(output.logits).float().cpu()
