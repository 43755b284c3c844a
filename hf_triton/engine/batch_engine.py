# SPDX-License-Identifier: Apache-2.0
"""The batch engine: `model.generate`, a batch at a time, in a thread of its own.

It runs every architecture that transformers generates with. The sampler chooses the next token of each row
(`generate_calls.py`), so that sequences of different settings share a batch, as far as `_batch_key` allows.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch

from hf_triton.engine.beam_search import beam_key
from hf_triton.engine.generate_calls import GenerateCalls
from hf_triton.engine.generation import GenerationWorker
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import EngineLoad
from hf_triton.engine.sequence import SequenceGroup
from hf_triton.errors import HfTritonError, RequestError
from hf_triton.runner.batch_probe import Sharing
from hf_triton.runner.calling import has_bare_state
from hf_triton.sentence import param


class BatchEngine(GenerationWorker):
    """Padded batches of `model.generate`; a batch runs until its last sequence is done, then comes the next.

    The logprobs of new tokens are of the scores that reach the sampler, after what the checkpoint's own
    generation_config makes `generate` do to them (`suppress_tokens`, `sequence_bias`, ...).

    Args:
        options: The engine's; the sequences of a batch have the same adapter.
        sharing: Which prompts may share a batch with this model: `padded` ones of any length, those of `equal_length`,
            or none, each sequence `alone` (see `probe_batching`).
    """

    name: ClassVar[str] = "batch"

    def __init__(
        self, model: Any, options: EngineOptions, sharing: Sharing, *, images: str = "no", image_obstacle: str = ""
    ) -> None:
        device: torch.device = model.get_input_embeddings().weight.device
        self._is_encoder_decoder = bool(model.config.is_encoder_decoder)
        if self._is_encoder_decoder:
            images, image_obstacle = "no", "it is an encoder-decoder"
        super().__init__(model, device, options, images, image_obstacle)
        self._model = model
        self._sharing = sharing
        self._calls = GenerateCalls(self, model, alone=sharing == "alone")
        self._groups: list[SequenceGroup] = []  # of the batch
        self.thread.start()

    def step(self) -> None:
        """Run one batch, from the queue to its outcomes."""
        self.queue.sweep()
        self._groups = self.queue.take_matching(self._may_join)
        for group in self._groups:
            self.start(group, context_ids=self._calls.context_ids)
        self._calls.run(self._groups)

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread, and not quite at one moment."""
        num_running = sum(not sequence.is_done for group in self._groups for sequence in group.sequences)
        return EngineLoad(len(self.queue), num_running, num_free_slots=max(0, self.options.max_num_seqs - num_running))

    def is_busy(self) -> bool:
        """Whether groups of the batch have no outcome yet."""
        return bool(self.unfinished())

    def unfinished(self) -> list[SequenceGroup]:
        return [group for group in self._groups if not group.is_finished]

    def admission_error(self, group: SequenceGroup) -> HfTritonError | None:
        """The error of a group that can never run here; None: it can."""
        num_beams = group.params.num_beams
        if group.images and (error := self.image_error()):
            return error
        if num_beams > 1 and has_bare_state(self._model):
            return RequestError(
                "invalid_parameter",
                f"{param('num_beams')} {num_beams} cannot be searched by this model, whose states transformers cannot "
                "reorder: leave it out",
            )
        if group.params.prompt_logprobs is None or not self._is_encoder_decoder:
            return None
        return RequestError(
            "invalid_parameter",
            f"{param('prompt_logprobs')} needs a model that continues its prompt, and this one is an encoder-decoder: "
            "leave it out",
        )

    # --- what shares a batch -----------------------------------------------------------------------------------------

    def _may_join(self, group: SequenceGroup, batch: list[SequenceGroup]) -> bool:
        """Whether a group joins a batch: its key is equal, and no sequence leaves the context or the engine's slots."""
        if self._batch_key(group) != self._batch_key(batch[0]):
            return False
        groups = [*batch, group]
        longest = max(len(member.prompt_ids) for member in groups)
        num_steps = max(member.params.max_new_tokens for member in groups)
        num_columns = max(longest, num_steps) if self._is_encoder_decoder else longest + num_steps
        num_rows = sum(member.params.num_rows for member in groups)
        return num_columns <= self.options.context_length and num_rows <= self._calls.rows.now

    def _batch_key(self, group: SequenceGroup) -> Hashable:
        """Equal keys may share a batch."""
        params, asks = group.params, self._calls.asks
        by_length = self._sharing == "equal_length" or asks.looks_back
        return (
            id(group) if self._sharing == "alone" or asks.max_time or group.images else None,
            len(group.prompt_ids) if by_length else None,
            params.max_new_tokens if asks.forces_end else None,
            params.eos_ids if asks.knows_ends else None,
            params.first_id,
            group.adapter,
            beam_key(params),
        )
