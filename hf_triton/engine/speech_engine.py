# SPDX-License-Identifier: Apache-2.0
"""The engine of Whisper: `model.generate` on a batch of short audio, or on one long audio, in a thread of its own.

Audio of one window (30 s) is padded to it, so that the rows of a batch do not see each other. Longer audio runs alone,
by transformers' own long-form generation: window after window, each beginning where the last timestamp ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

import torch
from transformers import StoppingCriteriaList

from hf_triton.engine.ending import Ending
from hf_triton.engine.halves import BatchSize, run_in_halves
from hf_triton.engine.protocols import EngineLoad
from hf_triton.engine.speech_params import Segment, SpeechGroup, Transcript
from hf_triton.engine.worker import Worker

MAX_ROWS: Final = {"cpu": 4}
"""The most short audios of a batch, by torch's device type: the next one waits until they are done."""
DEFAULT_ROWS: Final = 32
"""The most on all other devices."""


class SpeechEngine(Worker[SpeechGroup]):
    """Transcribes groups until it is closed or the device is lost.

    Args:
        model: A `WhisperForConditionalGeneration` in eval mode, on its device.
        max_rows: Short audios of a batch at most; None: the device's default.
    """

    def __init__(
        self,
        model: Any,
        feature_extractor: Any,
        *,
        max_rows: int | None = None,
        on_fatal: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(model.device, on_fatal, model=model)
        self._model: Any = model
        self._extractor = feature_extractor
        self._rows = BatchSize(max_rows or MAX_ROWS.get(model.device.type, DEFAULT_ROWS))
        self._detects = hasattr(model.generation_config, "lang_to_id")
        self._groups: list[SpeechGroup] = []  # of the batch
        self.thread.start()

    def load(self) -> EngineLoad:
        """What the engine holds; from any thread, and not quite at one moment."""
        return EngineLoad(len(self.queue), len(self.unfinished()))

    def unfinished(self) -> list[SpeechGroup]:
        """The groups of the batch that have no outcome yet."""
        return [group for group in self._groups if not group.is_finished]

    @torch.inference_mode()
    def step(self) -> None:
        """Run one batch, from the queue to its outcomes."""
        self.queue.sweep()
        self._groups = self.queue.take_matching(self._may_join)
        run_in_halves(
            self._groups,
            self._run,
            wanted=self._wanted,
            on_alone=lambda group, error: group.finish(error),
            size=self._rows,
        )
        self._groups = self.unfinished()

    def _may_join(self, group: SpeechGroup, batch: list[SpeechGroup]) -> bool:
        return len(batch) < self._rows.now and self._key(group) == self._key(batch[0])

    def _key(self, group: SpeechGroup) -> Hashable:
        """Equal keys may share a batch."""
        return group.params, id(group) if self._is_long(group) else None

    def _is_long(self, group: SpeechGroup) -> bool:
        return len(group.samples) > int(self._extractor.n_samples)

    def _wanted(self, groups: list[SpeechGroup]) -> list[SpeechGroup]:
        return [] if self.rejection() else [group for group in groups if not group.refuse_if_ended()]

    def _run(self, groups: list[SpeechGroup]) -> None:
        """Transcribe, unless all groups end meanwhile."""
        with contextlib.suppress(_EndedError):
            for group, transcript in zip(groups, list(self._transcribe(groups)), strict=True):
                group.finish(transcript)

    def _is_over(self, groups: list[SpeechGroup]) -> bool:
        """Whether nobody waits for the batch any more; cancelled and expired groups are finished first."""
        self.device_context.busy()
        self.queue.sweep()
        has_ended = [group.refuse_if_ended() for group in groups]
        return self.rejection() is not None or all(has_ended)

    def _ended(self, groups: list[SpeechGroup], num_rows: int) -> list[bool]:
        """No row ends here; a batch that nobody waits for does, with all its windows, by an _EndedError."""
        if self._is_over(groups):
            raise _EndedError
        return [False] * num_rows

    def _transcribe(self, groups: list[SpeechGroup]) -> Iterator[Transcript]:
        """The transcript of each group; those of a batch have the same parameters."""
        for group in groups:
            group.listener.on_begin()
        params, is_long = groups[0].params, self._is_long(groups[0])
        inputs = self._extract(groups, is_long)
        features = inputs["input_features"].to(self._model.device, self._model.dtype)
        language_ids = self._language_ids(groups, features)
        arguments: dict[str, Any] = {}
        if params.task is not None:
            names = {token_id: name for name, token_id in self._model.generation_config.lang_to_id.items()}
            arguments |= {"task": params.task, "language": [names[language_id] for language_id in language_ids]}
        if params.prompt_ids:
            arguments["prompt_ids"] = torch.tensor(params.prompt_ids, device=self._model.device)
        if params.max_new_tokens is not None:
            arguments["max_new_tokens"] = params.max_new_tokens
        config = self._model.model.config
        attention = config._attn_implementation
        try:
            output = self._model.generate(
                features,
                attention_mask=inputs["attention_mask"].to(self._model.device),
                return_timestamps=is_long or params.timestamps != "none",
                return_token_timestamps=params.timestamps == "word",
                return_segments=True,
                temperature=params.temperature,
                stopping_criteria=StoppingCriteriaList([Ending(lambda token_ids: self._ended(groups, len(token_ids)))]),
                monitor_progress=_Progress(),
                **arguments,
            )
        finally:
            config._attn_implementation = attention  # `generate` sets another one for the timestamps of tokens
        return map(_transcript, output["segments"], language_ids)

    def _extract(self, groups: list[SpeechGroup], is_long: bool) -> Any:
        """`input_features` and `attention_mask` of one window each, or of one long audio."""
        whole = {"truncation": False, "padding": "longest"} if is_long else {}
        return self._extractor(
            [group.samples for group in groups],
            sampling_rate=self._extractor.sampling_rate,
            return_attention_mask=True,
            return_tensors="pt",
            device=str(self._model.device),
            **whole,
        )

    def _language_ids(self, groups: list[SpeechGroup], features: torch.Tensor) -> list[int | None]:
        """The token of each group's language, detected in its first window if it is not given."""
        language_ids = [group.language_id for group in groups]
        unknown = [row for row, language_id in enumerate(language_ids) if language_id is None and self._detects]
        if unknown:
            frames = self._extractor.nb_max_frames
            detected = self._model.detect_language(features[unknown], num_segment_frames=frames).tolist()
            for row, language_id in zip(unknown, detected, strict=True):
                language_ids[row] = language_id
        return language_ids


def _transcript(segments: list[dict[str, Any]], language_id: int | None) -> Transcript:
    """What `generate` returns for one audio."""
    parts = []
    for segment in segments:
        ends = segment.get("token_timestamps")
        parts.append(
            Segment(
                float(segment["start"]),
                float(segment["end"]),
                segment["tokens"].tolist(),
                None if ends is None else ends.tolist(),
            )
        )
    return Transcript(parts, language_id)


class _Progress:
    """Follows the windows of an audio: one that ends where it began would be generated for ever."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, places: torch.Tensor) -> None:
        """Take where each audio's next window begins, and its end, in frames, `[rows, 2]`.

        Raises:
            RuntimeError: None has moved.
        """
        place = int(places[:, 0].sum())
        if place <= self._last:
            raise RuntimeError("the model's timestamps do not move on")
        self._last = place


class _EndedError(Exception):
    """Nobody waits for a batch any more."""
