# SPDX-License-Identifier: Apache-2.0
"""Prompts of unequal length as one padded batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def pad(
    prompts: list[list[int]], pad_id: int, device: torch.device, *, at_left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as `input_ids` and `attention_mask`, both `[rows, longest]` int64 on `device`.

    Decoder-only models continue at the right end, so their padding is at the left; an encoder with absolute positions
    (BART) needs it at the right.
    """
    import torch

    longest = max(map(len, prompts))
    gaps = [longest - len(prompt) for prompt in prompts]
    if at_left:
        ids = [[pad_id] * gap + prompt for prompt, gap in zip(prompts, gaps, strict=True)]
        mask = [[0] * gap + [1] * len(prompt) for prompt, gap in zip(prompts, gaps, strict=True)]
    else:
        ids = [prompt + [pad_id] * gap for prompt, gap in zip(prompts, gaps, strict=True)]
        mask = [[1] * len(prompt) + [0] * gap for prompt, gap in zip(prompts, gaps, strict=True)]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
