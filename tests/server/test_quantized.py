# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints on a real server: saved by transformers on the spot, or quantised at load by a setting."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.quantizers import AutoQuantizationConfig

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import generate
from tests.support.standard import StandardServer

pytestmark = pytest.mark.full

PROMPT = "Where does the river go?"
SETTINGS: Mapping[str, dict[str, Any]] = {
    "bnb_8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bnb_4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "torchao": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
    },
}
SAVED, AT_LOAD, COMPRESSED = ("bnb_4bit", "torchao"), ("bnb_8bit", "torchao"), "compressed_tensors"


def text_of(folder: Path, **arguments: Any) -> str:
    """What transformers itself generates from the same weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=8, do_sample=False)
    text: str = tokenizer.decode(output[0][ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def save_compressed(plain: Path, folder: Path) -> None:
    """Save a checkpoint as compressed-tensors packs it: 8 bit, a scale for each output channel."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format="pack-quantized")
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            layer.weight_scale.data = layer.weight.data.abs().amax(1, keepdim=True) / 127
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By folder: the checkpoint and the completion."""
    root = tmp_path_factory.mktemp("quantized")
    plain = build_tiny_checkpoint(root / "plain")
    found: dict[str, tuple[Path, str]] = {}
    for name in SAVED:
        quantization: Any = AutoQuantizationConfig.from_dict(dict(SETTINGS[name]))
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=quantization)
        model.save_pretrained(root / name)
        AutoTokenizer.from_pretrained(plain).save_pretrained(root / name)
        found[name] = (root / name, text_of(root / name))
    for name in AT_LOAD:
        quantization = AutoQuantizationConfig.from_dict(dict(SETTINGS[name]))
        found[f"{name}_at_load"] = (plain, text_of(plain, quantization_config=quantization))
    save_compressed(plain, root / COMPRESSED)
    AutoTokenizer.from_pretrained(plain).save_pretrained(root / COMPRESSED)
    found[COMPRESSED] = (root / COMPRESSED, text_of(root / COMPRESSED))
    return found


@pytest.fixture(scope="module")
def server(
    expected: dict[str, tuple[Path, str]],
    tmp_path_factory: pytest.TempPathFactory,
    make_folder: Callable[..., Path],
    standard: StandardServer,
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name, (checkpoint, _) in expected.items():
        more = {}
        if name.endswith("_at_load"):
            more = {"quantization_config": json.dumps(SETTINGS[name.removesuffix("_at_load")])}
        make_folder(repository, name, huggingface_model=checkpoint, dtype="float32", **more)
    with standard.beside(repository) as running:
        yield running


@pytest.mark.parametrize("name", [*SAVED, COMPRESSED, *(f"{name}_at_load" for name in AT_LOAD)])
def test_completion_equals_that_of_transformers(
    server: TritonServer, expected: dict[str, tuple[Path, str]], name: str
) -> None:
    answer = generate(server, name, PROMPT, max_new_tokens=8, exclude_input_in_output=True).json()
    assert answer.get("text_output") == expected[name][1], answer


def test_quantised_models_run_in_continuous_batches(server: TritonServer) -> None:
    lines = [line for line in server.read_log().splitlines() if "engine batch" in line]
    assert not any(f"{name}: " in line for line in lines for name in (*SAVED, COMPRESSED))
