# SPDX-License-Identifier: Apache-2.0
"""Automatic speech recognition by Whisper: what is asked of the model, and what its tokens say. Knows no engine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import annotated_types
from pydantic import BeforeValidator

from hf_triton.engine.speech_params import SpeechParams, Transcript
from hf_triton.errors import CheckpointError, RequestError, clip
from hf_triton.files import read_json
from hf_triton.hub.pretrained import SPEECH, loading
from hf_triton.protocol.parameters import GREEDY_BELOW
from hf_triton.protocol.task_declaration import AUDIO, DeclaredOptions, TaskDeclaration, TaskOutput, TextInput
from hf_triton.protocol.task_requests import TaskResult
from hf_triton.sentence import param, remedy
from hf_triton.tasks.audio import import_soundfile
from hf_triton.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings

NUM_FIRST: Final = 4
"""Tokens that a completion begins with: its start, language, task, and whether there are timestamps."""
MAX_PROMPT: Final = 10_000
MAX_SIZES: Final = {"feature_size": 1024, "n_fft": 65_536, "chunk_length": 3600, "sampling_rate": 384_000}
"""The largest numbers of a preprocessor_config.json."""
ENGLISH: Final = "en"


def _read_timestamps(value: object) -> object:
    """Transformers' `return_timestamps`, whose true stands for segments."""
    return {True: "segment", False: "none"}.get(value, value) if isinstance(value, bool) else value


def _read_temperature(value: float | None) -> float | None:
    """Greedy if so low that scores divided by it overflow."""
    return value if value is None or value >= GREEDY_BELOW else 0.0


class SpeechOptions(DeclaredOptions):
    """Request parameters of automatic-speech-recognition."""

    language: str | None = None
    """Language of the audio, by its code or its English name: `de`, `german`. By default that of
    generation_config.json; without one the model detects it."""

    task: Literal["transcribe", "translate"] | None = None
    """Whether the text is in the language of the audio, or translated into English. By default that of
    generation_config.json, or `transcribe`."""

    return_timestamps: Annotated[Literal["none", "segment", "word"], BeforeValidator(_read_timestamps)] = "none"
    """Whether `output` has the times of the text's `chunks`, and with `word` those of its `words` too. `true` stands
    for `segment`, `false` for `none`. Audio of more than one window (30 s) is always transcribed with timestamps."""

    prompt: Annotated[str, annotated_types.MaxLen(MAX_PROMPT)] | None = None
    """Text as it may stand before the audio's: names and words to expect, and a style. Of a long one, the end."""

    temperature: Annotated[float, annotated_types.Ge(0), annotated_types.Le(2)] | None = None
    """Divides the logits before sampling; 0, the default, takes the most likely tokens."""

    max_new_tokens: Annotated[int, annotated_types.Ge(1)] | None = None
    """Maximum number of tokens to generate for each window of 30 s. By default as many as the model can."""


