# SPDX-License-Identifier: Apache-2.0
"""The next token of every row in one go, a different setting in each. Knows no model and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from hf_triton.generation import SamplingPlan

GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio; spreads the seeds of one prompt's texts (Knuth, TAOCP 3, 6.4)


class RowSampler:
    """How one row picks its tokens: its settings, what it has seen, and a random stream of its own.

    Args:
        plan: The prompt's settings.
        copy: Which of the prompt's `num_return_sequences` texts this is.
        seen: The prompt's token ids.
    """

    def __init__(self, plan: SamplingPlan, copy: int, seen: Sequence[int]) -> None:
        self.plan = plan
        self.generator = torch.Generator()
        if plan.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed((plan.seed + copy * GOLDEN) % 2**63)
        self.seen = set(seen) if plan.repetition_penalty != 1.0 else set()

    def note(self, token_id: int) -> None:
        """A token was picked for this row."""
        if self.plan.repetition_penalty != 1.0:
            self.seen.add(token_id)


def pick_tokens(logits: torch.Tensor, rows: Sequence[RowSampler]) -> list[int]:
    """Pick a token for every row; the one place where the host waits for the device.

    Args:
        logits: `[rows, vocabulary]`, any float dtype and device.
        rows: One for each row of `logits`.
    """
    scores = _penalise(logits, rows)
    tokens = scores.argmax(-1)
    drawing = [index for index, row in enumerate(rows) if row.plan.do_sample]
    if drawing:
        index = torch.tensor(drawing, device=logits.device)
        tokens[index] = _draw(scores[index].float(), [rows[each] for each in drawing])
    picked: list[int] = tokens.tolist()
    return picked


def _penalise(logits: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    """Divide the scores of seen tokens, multiply negative ones (CTRL, Keskar et al. 2019, section 4.1)."""
    penalised = [(index, row) for index, row in enumerate(rows) if row.plan.repetition_penalty != 1.0]
    if not penalised:
        return logits
    scores = logits.clone()
    for index, row in penalised:
        seen = torch.tensor(sorted(row.seen), device=logits.device)
        penalty, before = row.plan.repetition_penalty, scores[index, seen]
        scores[index, seen] = torch.where(before < 0, before * penalty, before / penalty)
    return scores


def _draw(scores: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    """Draw a token id for each row of `scores`, `[rows, vocabulary]` float32, after temperature, top_k and top_p.

    A row's draw depends on its own scores and its own random stream alone.
    """
    size = scores.shape[1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=scores.device).unsqueeze(1)

    temperatures = column([row.plan.temperature for row in rows])
    ordered, order = (scores / temperatures).sort(dim=-1, descending=True, stable=True)
    last_kept = torch.tensor([min(row.plan.top_k or size, size) - 1 for row in rows], device=scores.device)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last_kept.unsqueeze(1)), -torch.inf)  # ties are kept
    probabilities = ordered.softmax(-1)
    is_kept = probabilities.cumsum(-1) - probabilities < column([row.plan.top_p for row in rows])
    is_kept[:, 0] = True
    # Inverse transform sampling: one uniform number a row.
    cumulative = (probabilities * is_kept).double().cumsum(-1)
    uniform = torch.stack([torch.rand((), generator=row.generator, dtype=torch.float64) for row in rows])
    drawn = torch.searchsorted(cumulative, uniform.to(scores.device).unsqueeze(1) * cumulative[:, -1:], right=True)
    drawn = drawn.minimum(is_kept.sum(-1, keepdim=True) - 1)
    return order.gather(1, drawn).squeeze(1)
