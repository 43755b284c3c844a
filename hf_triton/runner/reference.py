# SPDX-License-Identifier: Apache-2.0
"""Reference logits: what transformers' own `generate` computes for short prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import CheckpointError
from hf_triton.runner.numerics import agree
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
NUM_STEPS = 3


def make_prompt(model: Any, length: int, seed: int) -> list[int]:
    """Token ids of a prompt, a function of length and seed."""
    size = model.get_input_embeddings().weight.shape[0]
    return [(seed * 7919 + index * 104729) % size for index in range(length)]


def greedy_logits(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """The logits of the prompts' first tokens in one batch, `[NUM_STEPS, rows, vocabulary]` float32 on the CPU."""
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


def same_logits(model: Any, expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether row 0 is the same in both, `[steps, rows, vocabulary]`, up to the rounding of the model's dtype.

    If rounding breaks a tie of the two most likely tokens differently, the sequences diverge, and later steps are not
    compared.
    """
    steps = min(len(expected), len(actual))
    differ = (expected[:steps, 0].argmax(-1) != actual[:steps, 0].argmax(-1)).tolist()
    steps = differ.index(True) + 1 if True in differ else steps
    return agree(expected[:steps, 0], actual[:steps, 0], model.dtype)
