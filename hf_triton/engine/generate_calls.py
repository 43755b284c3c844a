# SPDX-License-Identifier: Apache-2.0
"""Runs sequence groups through `model.generate`, in the thread of an engine.

`generate` does the forward passes and applies the checkpoint's own generation_config; the continuous engine's sampler
chooses the next token of each row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hf_triton.engine.beam_search import BeamSearch
from hf_triton.engine.ending import Ending
from hf_triton.engine.generation import GenerationWorker
from hf_triton.engine.halves import BatchSize, run_in_halves
from hf_triton.engine.protocols import Observer
from hf_triton.engine.sequence import Sequence, SequenceGroup
from hf_triton.runner.batch_probe import asks_for
from hf_triton.runner.calling import begin_anew
from hf_triton.runner.faults import error_outcome, is_fatal
from hf_triton.runner.images import as_tensors
from hf_triton.runner.padding import pad
from hf_triton.runner.reference import PLAIN
from hf_triton.sampling.logprobs import token_logprobs
from hf_triton.sampling.sampler import sample_tokens

ENCODER_HISTORY: Final = ("encoder_no_repeat_ngram_size", "encoder_repetition_penalty")
HISTORY: Final = (*ENCODER_HISTORY, "bad_words_ids", "sequence_bias", "min_length", "forced_bos_token_id")
"""Settings of a checkpoint's generation_config for which `generate` looks at the tokens before, padding too."""
EOS_SETTINGS: Final = ("bad_words_ids", "min_length", "exponential_decay_length_penalty")
"""Settings for which it looks at the end-of-sequence tokens."""


class GenerateCalls:
    """Calls of `generate` for the groups of an engine.

    Args:
        worker: The engine, which may close, and whose groups may end meanwhile.
        alone: Whether each sequence has a call of its own, as each with images has.
    """

    def __init__(self, worker: GenerationWorker, model: Any, *, alone: bool) -> None:
        self.asks = Asks(model)
        self.rows = BatchSize(worker.options.max_num_seqs)
        self._worker = worker
        self._model = model
        self._alone = alone
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self._pad_id = _pad_id(model)

    @property
    def context_ids(self) -> list[int] | None:
        """What penalties look at before the first new token; None: the prompt, which an encoder-decoder's is not."""
        return [_start_id(self._model)] if self._is_encoder_decoder else None

    @torch.inference_mode()
    def run(self, groups: list[SequenceGroup]) -> None:
        """Generate groups to their outcomes; where the engine is closing, some have none."""
        for group in groups:
            self._score_prompt(group)
        searches = any(group.params.num_beams > 1 for group in groups)  # all of them, by the key
        sequences = [sequence for group in groups for sequence in group.sequences[: 1 if searches else None]]
        is_alone = self._alone or any(group.images for group in groups)  # not even one prompt's sequences together
        most = 1 if is_alone else self.rows.now
        for first in range(0, len(sequences), most):
            run_in_halves(
                sequences[first : first + most],
                self._search if searches else self._generate,
                wanted=self._wanted,
                on_alone=lambda sequence, error: sequence.group.finish(error),
                size=self.rows,
            )

    def _is_over(self, sequences: list[Sequence]) -> bool:
        """Whether all sequences are done or the engine is closing; cancelled and expired groups are finished first."""
        self._worker.device_context.busy()
        self._worker.queue.sweep()
        for group in self._worker.unfinished():
            group.drop_if_ended()
        return self._worker.rejection() is not None or all(sequence.is_done for sequence in sequences)

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
            logits_processor=LogitsProcessorList([_Sampling(sequences, self._pad_id, self._worker.options.observer)]),
            stopping_criteria=StoppingCriteriaList([Ending(lambda _: self._ended(sequences))]),
        )
        if self._worker.rejection() is None:
            for sequence in sequences:
                if not sequence.is_done:  # the checkpoint's `max_time` was up
                    sequence.expire()
                    sequence.group.finish_if_complete()

    def _search(self, sequences: list[Sequence]) -> None:
        """Generate the prompts of these sequences by beam search; one that failed begins anew."""
        longest = max(len(sequence.group.prompt_ids) for sequence in sequences)
        num_columns = 1 if self._is_encoder_decoder else longest
        search = BeamSearch(sequences, num_columns, self._is_over, self._worker.options.observer)
        output = self._call_generate(sequences, **search.arguments())
        if self._worker.rejection() is None:
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
                **self.asks.arguments(first.eos_ids, first.params.first_id) | arguments | self._images(first),
            )

    def _images(self, group: SequenceGroup) -> dict[str, torch.Tensor]:
        """What `generate` is given of a group's images."""
        return as_tensors(self._model, group.images.arguments) if group.images else {}

    def _adapter(self, group: SequenceGroup) -> AbstractContextManager[None]:
        adapters = self._worker.options.adapters
        return adapters.choose([group.adapter]) if adapters else nullcontext()

    def _score_prompt(self, group: SequenceGroup) -> None:
        """Compute the logprobs of the prompt's tokens, if they are asked for."""
        num_top, prompt = group.params.prompt_logprobs, group.prompt_ids
        if num_top is None or self._is_over(group.sequences):
            return
        try:
            begin_anew(self._model, 1, self._device)
            with self._adapter(group):
                input_ids = torch.tensor([prompt], device=self._device)
                logits = self._model(input_ids=input_ids, use_cache=False, **self._images(group)).logits
            group.prompt_logprobs = token_logprobs(logits[0, :-1], prompt[1:], num_top)
        except Exception as error:
            if is_fatal(error):
                raise
            group.finish(error_outcome(error))


class Asks:
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
