# SPDX-License-Identifier: Apache-2.0
"""Models of GGUF files are those that transformers itself reads from them; what it cannot read is refused by name."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_triton.errors import CheckpointError
from hf_triton.hub.checkpoint import Checkpoint, Placement, load_checkpoint
from hf_triton.hub.resolve import Hub
from hf_triton.settings import ModelSettings
from tests.support.gguf import TEMPLATE, write_gguf

PROMPT = "Where does the river go?"


def load(folder: Path, auto_class: str | None = None, **settings: Any) -> Checkpoint:
    chosen = ModelSettings(huggingface_model=str(folder), **settings)
    return load_checkpoint(Hub(folder, chosen, os.environ), chosen, Placement("CPU", 0), auto_class)


def completion(model: Any, tokenizer: Any) -> list[int]:
    ids = tokenizer(PROMPT, return_tensors="pt")
    return list(model.generate(**ids, max_new_tokens=12, do_sample=False)[0].tolist())


@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_is_that_of_transformers(architecture: str, quant: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / f"Tiny-{quant}.gguf", architecture, quant)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = load(file.parent, gguf_file=quant)
    assert completion(loaded.model, loaded.tokenizer) == completion(model, tokenizer)
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert loaded.context_length == 256
    if quant == "F32":  # and the file is what the original was
        original: Any = AutoModelForCausalLM.from_pretrained(f"{file}.original")
        for name, tensor in original.state_dict().items():
            assert torch.equal(loaded.model.state_dict()[name], tensor), name


def test_the_dtype_is_that_of_the_setting(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf")
    assert load(file.parent).model.dtype == torch.float32
    assert load(file.parent, dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", chat_template=None)
    loaded = load(file.parent, tokenizer=f"{file}.original")
    assert len(loaded.tokenizer) == 384


@pytest.mark.parametrize(
    ("written", "settings", "code", "sentence"),
    [
        (
            {"family": "bert"},
            {},
            "unsupported_model",
            "does not read GGUF files of the architecture 'bert', as .* it reads .*gemma2, .*llama, .*qwen3, ",
        ),
        (
            {},
            {"auto_class": "AutoModel"},
            "unsupported_model",
            "is served from a GGUF file, and the folder's task is one of encoders",
        ),
        (
            {"keys": {"llama.embedding_length": 128}},
            {},
            "weights_mismatch",
            r"of a wrong shape \(lm_head.weight is \[384, 64\] and must be \[384, 128\]",
        ),
        (
            {"keys": {"llama.block_count": 5}},
            {},
            "checkpoint_invalid",
            "Tiny-Q8_0.gguf of .* has 21 tensors of 2 blocks, and 5 by its header",
        ),
        (
            {"keys": {"tokenizer.ggml.model": "novel"}},
            {},
            "checkpoint_invalid",
            "the tokenizer of Tiny-Q8_0.gguf .*novel.* choose another GGUF file, or the repository",
        ),
        (
            {"keys": {"tokenizer.ggml.bos_token_id": 99999}},
            {},
            "checkpoint_invalid",
            "the tokenizer of Tiny-Q8_0.gguf ",
        ),
        (
            {"keys": {"llama.attention.head_count": 0}},
            {},
            "checkpoint_invalid",
            "the header of Tiny-Q8_0.gguf .*ZeroDivisionError",
        ),
        (
            {"keys": {"llama.vocab_size": 2**31}},
            {},
            "checkpoint_invalid",
            "the weights of Tiny-Q8_0.gguf .*use a smaller dtype",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    written: dict[str, Any], settings: dict[str, Any], code: str, sentence: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", **written)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load(file.parent, **settings)
    assert caught.value.code == code
    assert "\n" not in caught.value.sentence
