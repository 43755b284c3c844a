# SPDX-License-Identifier: Apache-2.0
"""A tiny Whisper with windows of 3 s, what serves it without a server, and sounds as files."""

import io
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch

from hf_triton.errors import HfTritonError
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.protocol.tensor_values import Array
from hf_triton.settings import ModelSettings
from hf_triton.tasks.automatic_speech_recognition import SpeechRecognition
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.serving.meter import Meter
from hf_triton.tasks.serving.sender import ResponseSender
from hf_triton.tasks.speech_service import build_speech_service
from tests.support.sentence_checkpoints import quietly

RATE = 16_000
WINDOW_S = 3
LANGUAGES = ("en", "de", "fr", "zh")
MAX_TARGETS = 64
WORDS = ("the old harbour has two boats and one lighthouse", "where does the river go after the bridge?")


def save_whisper(
    folder: Path,
    *,
    languages: tuple[str, ...] = LANGUAGES,
    dtype: str = "float32",
    without: str = "",
    defaults: Mapping[str, object] = MappingProxyType({}),
    **config: Any,
) -> Path:
    """A Whisper with random weights, its tokenizer's special tokens and its generation_config as published ones have.

    Args:
        languages: Those that it knows; none for a model of English alone.
        without: An entry that its generation_config.json lacks.
    """
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    tokenizer = _tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_added_vocab()}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids["<|endoftext|>"])
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_mel_bins": 80,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 50 * WINDOW_S,
        "max_target_positions": MAX_TARGETS,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        **special,
        **config,
    }
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed_positions" not in name:
                parameter.mul_(6)
    own: dict[str, Any] = {
        "max_length": MAX_TARGETS,
        "is_multilingual": bool(languages),
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": [ids["<|startoflm|>"], ids["<|startofprev|>"], ids["<|nospeech|>"]],
        "begin_suppress_tokens": [ids["<|endoftext|>"]],
        "alignment_heads": [[1, 0], [1, 2]],
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
    }
    if languages:
        own["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in languages}
        own["task_to_id"] = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    own.pop(without, None)
    own |= defaults
    model.generation_config = GenerationConfig(**own, **special, decoder_start_token_id=ids["<|startoftranscript|>"])
    folder.mkdir(parents=True, exist_ok=True)
    with quietly():
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        WhisperFeatureExtractor(chunk_length=WINDOW_S).save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """Bytes and some merges, then Whisper's special tokens in its order."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import WhisperTokenizer

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer: Any = WhisperTokenizer(vocab=model["vocab"], merges=merges)
    tokens = ["<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>"]
    tokens += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(50 * WINDOW_S + 1)])
    return tokenizer


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> npt.NDArray[np.float32]:
    """Tones that change every fifth of a second, over noise; `[samples]`."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    pitches = np.repeat(random.uniform(100, 3000, int(seconds * 5) + 1), rate // 5)[: len(times)]
    tones = 0.4 * np.sin(2 * np.pi * pitches * times) + 0.05 * random.standard_normal(len(times))
    return tones.astype(np.float32)


def encode(samples: Array, rate: int = RATE, format: str = "WAV", subtype: str | None = None) -> bytes:
    """A file's bytes; `[samples]` or `[samples, channels]`."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


class Asked(InferenceRequest):
    """A request with audio files, and its answer when it has come."""

    def __init__(self, files: Sequence[bytes], timeout_s: float | None = None, **parameters: object) -> None:
        super().__init__(timeout_s=timeout_s)
        self._files = np.empty(len(files), np.object_)
        self._files[:] = files
        self._parameters = parameters
        self.answers: list[Any] = []
        self._came = threading.Event()

    def inputs(self) -> dict[str, Array]:
        return {"audio": self._files}

    @property
    def parameters(self) -> Mapping[str, object]:
        return self._parameters

    def requested_outputs(self) -> list[str]:
        return list(SpeechRecognition.declaration.all_outputs)[:-1]

    def add(self, outputs: Mapping[str, Array]) -> None:
        raise AssertionError("it has one response")

    def answer(self, outputs: Mapping[str, Array], parameters: Mapping[str, int] | None = None) -> None:
        self.answers.append(outputs)
        self._came.set()

    def refuse(self, error: HfTritonError) -> None:
        self.answers.append(error)
        self._came.set()

    def wait(self) -> Any:
        """The first answer; raises if it is an error."""
        assert self._came.wait(60)
        if isinstance(self.answers[0], HfTritonError):
            raise self.answers[0]
        return self.answers[0]


class Served:
    """A checkpoint's task, as a folder serves it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        chosen = ModelSettings(huggingface_model=str(folder), **settings)
        hub = Hub(folder, chosen, {})
        self.checkpoint = load_checkpoint(hub, chosen, Placement("CPU", 0), SpeechRecognition.auto_class)
        self.service = build_speech_service(
            SpeechRecognition, self.checkpoint, chosen, on_fatal=lambda: None, meter=Meter()
        )
        outputs = list(SpeechRecognition.declaration.all_outputs)
        self._config = ResponseConfig(outputs, is_decoupled=False, streams=False, sender=ResponseSender())

    def start(self, request: Asked) -> Asked:
        self.service.submit(request, self._config)
        return request

    def ask(self, *files: bytes, **parameters: object) -> dict[str, Array]:
        outputs: dict[str, Array] = self.start(Asked(files, **parameters)).wait()
        return outputs

    def json(self, *files: bytes, **parameters: object) -> list[Any]:
        return [json.loads(row) for row in self.ask(*files, **parameters)["output"]]

    def reference(self, samples: Array, **arguments: Any) -> Any:
        """What transformers' own `generate` makes of an audio's features."""
        extractor = self.service._task.extractor
        is_long = len(samples) > extractor.n_samples
        whole = {"truncation": False, "padding": "longest"} if is_long else {}
        inputs = extractor(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **whole)
        if is_long:
            arguments.setdefault("return_timestamps", True)
        with torch.inference_mode():
            return self.checkpoint.model.generate(
                inputs.input_features, attention_mask=inputs.attention_mask, return_segments=True, **arguments
            )

    def text(self, token_ids: Any) -> str:
        decoded: str = self.checkpoint.tokenizer.decode(token_ids, skip_special_tokens=True)
        return decoded.strip()
