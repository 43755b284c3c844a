# SPDX-License-Identifier: Apache-2.0
"""Summarization and translation: what is read of a checkpoint and its tokenizer, without a server."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, M2M100Tokenizer, MBart50Tokenizer, MBartTokenizer

from hf_triton.errors import CheckpointError, RequestError
from hf_triton.hub.checkpoint import Checkpoint
from hf_triton.hub.pretrained import model_class
from hf_triton.settings import ModelSettings
from hf_triton.tasks.text_generation.text_codec import TextCodec
from hf_triton.tasks.text_generation.text_to_text import build_text_to_text, find_languages, max_new_tokens
from hf_triton.testing import build_tiny_checkpoint
from tests.support.reference import load_reference
from tests.support.sentence_checkpoints import quietly
from tests.support.translation import SUMMARY, TASKS, build_nllb, build_t5

TEXT = "the old harbour"


def build_m2m100(folder: Path) -> Any:
    """M2M100's tokenizer over a sentencepiece model that is trained on the spot."""
    import sentencepiece

    with (folder / "sentencepiece.bpe.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT, "where does the river go"] * 20),
            model_writer=file,
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    pieces = [spm.id_to_piece(number) for number in range(3, spm.get_piece_size())]
    words = {piece: place for place, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    (folder / "vocab.json").write_text(json.dumps(words))
    return M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model"))


def build_tokenizer(kind: str, folder: Path) -> Any:
    if kind == "nllb":
        return AutoTokenizer.from_pretrained(build_nllb(folder))
    if kind == "m2m100":
        return build_m2m100(folder)
    return {"mbart": MBartTokenizer, "mbart50": MBart50Tokenizer}[kind]()


@pytest.mark.parametrize(
    ("kind", "languages"),
    [
        ("nllb", ("eng_Latn", "deu_Latn")),
        ("m2m100", ("en", "fr")),
        ("mbart", ("en_XX", "ro_RO")),
        ("mbart50", ("fr_XX", "en_XX")),
    ],
)
def test_languages_are_the_tokenizers_own(kind: str, languages: tuple[str, str], tmp_path: Path) -> None:
    """As the pipeline of transformers 4 asked the tokenizer for them."""
    with quietly():
        tokenizer = build_tokenizer(kind, tmp_path)
    source, target = languages
    model = SimpleNamespace(generation_config=GenerationConfig())
    before = tokenizer.src_lang
    found = find_languages(Checkpoint(tokenizer, model, 64), "translation")
    assert found is not None
    assert tokenizer.src_lang == before
    codec = TextCodec(tokenizer, 10**6)
    direction = found.direction(source, target)
    expected = tokenizer._build_translation_inputs([TEXT], src_lang=source, tgt_lang=target, return_tensors=None)
    assert [codec.encode(TEXT, special_ids=direction.special_ids)] == expected["input_ids"]
    assert direction.first_id == expected["forced_bos_token_id"]
    with pytest.raises(RequestError, match="src_lang is missing"):
        found.direction(None, target)
    with pytest.raises(RequestError, match=f"tgt_lang must be one of .*{target}.*, got 'xx'"):
        found.direction(source, "xx")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_t5(tmp_path_factory.mktemp("t5"))


def checkpoint_of(folder: Path) -> Checkpoint:
    loaded = load_reference(folder)
    return Checkpoint(loaded.tokenizer, loaded.model, 512, folder)


def test_settings_of_the_task_are_those_of_generation(t5: Path) -> None:
    checkpoint = checkpoint_of(t5)
    task = build_text_to_text("summarization", checkpoint)
    assert task is not None
    assert task.direction(TEXT, None, None).prefix == SUMMARY["prefix"]
    config = checkpoint.model.generation_config
    assert {name: getattr(config, name) for name in SUMMARY if name != "prefix"} == {
        name: value for name, value in SUMMARY.items() if name != "prefix"
    }
    assert checkpoint.generation_defaults(with_beams=True).num_beams == SUMMARY["num_beams"]
    assert checkpoint.generation_defaults().num_beams is None
    assert max_new_tokens(checkpoint) == 19  # the decoder's first token is one of `max_length`


def test_pairs_of_languages_are_prefixes(t5: Path) -> None:
    checkpoint = checkpoint_of(t5)
    task = build_text_to_text("translation", checkpoint)
    assert task is not None
    prefix = TASKS["translation_en_to_fr"]["prefix"]
    assert task.direction(TEXT, "en", "fr").prefix == prefix
    assert task.direction(f"{prefix}{TEXT}", None, None).prefix == ""
    assert checkpoint.model.generation_config.num_beams == 3
    for languages in ((None, None), ("en", None), ("fr", "en")):
        with pytest.raises(RequestError, match="must be one of the pairs en and de, en and fr"):
            task.direction(TEXT, *languages)


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        ({}, ""),
        ({"prefix": "ask: "}, "ask: "),
        ({"task_specific_params": None}, ""),
        ({"task_specific_params": []}, ""),
    ],
)
def test_a_checkpoint_need_not_have_settings(settings: dict[str, Any], prefix: str, t5: Path, tmp_path: Path) -> None:
    config = {name: value for name, value in json.loads((t5 / "config.json").read_text()).items() if "task" not in name}
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    checkpoint = checkpoint_of(t5)
    checkpoint.folder = tmp_path
    for name in ("text2text-generation", "translation"):
        task = build_text_to_text(name, checkpoint)
        assert task is not None
        assert task.direction(TEXT, None, None).prefix == prefix
        with pytest.raises(RequestError, match="tgt_lang has no effect: this model takes no languages"):
            task.direction(TEXT, None, "de")
    assert max_new_tokens(checkpoint) is None
    assert build_text_to_text(None, checkpoint) is None
    assert build_text_to_text("text-generation", checkpoint) is None


@pytest.mark.parametrize("settings", [{"num_beams": 40}, {"no_repeat_ngram_size": "3"}, {"repetition_penalty": -1}])
def test_settings_that_cannot_be_used_fail_the_load(settings: dict[str, Any], t5: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"task_specific_params": {"summarization": settings}}))
    checkpoint = checkpoint_of(t5)
    checkpoint.folder = tmp_path
    with pytest.raises(CheckpointError, match=r"config\.json has settings for summarization that cannot be used"):
        build_text_to_text("summarization", checkpoint)


def test_a_model_that_continues_its_prompt_does_no_such_task(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path, "gpt2")
    settings = ModelSettings(huggingface_model=str(folder), task="translation")
    with pytest.raises(CheckpointError, match="the task translation needs an encoder-decoder"):
        model_class(folder, AutoConfig.from_pretrained(folder), settings)
