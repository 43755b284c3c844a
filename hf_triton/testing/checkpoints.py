# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of real architectures with random weights.

A checkpoint has the files that `save_pretrained` writes: `config.json`, `generation_config.json`, safetensors weights
and a fast tokenizer. Two layers, hidden size 64, about 0.5 MB, built in well under a second once transformers is
imported. The weights are scaled up so that greedy completions vary with the prompt; the completions are noise.

This module knows nothing about Triton or the Hub.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
"""Special tokens of every tiny tokenizer, with ids 0, 1 and 2."""

VOCAB_SIZE = 384
"""Tokens of every tiny tokenizer: 3 special, 256 bytes, the rest merges."""

_TRAINING_TEXT = (
    "A letter was waiting on the kitchen table when the rain stopped.",
    "The old harbour has two boats, one lighthouse and more gulls than people.",
    "Where does the river go after the bridge? It goes to the mill, and then to the sea.",
    "Numbers such as 3, 14, 159 and 2653 should be split the way words are split.",
    "In the morning the baker carries warm bread to the market and the children follow.",
    "Write one short answer, then stop; the server returns the text that was generated.",
    "def area(width, height):\n    return width * height\n",
    "Der Zug fährt über die Brücke, et le café est déjà fermé.",
)


@dataclass(frozen=True)
class _Architecture:
    """The declaration of one architecture's tiny checkpoint."""

    config: str
    """Name of the configuration class in transformers."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments, on top of the vocabulary size and the special tokens' ids."""
    auto_class: str = "AutoModelForCausalLM"
    adds_bos: bool = False
    """The tokenizer adds `<s>` before a prompt."""
    adds_eos: bool = False
    """The tokenizer adds `</s>` after a prompt."""
    has_pad: bool = False
    """The tokenizer and the configuration have `<pad>`."""
    weight_scale: float = 6.0
    """Factor on every matrix after random initialization; 6 gives logits a standard deviation near 1."""
    embedding_scale: float | None = None
    """The same for the input embedding; None means `weight_scale`. If the embedding is also the output layer, too
    large a factor makes the model repeat the last token."""


_LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_GROUPED = _LLAMA_LIKE | {"num_key_value_heads": 2}
_GPT2_LIKE = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "tie_word_embeddings": False}
_FALCON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bias": False,
    "tie_word_embeddings": False,
}
_STATE_SPACE = {"hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}

_ARCHITECTURES: dict[str, _Architecture] = {
    "falcon": _Architecture(
        "FalconConfig",
        _FALCON | {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "alibi": False},
    ),
    "falcon-40b": _Architecture(
        "FalconConfig", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}
    ),
    "falcon-rw": _Architecture(
        "FalconConfig",
        _FALCON
        | {
            "multi_query": False,
            "parallel_attn": False,
            "new_decoder_architecture": False,
            "alibi": True,
            "bias": True,
        },
    ),
    "persimmon": _Architecture("PersimmonConfig", _LLAMA_LIKE, adds_bos=True),
    "llama": _Architecture("LlamaConfig", _GROUPED, adds_bos=True),
    "mistral": _Architecture("MistralConfig", _GROUPED | {"sliding_window": None}, adds_bos=True),
    "qwen2": _Architecture("Qwen2Config", _GROUPED, has_pad=True),
    "qwen3": _Architecture("Qwen3Config", _GROUPED | {"head_dim": 16}),
    "qwen3_5": _Architecture(
        "Qwen3_5TextConfig",
        _GROUPED
        | {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "gemma2": _Architecture("Gemma2Config", _GROUPED | {"head_dim": 16}, adds_bos=True, has_pad=True, weight_scale=4.0),
    "phi": _Architecture("PhiConfig", _LLAMA_LIKE),
    "gpt2": _Architecture("GPT2Config", _GPT2_LIKE),
    "gptj": _Architecture("GPTJConfig", _GPT2_LIKE | {"rotary_dim": 8}),
    "gpt_neox": _Architecture("GPTNeoXConfig", _LLAMA_LIKE),
    "opt": _Architecture(
        "OPTConfig",
        {
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
            "tie_word_embeddings": False,
        },
        adds_bos=True,
        has_pad=True,
    ),
    "bloom": _Architecture(
        "BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False}, has_pad=True
    ),
    "mpt": _Architecture(
        "MptConfig",
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "tie_word_embeddings": False},
        weight_scale=4.0,
    ),
    "mamba": _Architecture("MambaConfig", _STATE_SPACE | {"state_size": 8}, weight_scale=3.0),
    "rwkv": _Architecture("RwkvConfig", _STATE_SPACE | {"context_length": 256}, weight_scale=3.0),
    "t5": _Architecture(
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
        auto_class="AutoModelForSeq2SeqLM",
        adds_eos=True,
        has_pad=True,
        weight_scale=20.0,
        embedding_scale=0.2,
    ),
    "bart": _Architecture(
        "BartConfig",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 256,
            "forced_eos_token_id": None,
        },
        auto_class="AutoModelForSeq2SeqLM",
        adds_bos=True,
        adds_eos=True,
        has_pad=True,
        weight_scale=8.0,
        embedding_scale=2.0,
    ),
}

