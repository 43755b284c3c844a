# SPDX-License-Identifier: Apache-2.0
"""A tiny Whisper with windows of 3 s, and sounds as files."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch

from hf_triton.protocol.tensors import Array
from tests.support.sentence_checkpoints import quietly

RATE = 16_000
WINDOW_S = 3
LANGUAGES = ("en", "de", "fr", "zh")
MAX_TARGETS = 64
WORDS = ("the old harbour has two boats and one lighthouse", "where does the river go after the bridge?")


def save_whisper(
    folder: Path, *, languages: tuple[str, ...] = LANGUAGES, dtype: str = "float32", **config: Any
) -> Path:
    """A Whisper with random weights, its tokenizer's special tokens and its generation_config as published ones have.

    Args:
        folder: The destination.
        languages: Those that it knows; none for a model of English alone.
        dtype: Of the weights.
        **config: Further settings of its config.
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
