# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints for summarization and translation, and what transformers 4's pipelines made of them."""

import json
from pathlib import Path
from typing import Any

import torch

from hf_triton.testing import build_tiny_checkpoint
from tests.support.reference import load_reference
from tests.support.sentence_checkpoints import quietly
from tests.support.tokenizers import write_opus_tokenizer

SUMMARY = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "max_length": 20,
    "min_length": 8,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "prefix": "summarize: ",
}
"""The form is T5's."""
PAIR = {"early_stopping": True, "max_length": 15, "num_beams": 3}
TASKS = {
    "summarization": SUMMARY,
    "translation_en_to_de": {**PAIR, "prefix": "translate English to German: "},
    "translation_en_to_fr": {**PAIR, "prefix": "translate English to French: "},
}
LANGUAGES = ["eng_Latn", "deu_Latn", "fra_Latn"]
LETTERS = "▁abcdefghijklmnopqrstuvwxyz,."


def build_t5(folder: Path) -> Path:
    """A tiny T5 with the settings of its tasks in config.json."""
    build_tiny_checkpoint(folder, "t5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "task_specific_params": TASKS}))
    return folder


def build_nllb(folder: Path) -> Path:
    """A tiny M2M100 with NLLB's tokenizer of three languages and a vocabulary of letters."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration, NllbTokenizer

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {token: place for place, token in enumerate([*special, *LETTERS])}
    tokenizer: Any = NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=LANGUAGES)
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIZES.items()}
    config = M2M100Config(
        vocab_size=len(tokenizer),
        d_model=64,
        max_position_embeddings=128,
        num_beams=2,
        tie_word_embeddings=False,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim == 2 else 1.0)
    with quietly():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"  # as published, it names no source language
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "src_lang": None}))
    return folder


def build_opus(folder: Path) -> Path:
    """A tiny Marian as Opus-MT publishes them: two models of sentencepiece, no tokenizer.json, beams, a banned pad."""
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    folder.mkdir(parents=True)
    write_opus_tokenizer(folder)
    size = len(json.loads((folder / "vocab.json").read_text()))
    special = {"pad_token_id": size - 1, "eos_token_id": 0, "decoder_start_token_id": size - 1}
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _SIZES.items()}
    config = MarianConfig(vocab_size=size, d_model=64, max_position_embeddings=128, **sizes, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MarianMTModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(16.0 if parameter.ndim == 2 else 1.0)
    model.generation_config = GenerationConfig(
        **special, num_beams=4, max_length=24, bad_words_ids=[[size - 1]], forced_eos_token_id=0
    )
    with quietly():
        model.save_pretrained(folder)
    return folder


_SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 128, "layerdrop": 0.0}


def pipeline_text(folder: Path, prompt: str, task: str | None = None, **arguments: Any) -> str:
    """What transformers 4's pipeline answered: `generate` with the checkpoint's settings and prefix for the task."""
    loaded = load_reference(folder)
    settings = TASKS[task] if task else {}
    own = {name: value for name, value in settings.items() if name != "prefix"}
    loaded.model.generation_config.update(**own)
    inputs = loaded.tokenizer(str(settings.get("prefix", "")) + prompt, return_tensors="pt")
    with torch.inference_mode():
        [ids] = loaded.model.generate(**inputs, **arguments)
    return str(loaded.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def translation(folder: Path, prompt: str, src_lang: str, tgt_lang: str, **arguments: Any) -> str:
    """The same of a model with tokens for languages."""
    loaded = load_reference(folder)
    loaded.tokenizer.src_lang = src_lang
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    first_id = loaded.tokenizer.convert_tokens_to_ids(tgt_lang)
    with torch.inference_mode():
        [ids] = loaded.model.generate(**inputs, forced_bos_token_id=first_id, **arguments)
    return str(loaded.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
