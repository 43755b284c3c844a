# SPDX-License-Identifier: Apache-2.0
"""Reference logits: what transformers' own `generate` computes for short prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import CheckpointError
from hf_triton.runner.padding import pad

if TYPE_CHECKING:
    import torch

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
NUM_STEPS: Final = 3
"""Tokens whose logits are compared."""


def make_prompt(model: Any, length: int, seed: int) -> list[int]:
    """Token ids of a prompt, a function of length and seed."""
    size = model.get_input_embeddings().weight.shape[0]
    return [(seed * 7919 + index * 104729) % size for index in range(length)]


def make_continuation(model: Any, length: int, seed: int) -> list[int]:
    """Token ids that do not end a sequence, a function of length and seed."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    ids = make_prompt(model, length + len(ends), seed)
    return [each for each in ids if each not in ends][:length]


def logits_after(
    model: Any, prompts: list[list[int]], continuations: list[list[int]], arguments: Mapping[str, Any] | None = None
) -> torch.Tensor:
    """The logits of `generate` on prompts in one batch, whose next tokens are given in place of the likeliest.

    So ways that round differently are compared on the same tokens. `arguments` are those of prompts with images.

    Returns:
        `[continuation + 1, rows, vocabulary]` float32 on the CPU: after the prompt, and after each given token.
    """
    import torch
    from transformers import LogitsProcessorList

    device = model.get_input_embeddings().weight.device
    input_ids, attention_mask = pad(prompts, 0, device, at_left=not model.config.is_encoder_decoder)
    given = [*torch.tensor(continuations, device=device).T]

    def force(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not given:
            return scores
        tokens = given.pop(0)[:, None].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)

    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=len(given) + 1,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([force]),
            **PLAIN | {"min_length": 0, "output_logits": True, "return_dict_in_generate": True} | dict(arguments or {}),
        )
    return torch.stack(output.logits).float().cpu()


def check_numbers(model: Any, *logits: torch.Tensor) -> None:
    """Refuse a model that computes NaN for each of some prompts: it would answer the same token for ever.

    Raises:
        CheckpointError: It does.
    """
    if all(bool(each.isnan().any()) for each in logits):
        raise CheckpointError(
            "checkpoint_invalid",
            f"the model's logits are NaN for every prompt in {str(model.dtype).removeprefix('torch.')}: look for a "
            "setting of its config that is NaN, 0 or too large, choose another checkpoint, or set dtype to float32",
        )
