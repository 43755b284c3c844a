# SPDX-License-Identifier: Apache-2.0
"""Runs a step on the device: the forward, and sampling. Schedules nothing; finds samplers by a sequence's id."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from hf_triton.engine.scheduler import StepOutput
from hf_triton.runner.image_inputs import ImageInput
from hf_triton.runner.model_runner import ModelRunner
from hf_triton.runner.step import Step, TokenRange
from hf_triton.runner.step_tensors import InflightTokens
from hf_triton.runner.transfer import ToHost, to_index
from hf_triton.sampling.logprobs import PendingLogprobs
from hf_triton.sampling.proposal import Proposal
from hf_triton.sampling.sampler import SampledTokens
from hf_triton.sampling.sequence_sampler import SequenceSampler


@dataclass(frozen=True)
class InflightStep:
    """A step whose tokens are still on the device."""

    step: Step
    sequence_ids: tuple[int, ...]
    """Sequences that sample, in the order of `sampled`, which has tokens of proposals behind theirs."""
    sampled: SampledTokens | None
    prompt_scores: dict[int, PendingLogprobs]
    are_finite: ToHost | None
    """Whether each of the step's full blocks is."""
    proposals: dict[int, Proposal]
    """By the sequence's id."""

    def read(self) -> StepOutput:
        tokens = self.sampled.read() if self.sampled else []
        next_tokens = dict(zip(self.sequence_ids, tokens, strict=False))
        are_finite = self.are_finite.tolist() if self.are_finite else []
        return StepOutput(
            self.step,
            next_tokens,
            {sequence_id: scores.read() for sequence_id, scores in self.prompt_scores.items()},
            frozenset(itertools.compress(self.step.full_blocks, are_finite)),
            {number: each.further(next_tokens[number], tokens) for number, each in self.proposals.items()},
        )

    def tokens(self) -> InflightTokens | None:
        """The token of each sequence, on the device; None: it samples none."""
        if self.sampled is None:
            return None
        rows = {sequence_id: row for row, sequence_id in enumerate(self.sequence_ids)}
        return InflightTokens(self.sampled.tokens, rows)


class Executor:
    """Runs steps of one model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.samplers = WeakValueDictionary[int, SequenceSampler]()
        """Samplers of the admitted sequences, which own them, by id."""
        self._inflight: InflightStep | None = None

    @torch.inference_mode()
    def run(self, step: Step) -> Iterator[StepOutput]:
        """Run a step; the outputs of the step in flight before it, and its own unless it stays in flight."""
        pending, self._inflight = self._inflight, None
        launched = self._launch(step, pending) if step.ranges else None
        if step.stays_inflight:
            self._inflight = launched
        if pending:
            yield pending.read()
        if launched and not step.stays_inflight:
            yield launched.read()

    @torch.inference_mode()
    def compute_image(self, image: ImageInput) -> float | None:
        """Compute and keep an image's features.

        Returns:
            The seconds that takes, on a GPU with the step in flight; None: an equal image has them.
        """
        started_s, num_runs = time.perf_counter(), self._runner.images.num_runs
        self._runner.see(Step(images=(image,)))
        if self._runner.images.num_runs == num_runs:
            return None
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        return time.perf_counter() - started_s

    def drop_images(self, numbers: tuple[int, ...]) -> None:
        """Drop features that no sequence needs any more."""
        if numbers:
            self._runner.see(Step(dropped_images=numbers))

    def lose_inflight(self) -> None:
        """Forget the step in flight."""
        self._inflight = None

    def _launch(self, step: Step, pending: InflightStep | None) -> InflightStep:
        logits = self._runner.run(step, pending.tokens() if pending else None)
        are_finite = self._are_finite(step.full_blocks) if step.full_blocks else None
        first = 0  # of a range's rows of logits
        rows: list[int] = []
        sequence_ids: list[int] = []
        scores: dict[int, PendingLogprobs] = {}
        proposing: list[tuple[TokenRange, int]] = []
        for token_range in step.ranges:
            if token_range.num_top_logprobs is not None:
                scored = logits[first : first + token_range.num_scored]
                tokens = to_index(self._scored_tokens(token_range), logits.device)
                scores[token_range.sequence_id] = PendingLogprobs(scored, tokens, token_range.num_top_logprobs)
            rows += [first + token_range.num_scored] * len(token_range.samples)
            sequence_ids += token_range.samples
            if token_range.num_drafted:
                proposing.append((token_range, first + 1))
            first += token_range.num_rows
        if not rows:
            return InflightStep(step, (), None, scores, are_finite, {})
        samplers = [self.samplers[sequence_id] for sequence_id in sequence_ids]
        num_ahead = [int(pending is not None and number in pending.sequence_ids) for number in sequence_ids]
        proposals: dict[int, Proposal] = {}
        for token_range, first in proposing:
            sampler, num = self.samplers[token_range.sequence_id], token_range.num_drafted
            own = range(first, first + num)
            # A copy: a graph's next replay writes its logits to the same place.
            kept = logits[to_index(own, logits.device)] if sampler.edits_logits else None
            proposals[token_range.sequence_id] = Proposal(token_range.token_ids[-num:], sampler, len(rows), kept)
            if kept is None:
                rows += own
                samplers += [sampler] * num
                num_ahead += range(1, num + 1)
        if rows != list(range(len(logits))):
            logits = logits[to_index(rows, logits.device)]
        sampled = SampledTokens(logits, samplers, num_ahead)
        return InflightStep(step, tuple(sequence_ids), sampled, scores, are_finite, proposals)

    def _are_finite(self, blocks: tuple[int, ...]) -> ToHost:
        """Look at the last layer with keys, to which NaN and infinity spread; without keys nothing is hidden."""
        layers = list(self._runner.cache.blocks())
        are_finite = layers[-1].are_finite(blocks) if layers else torch.ones(len(blocks), dtype=torch.bool)
        return ToHost(are_finite)

    def _scored_tokens(self, token_range: TokenRange) -> list[int]:
        """The prompt tokens behind the first `num_scored` tokens of a range."""
        prompt_ids = self.samplers[token_range.sequence_id].prompt_ids
        return list(prompt_ids[token_range.start + 1 : token_range.start + 1 + token_range.num_scored])
