# SPDX-License-Identifier: Apache-2.0
"""Beam search by `model.generate`: how the hypotheses of several prompts are scored and ended, and what they become.

`generate` keeps the beams. Biases, penalties and bans are the sampler's, from each hypothesis's own tokens, so that a
prompt has the hypotheses that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hf_triton.engine.ending import Ending
from hf_triton.engine.protocols import Observer
from hf_triton.engine.sequence import FinishReason, Sequence, SequenceGroup
from hf_triton.sampling.logits_edits import edit_logits
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.sampler import SampledToken


def beam_key(params: SamplingParams) -> Hashable:
    """Equal keys may share a call of `generate`; None: no beam search."""
    if params.num_beams == 1:
        return None
    return params.num_beams, params.length_penalty, params.early_stopping, params.max_new_tokens, params.eos_ids


class BeamSearch:
    """One call of `generate` for prompts of equal `beam_key`.

    Args:
        sequences: The first one of each prompt.
        num_columns: Columns before the first new token.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        num_columns: int,
        is_over: Callable[[list[Sequence]], bool],
        observer: Observer,
    ) -> None:
        self._groups = [sequence.group for sequence in sequences]
        self._processors = LogitsProcessorList([_Edits(sequences, num_columns, observer)])
        self._criteria = StoppingCriteriaList([Ending(partial(_ended, sequences, num_columns, is_over))])

    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate`; what is left out is the checkpoint's own."""
        params, eos_ids = self._groups[0].params, self._groups[0].eos_ids
        own = {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
        return {
            "max_new_tokens": params.max_new_tokens,
            "logits_processor": self._processors,
            "stopping_criteria": self._criteria,
            "num_beams": params.num_beams,
            "num_return_sequences": params.num_beams,  # a prompt takes the first ones
            "eos_token_id": sorted(eos_ids) or None,
            "return_dict_in_generate": True,
            **{name: value for name, value in own.items() if value is not None},
        }

    def deliver(self, output: Any) -> None:
        """Finish the groups with the hypotheses that `generate` returns, the best first."""
        lengths = (output.beam_indices >= 0).sum(1).tolist()
        start = output.sequences.shape[1] - output.beam_indices.shape[1]
        rows = iter(zip(output.sequences[:, start:].tolist(), lengths, strict=True))
        for group in self._groups:
            hypotheses = [
                token_ids[:length] for token_ids, length in (next(rows) for _ in range(group.params.num_beams))
            ]
            for sequence, token_ids in zip(list(group.sequences), hypotheses, strict=False):
                for token_id in token_ids:
                    sequence.append(SampledToken(token_id))
                if not sequence.is_done:
                    sequence.finish(_reason(group, token_ids))


def _ended(
    sequences: list[Sequence], num_columns: int, is_over: Callable[[list[Sequence]], bool], token_ids: torch.Tensor
) -> list[bool]:
    """Hypotheses end by their group's own rule, and all of a prompt that is cancelled or late."""
    are_all_done = is_over(sequences)
    ended: list[bool] = []
    for sequence, candidates in zip(sequences, token_ids.chunk(len(sequences)), strict=True):
        group = sequence.group
        if are_all_done or sequence.is_done or group.is_late():
            ended += [True] * len(candidates)
        elif group.listens_to_tokens:
            ended += [_is_complete(group, new) for new in candidates[:, num_columns:].tolist()]
        else:
            ended += [False] * len(candidates)
    return ended


def _reason(group: SequenceGroup, token_ids: list[int]) -> FinishReason:
    """Why a hypothesis ended that neither has an end-of-sequence token nor all its tokens."""
    return "stop_string" if _is_complete(group, token_ids) else "deadline"


def _is_complete(group: SequenceGroup, token_ids: list[int]) -> bool:
    return group.listens_to_tokens and group.listener.is_complete(group.row, token_ids)


class _Edits(LogitsProcessor):
    """The last of `generate`'s processors: biases, penalties and bans by the tokens of each hypothesis."""

    def __init__(self, sequences: list[Sequence], num_columns: int, observer: Observer) -> None:
        self._samplers = [sequence.sampler for sequence in sequences]
        self._num_columns = num_columns
        self._observer = observer

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Log probabilities after the edits, `[prompts * beams, vocabulary]` float32."""
        self._observer.on_step(len(scores))
        if not any(sampler.edits_logits for sampler in self._samplers):
            return scores
        num_beams = len(scores) // len(self._samplers)
        new = input_ids[:, self._num_columns :].tolist()
        behind = [self._samplers[row // num_beams].after(token_ids) for row, token_ids in enumerate(new)]
        return edit_logits(scores, behind)  # type: ignore[return-value]