class SpeechRecognition(Task):
    """Recognises speech by Whisper. Its methods are called from several threads.

    Raises:
        LoadError: The checkpoint does not fit the task, or a package is missing.
    """

    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="automatic-speech-recognition",
        texts=(
            TextInput(
                AUDIO,
                "the audio: the bytes of WAV, FLAC, OGG, MP3 or AIFF files, or base64 of them, which JSON can hold",
                is_file=True,
            ),
        ),
        outputs={
            "text": TaskOutput("TYPE_STRING", "what is said"),
            "language": TaskOutput("TYPE_STRING", "the code of its language, given or detected", by_default=False),
            "duration": TaskOutput("TYPE_FP32", "seconds of the audio", by_default=False),
            "num_output_tokens": TaskOutput("TYPE_UINT32", "generated tokens, timestamps included", by_default=False),
        },
        options=SpeechOptions,
        document="docs/speech.md",
    )
    auto_class: ClassVar[str] = SPEECH

    @classmethod
    def check_config(cls, config: Any, settings: ModelSettings) -> None:
        """Check that audio can be read."""
        import_soundfile()

    @classmethod
    def check_files(cls, folder: Path, settings: ModelSettings) -> None:
        _load_extractor(folder, settings)

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        self.check_config(checkpoint.model.config, settings)
        self.extractor = _load_extractor(checkpoint.folder, settings)
        self.max_targets = int(checkpoint.model.config.max_target_positions)
        """Tokens that the decoder has positions for: prompt, special tokens and text of a window."""
        self.num_positions = int(checkpoint.model.config.max_source_positions)
        """Positions of a window that the encoder reads."""
        self._tokenizer = checkpoint.tokenizer
        self._tokenizer_lock = threading.Lock()
        own = checkpoint.model.generation_config
        is_multilingual = getattr(own, "is_multilingual", True) and hasattr(own, "task_to_id")
        ids = getattr(own, "lang_to_id", {}) if is_multilingual else {}
        self._languages = {token.strip("<|>"): token_id for token, token_id in ids.items()}
        self._default_task, self._default_language = self._read_defaults(own)
        self._has_timestamps = hasattr(own, "no_timestamps_token_id")
        self._has_alignment = bool(getattr(own, "alignment_heads", None))

    def _read_defaults(self, own: Any) -> tuple[Literal["transcribe", "translate"] | None, int | None]:
        """The task and the token of the language of a generation_config, where fine-tuning leaves them.

        Raises:
            CheckpointError: They are none that the model knows.
        """
        if not self._languages:
            return None, None
        task: Any = getattr(own, "task", None) or "transcribe"
        language: Any = getattr(own, "language", None)
        if task not in ("transcribe", "translate"):
            raise self._unknown("task", task, "transcribe, translate")
        if language is None:
            return task, None
        code = _code_of(language) if isinstance(language, str) else None
        if code not in self._languages:
            raise self._unknown("language", language, ", ".join(sorted(self._languages)))
        return task, int(self._languages[code])

    @staticmethod
    def _unknown(name: str, value: object, known: str) -> CheckpointError:
        return CheckpointError(
            "checkpoint_invalid",
            f"generation_config.json has {name} {clip(value)}, which is none of {known}: correct it",
        )

    @property
    def window_s(self) -> float:
        """Seconds that the model hears at a time."""
        return float(self.extractor.n_samples / self.extractor.sampling_rate)

    def max_seconds(self, settings: ModelSettings) -> float:
        """The longest audio; a model without timestamps does not know where its second window begins."""
        return settings.max_audio_seconds if self._has_timestamps else min(settings.max_audio_seconds, self.window_s)

    def params(self, options: SpeechOptions) -> tuple[SpeechParams, int | None]:
        """What is asked of the model, and the token of the language; None: it is to be detected.

        Raises:
            RequestError: An option does not fit the model.
        """
        if options.task == "translate" and not self._languages:
            raise RequestError(
                "invalid_parameter",
                "this model knows one language, and does not translate"
                + remedy(f": {param('task')} must be transcribe"),
                field="task",
            )
        if options.return_timestamps != "none" and not self._has_timestamps:
            raise RequestError(
                "invalid_parameter",
                f"{param('return_timestamps')} asks for timestamps, and this model knows none: leave it out",
            )
        if options.return_timestamps == "word" and not self._has_alignment:
            raise RequestError(
                "invalid_parameter",
                f"{param('return_timestamps')} asks for the times of words, for which this model's "
                "generation_config.json lacks alignment_heads: leave it out, or say segment",
            )
        prompt_ids = self._prompt_ids(options.prompt)
        room = self.max_targets - len(prompt_ids) - NUM_FIRST
        if options.max_new_tokens is not None and options.max_new_tokens > room:
            raise RequestError(
                "invalid_parameter",
                f"{param('max_new_tokens')} must be <= {room}, as many as fit behind the prompt, got "
                f"{options.max_new_tokens}",
            )
        params = SpeechParams(
            (options.task or self._default_task) if self._languages else None,
            options.return_timestamps,
            prompt_ids,
            _read_temperature(options.temperature),
            options.max_new_tokens,
        )
        return params, self._language_id(options.language)

    def _language_id(self, language: str | None) -> int | None:
        if not language:
            return self._default_language
        code = _code_of(language)
        if not self._languages and code == ENGLISH:
            return None
        if code not in self._languages:
            known = ", ".join(sorted(self._languages)) or f"{ENGLISH}, the one that this model knows"
            raise RequestError("invalid_parameter", f"{param('language')} must be one of {known}; got {clip(language)}")
        return int(self._languages[code])

    def _prompt_ids(self, prompt: str | None) -> tuple[int, ...]:
        """The prompt's special token, and the last of its own: half of what the decoder reads, as OpenAI's code does.

        Raises:
            RequestError: It names a special token.
        """
        if not prompt or not prompt.strip():
            return ()
        try:
            with self._tokenizer_lock:
                first, *others = self._tokenizer.get_prompt_ids(prompt).tolist()
        except ValueError:
            raise RequestError(
                "invalid_parameter", f"{param('prompt')} holds a special token, <|...|>: leave it out"
            ) from None
        return (first, *others[-(self.max_targets // 2 - 1) :])

    def decode(self, transcript: Transcript, duration_s: float, options: SpeechOptions) -> TaskResult:
        text = self._text(transcript.token_ids)
        code = next((code for code, token_id in self._languages.items() if token_id == transcript.language_id), ENGLISH)
        found: dict[str, Any] = {"text": text, "language": code, "duration": round(duration_s, 3)}
        if options.return_timestamps != "none":
            found["chunks"] = [
                _chunk(self._text(segment.token_ids), segment.start_s, segment.end_s, duration_s)
                for segment in transcript.segments
            ]
        if options.return_timestamps == "word":
            found["words"] = self._words(transcript, duration_s)
        num_tokens = len(transcript.token_ids)
        return TaskResult(json=found, tensors={**found, "num_output_tokens": num_tokens})

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.strip()

    def _words(self, transcript: Transcript, duration_s: float) -> list[dict[str, Any]]:
        """The words with their times, as transformers' pipeline joins them of tokens."""
        import numpy as np

        # The token of the language tells whether words are divided by spaces.
        before = [] if transcript.language_id is None else [transcript.language_id]
        ends = [0.0] * len(before) + [end for segment in transcript.segments for end in segment.token_ends_s or ()]
        output = {"tokens": np.array([before + transcript.token_ids]), "token_timestamps": np.array([ends])}
        _, found = self._tokenizer._decode_asr(
            [output],
            return_timestamps="word",
            return_language=False,
            time_precision=self.window_s / self.num_positions,
        )
        words = [(each["text"].strip(), *each["timestamp"]) for each in found.get("chunks", ())]
        return [_chunk(text, start_s, end_s, duration_s) for text, start_s, end_s in words]


def _code_of(language: str) -> str:
    """The code of a language that is given by its code, its token or its English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = language.lower().strip("<|>")
    code: str = TO_LANGUAGE_CODE.get(name, name)
    return code


def _chunk(text: str, start_s: float, end_s: float, duration_s: float) -> dict[str, Any]:
    """A part of the text with its times, which the model may put behind the audio's end, or before its beginning."""
    times_s = [round(min(max(0.0, float(time_s)), duration_s), 3) for time_s in (start_s, end_s)]
    return {"timestamp": times_s, "text": text}


def _load_extractor(folder: Path, settings: ModelSettings) -> Any:
    """The checkpoint's feature extractor; raises CheckpointError if there is none, or it cannot be read."""
    from transformers import WhisperFeatureExtractor

    with loading("preprocessor_config.json", settings, folder):
        file = folder / "preprocessor_config.json"
        given = read_json(file) if file.exists() else {}
        for name, most in MAX_SIZES.items():  # tables and windows of that size are made
            if isinstance(value := given.get(name, 0), int | float) and not 0 <= value <= most:
                raise ValueError(f"`{name}` is {clip(value)}, more than {most}")
        return WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
