# SPDX-License-Identifier: Apache-2.0
"""Tokenizers as older checkpoints have them, without tokenizer.json: one real file of each format, by our loader."""

import base64
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hf_triton.errors import CheckpointError
from hf_triton.hub.locate import Hub
from hf_triton.hub.pretrained import load_tokenizer
from hf_triton.settings import ModelSettings
from hf_triton.testing import LoopbackHub
from tests.support.tokenizers import train_sentencepiece, write_opus_tokenizer

TEXT = "the old harbour has two boats."
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ALBERT = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": "[CLS],[SEP],[MASK]"}
XLNET = {"control_symbols": "<cls>,<sep>,<pad>,<mask>,<eod>", "user_defined_symbols": "<eop>"}
DEBERTA = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3} | {
    f"{name}_piece": f"[{word}]" for name, word in (("bos", "CLS"), ("eos", "SEP"), ("pad", "PAD"), ("unk", "UNK"))
}
LLAMA = {"vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "identity"}
GEMMA = LLAMA | {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False}


class Family(NamedTuple):
    """A family's file of sentencepiece, as its first checkpoints have it."""

    file: str
    kind: str
    options: Mapping[str, Any] = {}
    tokenizer_class: str | None = None
    model_type: str | None = None
    """In config.json, if it is not the family's name."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("tokenizer.model", "bpe", LLAMA, "LlamaTokenizer"),
    "mistral": Family("tokenizer.model", "bpe", LLAMA, "LlamaTokenizer"),
    "gemma": Family("tokenizer.model", "bpe", GEMMA, "GemmaTokenizer"),
    "t5": Family("spiece.model", "unigram", T5),
    "mt5": Family("spiece.model", "unigram", T5, "T5Tokenizer"),
    "pegasus": Family("spiece.model", "unigram", T5),
    "albert": Family("spiece.model", "unigram", ALBERT),
    "xlnet": Family("spiece.model", "unigram", XLNET),
    "big_bird": Family("spiece.model", "unigram"),
    "reformer": Family("spiece.model", "bpe"),
    "rembert": Family("sentencepiece.model", "unigram"),
    "xlm-roberta": Family("sentencepiece.bpe.model", "unigram"),
    "camembert": Family("sentencepiece.bpe.model", "unigram"),
    "barthez": Family("sentencepiece.bpe.model", "unigram", {}, "BarthezTokenizer", "mbart"),
    "mbart": Family("sentencepiece.bpe.model", "unigram"),
    "mbart50": Family("sentencepiece.bpe.model", "unigram", {}, "MBart50Tokenizer", "mbart"),
    "nllb": Family("sentencepiece.bpe.model", "bpe", {}, "NllbTokenizer", "m2m_100"),
    "deberta-v2": Family("spm.model", "unigram", DEBERTA),
}


def write(folder: Path, files: Mapping[str, str], model_type: str, tokenizer_class: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if tokenizer_class:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    return folder


def load(folder: Path) -> Any:
    return load_tokenizer(folder, ModelSettings(huggingface_model=str(folder)))


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        load(folder)
    assert "fetch the checkpoint again" not in raised.value.sentence
    return raised.value


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sentencepiece_model_is_read_as_sentencepiece_reads_it(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    expected = train_sentencepiece(tmp_path / family.file, family.kind, **family.options).encode(TEXT, out_type=str)
    tokenizer = load(write(tmp_path, {}, family.model_type or name, family.tokenizer_class))
    assert tokenizer.tokenize(TEXT) == expected
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"], skip_special_tokens=True) == TEXT


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_marian_s_files_are_read_as_sentencepiece_reads_them(tmp_path: Path) -> None:
    expected = write_opus_tokenizer(tmp_path).encode(TEXT, out_type=str)
    assert load(write(tmp_path, {}, "marian")).tokenize(TEXT) == expected


def test_marian_s_files_are_downloaded(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_opus_tokenizer(write(source, {}, "marian"))
    (source / "model.safetensors").touch()
    with LoopbackHub() as hub:
        hub.add("acme/opus", source)
        environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "home")}
        found = Hub(tmp_path, ModelSettings(huggingface_model="acme/opus"), environment).resolve_model()
    assert {path.name for path in found.iterdir()} >= {"source.spm", "target.spm", "vocab.json"}


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "old", "har", "##bour"]
LETTERS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>", *"theoldharbur", "Ġ", "th", "the", "Ġo"]
VOCABULARY = json.dumps({name: place for place, name in enumerate(dict.fromkeys(LETTERS))})
MERGES = "#version: 0.2\nt h\nth e\nĠ o\n"


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "electra", "mpnet"])
def test_a_wordpiece_vocabulary_is_read(model_type: str, tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, {"vocab.txt": "\n".join(PIECES) + "\n"}, model_type))
    assert tokenizer.tokenize("The old harbour") == ["the", "old", "har", "##bour"]


@pytest.mark.parametrize("model_type", ["gpt2", "roberta", "bart", "longformer", "qwen2", "opt"])
def test_a_vocabulary_with_merges_is_read(model_type: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {"vocab.json": VOCABULARY, "merges.txt": MERGES}, model_type)
    assert load(folder).tokenize("the old") == ["the", "Ġo", "l", "d"]


RANKS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" o"]
TIKTOKEN = "".join(f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(RANKS))


def test_a_file_of_tiktoken_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert load(write(tmp_path, {"tokenizer.model": TIKTOKEN}, "llama")).tokenize("the old") == ["the", "Ġo", "l", "d"]


def test_a_file_of_tiktoken_without_the_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiktoken", "tiktoken.load"):
        monkeypatch.setitem(sys.modules, name, None)
    error = refused(write(tmp_path, {"tokenizer.model": TIKTOKEN}, "llama"))
    assert error.sentence.endswith("install tiktoken")


def test_a_tokenizer_that_needs_a_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    error = refused(write(tmp_path, {"vocab.json": VOCABULARY, "merges.txt": MERGES}, "xlm"))
    assert error.sentence.endswith("install sacremoses")


@pytest.mark.parametrize(
    ("files", "model_type", "words"),
    [
        ({}, "bert", "BertTokenizer reads tokenizer.json or vocab.txt, and there is none"),
        ({"qwen.tiktoken": TIKTOKEN}, "qwen2", "Qwen2Tokenizer reads tokenizer.json or vocab.json and merges.txt, and"),
        ({"sentencepiece.bpe.model": ""}, "xglm", "XGLMTokenizer reads tokenizer.json, and there is none"),
    ],
)
def test_an_empty_tokenizer_is_no_tokenizer(
    files: Mapping[str, str], model_type: str, words: str, tmp_path: Path
) -> None:
    """transformers makes one up where it finds none of a class's files."""
    error = refused(write(tmp_path, files, model_type))
    assert error.code == "checkpoint_incomplete"
    assert words in error.sentence
    assert error.sentence.endswith("set tokenizer to a repository or folder that has it")
