# SPDX-License-Identifier: Apache-2.0
"""The batch engine: `model.generate`, a batch at a time, in a thread of its own.

It runs every architecture that transformers generates with. `generate` does the forward passes and applies the
checkpoint's own generation_config; the continuous engine's sampler chooses the next token of each row, so that
sequences of different settings share a batch, as far as `_batch_key` allows.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hf_triton.engine.beam_search import BeamSearch, beam_key
from hf_triton.engine.ending import Ending
from hf_triton.engine.generation import GenerationWorker
from hf_triton.engine.halves import BatchSize, run_in_halves
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import EngineLoad, Observer
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.errors import HfTritonError, RequestError
from hf_triton.runner.batch_probe import Sharing, asks_for
from hf_triton.runner.calling import begin_anew, has_bare_state
from hf_triton.runner.faults import error_outcome, is_fatal
from hf_triton.runner.padding import pad
from hf_triton.runner.reference import PLAIN
from hf_triton.sampling.logprobs import token_logprobs
from hf_triton.sampling.sampler import sample_tokens
from hf_triton.sentence import param

ENCODER_HISTORY: Final = ("encoder_no_repeat_ngram_size", "encoder_repetition_penalty")
HISTORY: Final = (*ENCODER_HISTORY, "bad_words_ids", "sequence_bias", "min_length", "forced_bos_token_id")
"""Settings of a checkpoint's generation_config for which `generate` looks at the tokens before, padding too."""
EOS_SETTINGS: Final = ("bad_words_ids", "min_length", "exponential_decay_length_penalty")
"""Settings for which it looks at the end-of-sequence tokens."""


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

    def __init__(self, model: Any, options: EngineOptions, sharing: Sharing) -> None:
        device: torch.device = model.get_input_embeddings().weight.device
        super().__init__(model, device, options)
        self._model = model
        self._device = device
        self._rows = BatchSize(options.max_num_seqs)
        self._sharing = sharing
        self._is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self._asks = _Asks(model)
        self._pad_id = _pad_id(model)
        self._groups: list[SequenceGroup] = []  # of the batch
        self.thread.start()

    @torch.inference_mode()
    def step(self) -> None:
        """Run one batch, from the queue to its outcomes."""
        self.queue.sweep()
        self._groups = self.queue.take_matching(self._may_join)
        # Penalties look at what the decoder has seen, which is not the prompt of an encoder-decoder.
        context_ids = [_start_id(self._model)] if self._is_encoder_decoder else None
        for group in self._groups:
            self.start(group, context_ids=context_ids)
        for group in self._groups:
            self._score_prompt(group)
        searches = any(group.params.num_beams > 1 for group in self._groups)  # all of them, by the key
        sequences = [sequence for group in self._groups for sequence in group.sequences[: 1 if searches else None]]
        most = 1 if self._sharing == "alone" else self._rows.now  # not even one prompt's sequences together
        for first in range(0, len(sequences), most):
            run_in_halves(
                sequences[first : first + most],
                self._search if searches else self._generate,
                wanted=self._wanted,
                on_alone=lambda sequence, error: sequence.group.finish(error),
                size=self._rows,
            )

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
        return num_columns <= self.options.context_length and num_rows <= self._rows.now

    def _batch_key(self, group: SequenceGroup) -> Hashable:
        """Equal keys may share a batch."""
        params, asks = group.params, self._asks
        by_length = self._sharing == "equal_length" or asks.looks_back
        return (
            id(group) if self._sharing == "alone" or asks.max_time else None,
            len(group.prompt_ids) if by_length else None,
            params.max_new_tokens if asks.forces_end else None,
            params.eos_ids if asks.knows_ends else None,
            params.first_id,
            group.adapter,
            beam_key(params),
        )

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _is_over(self, sequences: list[Sequence]) -> bool:
        """Whether all sequences are done or the engine is closing; cancelled and expired groups are finished first."""
        self.device_context.busy()
        self.queue.sweep()
        for group in self.unfinished():
            group.drop_if_ended()
        return self.rejection() is not None or all(sequence.is_done for sequence in sequences)

    def _wanted(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences that have no end; none if the engine is closing."""
        return [] if self._is_over(sequences) else [sequence for sequence in sequences if not sequence.is_done]

    def _ended(self, sequences: list[Sequence]) -> list[bool]:
        is_over = self._is_over(sequences)
        return [is_over or sequence.is_done for sequence in sequences]

    def _generate(self, sequences: list[Sequence]) -> None:
        """Generate these sequences to their ends.

        Sequences that have tokens already, from a batch that failed, are given the same tokens again: that way
        `generate` counts and looks back as if nothing had happened, and their listeners and random streams notice
        nothing.
        """
        self._call_generate(
            sequences,
            max_new_tokens=max(sequence.group.params.max_new_tokens for sequence in sequences),
            logits_processor=LogitsProcessorList([_Sampling(sequences, self._pad_id, self.options.observer)]),
            stopping_criteria=StoppingCriteriaList([Ending(lambda _: self._ended(sequences))]),
        )
        if self.rejection() is None:
            for sequence in sequences:
                if not sequence.is_done:  # the checkpoint's `max_time` was up
                    sequence.expire()
                    sequence.group.finish_if_complete()

    def _search(self, sequences: list[Sequence]) -> None:
        """Generate the prompts of these sequences by beam search; one that failed begins anew."""
        longest = max(len(sequence.group.prompt_ids) for sequence in sequences)
        num_columns = 1 if self._is_encoder_decoder else longest
        search = BeamSearch(sequences, num_columns, self._is_over, self.options.observer)
        output = self._call_generate(sequences, **search.arguments())
        if self.rejection() is None:
            search.deliver(output)

    def _call_generate(self, sequences: list[Sequence], **arguments: Any) -> Any:
        first = sequences[0].group
        prompts = [sequence.group.prompt_ids for sequence in sequences]
        input_ids, attention_mask = pad(prompts, self._pad_id, self._device, at_left=not self._is_encoder_decoder)
        begin_anew(self._model, len(sequences) * first.params.num_beams, self._device)
        with self._adapter(first):
            return self._model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                pad_token_id=self._pad_id,
                **self._asks.arguments(first.eos_ids, first.params.first_id) | arguments,
            )

    def _adapter(self, group: SequenceGroup) -> AbstractContextManager[None]:
        adapters = self.options.adapters
        return adapters.choose([group.adapter]) if adapters else nullcontext()

    def _score_prompt(self, group: SequenceGroup) -> None:
        """Compute the logprobs of the prompt's tokens, if they are asked for."""
        num_top, prompt = group.params.prompt_logprobs, group.prompt_ids
        if num_top is None or self._is_over(group.sequences):
            return
        try:
            begin_anew(self._model, 1, self._device)
            with self._adapter(group):
                logits = self._model(input_ids=torch.tensor([prompt], device=self._device), use_cache=False).logits
            group.prompt_logprobs = token_logprobs(logits[0, :-1], prompt[1:], num_top)
        except Exception as error:
            if is_fatal(error):
                raise
            group.finish(error_outcome(error))


class _Asks:
    """What a checkpoint's generation_config asks of `generate` beyond the sampling parameters."""

    def __init__(self, model: Any) -> None:
        config = model.generation_config

        def has(names: tuple[str, ...]) -> bool:
            return any(asks_for(model, name) for name in names)

        self.looks_back = has(ENCODER_HISTORY if model.config.is_encoder_decoder else HISTORY)
        """Sequences of unequal length would depend on each other's padding."""
        self.knows_ends = has(EOS_SETTINGS)
        """It needs the end-of-sequence tokens of its rows; else sampling handles them."""
        self.forces_end = config.forced_eos_token_id is not None
        """It forces an end at the last step of a batch, which must be the last of every row."""
        self.max_time: float | None = config.max_time
        """Seconds that a batch may take."""
        self._has_min_new_tokens = config.min_new_tokens is not None

    def arguments(self, eos_ids: frozenset[int], first_id: int | None) -> dict[str, Any]:
        """Arguments of `generate` for sequences that begin with `first_id`, unless None, and end with `eos_ids`.

        Sequences may have different end-of-sequence tokens unless `knows_ends`.
        """
        first = {} if first_id is None else {"forced_bos_token_id": first_id}
        arguments = PLAIN | first | {"eos_token_id": sorted(eos_ids) if self.knows_ends else None}
        return arguments | {"min_length": 0} if self._has_min_new_tokens else arguments  # as transformers has it


class _Sampling(LogitsProcessor):
    """The last of `generate`'s processors: samples, and leaves of each row only the token that comes next."""

    def __init__(self, sequences: list[Sequence], idle_id: int, observer: Observer) -> None:
        self._sequences = sequences
        self._idle_id = idle_id
        self._observer = observer
        self._num_steps = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """0 for the row's next token, minus infinity for all others, both `[rows, vocabulary]` float32."""
        token_ids = [self._known(sequence) for sequence in self._sequences]
        sampled = [row for row, token_id in enumerate(token_ids) if token_id is None]
        if sampled:
            logits = scores if len(sampled) == len(token_ids) else scores[torch.tensor(sampled, device=scores.device)]
            tokens = sample_tokens(logits, [self._sequences[row].sampler for row in sampled])
            self._observer.on_step(len(sampled))
            for row, token in zip(sampled, tokens, strict=True):
                token_ids[row] = token.token_id
                self._sequences[row].append(token)
        self._num_steps += 1
        chosen = torch.tensor(token_ids, device=scores.device).unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)  # type: ignore[return-value]

    def _known(self, sequence: Sequence) -> int | None:
        """The next token of a sequence that has it already, or needs none; None: it is to be sampled."""
        if sequence.is_done:
            return self._idle_id
        return sequence.token_ids[self._num_steps] if self._num_steps < len(sequence.token_ids) else None


def _pad_id(model: Any) -> int:
    """The id of padding; any of the vocabulary does, as the mask hides it."""
    configured = model.generation_config.pad_token_id
    size = model.get_input_embeddings().weight.shape[0]
    return configured if isinstance(configured, int) and 0 <= configured < size else 0


def _start_id(model: Any) -> int:
    """The token that an encoder-decoder's completion begins with."""
    config = model.generation_config
    start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    return int(start)