ARCHITECTURES: tuple[str, ...] = tuple(_ARCHITECTURES)
"""Names that `build_tiny_checkpoint` accepts."""


_BERT = _Architecture(
    "BertConfig",
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    },
    has_pad=True,
)
_HEADS = {
    "embeddings": "AutoModel",
    "feature-extraction": "AutoModel",
    "rerank": "AutoModelForSequenceClassification",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
    "sparse-embeddings": "AutoModelForMaskedLM",
}
_POOLINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "embeddings": (
        "sentence_transformers.models.Transformer",
        "sentence_transformers.models.Pooling",
        {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True},
    ),
    "sparse-embeddings": (
        "sentence_transformers.sparse_encoder.models.MLMTransformer",
        "sentence_transformers.sparse_encoder.models.SpladePooling",
        {"pooling_strategy": "max"},
    ),
}
"""The two modules of sentence-transformers for a task, and the config of the second."""

ENCODER_TASKS: tuple[str, ...] = tuple(_HEADS)
"""Names that `build_tiny_encoder` accepts."""


def build_tiny_checkpoint(
    folder: str | os.PathLike[str],
    architecture: str = "llama",
    *,
    seed: int = 0,
    add_bos: bool | None = None,
    chat_template: str | None = None,
    dtype: str = "float32",
    max_shard_size: int | str | None = None,
    safe_serialization: bool = True,
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint with random weights and a tokenizer that round-trips any string.

    The same arguments write the same weights; torch's global random state does not change. A special token's string
    (`</s>`) is encoded as that token. For `"qwen2"`, `AutoTokenizer` loads Qwen2's own class, which composes accents
    (NFC) first.

    Args:
        folder: The destination, created if missing.
        architecture: One of `ARCHITECTURES`, for example `"falcon"` (the 7B's form), `"falcon-40b"` or `"llama"`.
        seed: Of the random weights.
        add_bos: Whether the tokenizer adds `<s>` before a prompt; the default is that of the architecture's tokenizers.
        chat_template: Jinja source, saved with the tokenizer; none by default.
        dtype: Of the saved weights, as torch spells it: `"float32"`, `"bfloat16"`, `"float16"`.
        max_shard_size: Maximum size of a weight file, in bytes or as a string (`"100KB"`). One file by default.
        safe_serialization: False writes `pytorch_model.bin` (a pickle) instead of safetensors, as in old checkpoints.
        **overrides: Keyword arguments of the configuration class, for example `num_hidden_layers=4`.

    Returns:
        `folder`. Its files have mode 0644 (`save_pretrained` leaves weights at 0600, which other users cannot read).

    Raises:
        ValueError: The architecture is unknown, or `max_shard_size` is given for pickled weights.
    """
    declared = _ARCHITECTURES.get(architecture)
    if declared is None:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
    if not safe_serialization and max_shard_size is not None:
        raise ValueError("max_shard_size needs safe_serialization=True: pickled weights are written as one file")

    prepends_bos = declared.adds_bos if add_bos is None else add_bos
    tokenizer = _build_tokenizer(prepends_bos, declared.adds_eos, declared.has_pad)
    tokenizer.chat_template = chat_template
    model = _build_model(declared, seed, dtype, overrides)
    return _save(Path(folder), model, tokenizer, max_shard_size, safe_serialization)


def build_tiny_encoder(
    folder: str | os.PathLike[str], task: str = "embeddings", *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a tiny BERT with random weights for a task of an encoder.

    Its tokenizer is that of `build_tiny_checkpoint`, with `<mask>`; its embeddings are means of tokens.

    Args:
        folder: The destination, created if missing.
        task: One of `ENCODER_TASKS`, as the setting `task` has it.
        seed: Of the random weights.
        **overrides: Keyword arguments of `BertConfig`, for example `id2label={0: "no", 1: "yes"}`.

    Returns:
        `folder`. Its files have mode 0644.

    Raises:
        ValueError: The task is unknown.
    """
    if task not in _HEADS:
        raise ValueError(f"task must be one of {', '.join(ENCODER_TASKS)}, got {task!r}")
    tokenizer = _build_tokenizer(adds_bos=True, adds_eos=True, has_pad=True, vocab_size=VOCAB_SIZE - 1)
    tokenizer.add_special_tokens({"mask_token": "<mask>", "cls_token": BOS, "sep_token": EOS})
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    labels = {"num_labels": 1} if task == "rerank" else {}
    model = _build_model(replace(_BERT, auto_class=_HEADS[task]), seed, "float32", labels | overrides)
    saved = _save(Path(folder), model, tokenizer)
    if task in _POOLINGS:
        *kinds, config = _POOLINGS[task]
        places = enumerate(zip(("", "1_Pooling"), kinds, strict=True))
        modules = [{"idx": idx, "name": str(idx), "path": path, "type": kind} for idx, (path, kind) in places]
        (saved / "1_Pooling").mkdir(exist_ok=True)
        (saved / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        (saved / "1_Pooling" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return saved


def _save(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    max_shard_size: int | str | None = None,
    safe_serialization: bool = True,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with _progress_bars_off():
        _save_model(model, folder, max_shard_size, safe_serialization)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)
    return folder


def _build_model(declared: _Architecture, seed: int, dtype: str, overrides: Mapping[str, Any]) -> PreTrainedModel:
    import torch
    import transformers

    special_ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2 if declared.has_pad else None}
    if declared.auto_class == "AutoModelForSeq2SeqLM":
        special_ids["decoder_start_token_id"] = 2
    settings = {"vocab_size": VOCAB_SIZE, **special_ids, **declared.settings, **overrides}
    config = getattr(transformers, declared.config)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, declared.auto_class).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(declared.weight_scale)
        if declared.embedding_scale is not None:
            embedding: Any = model.get_input_embeddings()
            embedding.weight.mul_(declared.embedding_scale / declared.weight_scale)
    model.to(getattr(torch, dtype))
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _save_model(
    model: PreTrainedModel, folder: Path, max_shard_size: int | str | None, safe_serialization: bool
) -> None:
    import torch

    if not safe_serialization:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    elif max_shard_size is None:
        model.save_pretrained(folder)
    else:
        model.save_pretrained(folder, max_shard_size=max_shard_size)


@contextmanager
def _progress_bars_off() -> Iterator[None]:
    """Disable the progress bars of `save_pretrained`; transformers has one switch for the process."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _build_tokenizer(
    adds_bos: bool, adds_eos: bool, has_pad: bool, vocab_size: int = VOCAB_SIZE
) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    template = " ".join([BOS] * adds_bos + ["$A"] + [EOS] * adds_eos)
    pair = f"{template} $B:1" + f" {EOS}:1" * adds_eos
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=pair, special_tokens=[(BOS, 0), (EOS, 1)]
    )
    # unk_token: AutoTokenizer loads Qwen2's own class, which adds a token if there is none.
    special_tokens = {"bos_token": BOS, "eos_token": EOS} | ({"pad_token": PAD, "unk_token": PAD} if has_pad else {})
    build: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = build(tokenizer_object=tokenizer, **special_tokens)
    return wrapped
