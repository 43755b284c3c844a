# SPDX-License-Identifier: Apache-2.0
"""What is no checkpoint is refused as what it is, from a folder and from the Hub."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from hf_triton.errors import LoadError
from hf_triton.hub.failures import explain_load
from hf_triton.hub.kind import is_embedding_model
from hf_triton.hub.resolve import Hub
from hf_triton.settings import ModelSettings
from hf_triton.testing import LoopbackHub

KINDS: Mapping[str, tuple[str, str]] = {
    "adapter_config.json": ('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}', "an adapter of 'Qwen/Qwen3-0.6B'"),
    "model-Q4_K_M.gguf": ("GGUF", "GGUF files, which llama.cpp reads"),
    "model_index.json": ("{}", "a pipeline of diffusers"),
    "model.onnx": ("onnx", "ONNX files"),
    "flax_model.msgpack": ("flax", "TensorFlow's or Flax's weights alone"),
}


def write(folder: Path, file: str) -> Path:
    folder.mkdir()
    (folder / "README.md").touch()
    (folder / file).write_text(KINDS[file][0])
    return folder


@pytest.mark.parametrize("file", KINDS)
def test_a_folder_is_named_for_what_it_is(file: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", file)
    with pytest.raises(LoadError, match=KINDS[file][1]) as caught:
        Hub(tmp_path, ModelSettings(huggingface_model=str(folder)), os.environ).resolve_model()
    assert caught.value.code == "unsupported_model"


@pytest.mark.parametrize("file", KINDS)
def test_a_repository_is_named_for_what_it_is(file: str, tmp_path: Path) -> None:
    with LoopbackHub() as hub:
        hub.add("acme/thing", write(tmp_path / "folder", file))
        environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "home")}
        with pytest.raises(LoadError, match=f"acme/thing .*{KINDS[file][1]}"):
            Hub(tmp_path, ModelSettings(huggingface_model="acme/thing"), environment).resolve_model()


@pytest.mark.parametrize(
    ("architecture", "is_one"), [("BertModel", True), ("Qwen3ForCausalLM", False), ("GPT2LMHeadModel", False)]
)
def test_sentence_transformers_checkpoints_are_embedding_models(
    architecture: str, is_one: bool, tmp_path: Path
) -> None:
    assert not is_embedding_model(tmp_path, [architecture])
    (tmp_path / "modules.json").write_text(json.dumps([]))
    assert is_embedding_model(tmp_path, [architecture]) == is_one


@pytest.mark.parametrize("message", ["could not quantize", "'int8_weight_only' is no AOBaseConfig"])
def test_a_wrong_quantization_setting_is_the_first_remedy(message: str) -> None:
    error = explain_load(AssertionError(message), "the weights", "acme/thing", has_quantization_setting=True)
    assert ": correct the setting quantization_config" in error.sentence
