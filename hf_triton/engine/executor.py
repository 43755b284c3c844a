# SPDX-License-Identifier: Apache-2.0
"""Runs one scheduled step on the device: a prefill chunk or a decoding step, and sampling. Schedules nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hf_triton.engine.kv_memory import KVMemory
from hf_triton.engine.plan import PrefillBatch, ScheduledStep, StepOutput
from hf_triton.engine.prefill import Prefill
from hf_triton.engine.sequence import Sequence, adapters_of
from hf_triton.runner.decode import Decoder
from hf_triton.runner.forward import Forward
from hf_triton.runner.transfer import to_device
from hf_triton.sampling.sampler import SampledToken, SampledTokens, sample_tokens


@dataclass(frozen=True)
class InflightStep:
    """A decoding step whose tokens are still on the device."""

    sequences: tuple[Sequence, ...]
    sampled: SampledTokens

    def newest(self, sequences: tuple[Sequence, ...]) -> torch.Tensor:
        """The tokens of some of its sequences, `[sequences]` int64 on the device."""
        tokens = self.sampled.tokens
        if sequences == self.sequences:
            return tokens
        rows = {sequence: row for row, sequence in enumerate(self.sequences)}
        return tokens[to_device([rows[sequence] for sequence in sequences], torch.int64, tokens.device)]

    def read(self) -> dict[Sequence, SampledToken]:
        """The tokens of all its sequences, once they are on the host."""
        return dict(zip(self.sequences, self.sampled.read(), strict=True))


class Executor:
    """Runs steps of one model.

    Args:
        forward: The model's.
        decoder: Runs decoding steps.
        memory: The slots.
    """

    def __init__(self, forward: Forward, decoder: Decoder, memory: KVMemory) -> None:
        self._forward = forward
        self._decoder = decoder
        self._memory = memory

    def run(self, step: ScheduledStep) -> StepOutput:
        """Run a step; a failure leaves the sequences as they were, and the memory corrupt if it must be."""
        if step.wait_s:
            time.sleep(step.wait_s)
        if step.prefill:
            return self._prefill(step.prefill, step.chunk_end)
        pending: InflightStep | None = step.inflight
        launched = self._launch(step.decode, pending) if step.decode else None
        if pending is None and not step.runs_ahead:
            pending, launched = launched, None
        if pending is None:
            return StepOutput(inflight=launched)
        with self._memory.all_or_nothing():
            return StepOutput(pending.read(), launched)

    def _prefill(self, batch: PrefillBatch, end: int) -> StepOutput:
        """Compute a chunk; with the last, sample the first token of every sequence."""
        if batch.state is None:
            batch.state = Prefill(batch, self._forward)
        logits = batch.state.advance(batch.num_computed, end)
        batch.num_computed = end
        if logits is None:
            return StepOutput(prefill=batch)
        rows = {
            sequence: row
            for row, request in enumerate(batch.requests)
            for sequence in request.sequences
            if not sequence.is_done
        }
        index = to_device(list(rows.values()), torch.int64, logits.device)
        tokens = sample_tokens(logits[index], [sequence.sampler for sequence in rows])
        return StepOutput(dict(zip(rows, tokens, strict=True)), prefill=batch)

    def _launch(self, sequences: tuple[Sequence, ...], pending: InflightStep | None) -> InflightStep:
        """Have the device compute the next token of every running sequence."""
        if pending:
            newest = pending.newest(sequences)
        else:
            token_ids = [sequence.token_ids[-1] for sequence in sequences]
            newest = to_device(token_ids, torch.int64, self._forward.device)
        logits = self._memory.lanes.step(self._decoder, newest, adapters_of(sequences))
        with self._memory.all_or_nothing():  # the slots are one token ahead of the sequences
            samplers = [sequence.sampler for sequence in sequences]
            sampled = SampledTokens(logits, samplers, num_ahead=int(pending is not None))
        return InflightStep(sequences, sampled)
