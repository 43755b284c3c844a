# SPDX-License-Identifier: Apache-2.0
"""FP8 of compressed-tensors and of torchao: computed where a device can, which a CPU stands in for here."""

import copy
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM

from hf_triton.errors import CheckpointError
from hf_triton.hub import pretrained
from hf_triton.hub.pretrained import load_config, load_model
from hf_triton.runner.float32 import in_float32
from hf_triton.sampling.params import SamplingParams
from hf_triton.settings import ModelSettings
from hf_triton.testing import build_tiny_checkpoint
from tests.support.engine import Client, check, greedy_ids, start_engine

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:You passed `quantization_config`")]
WIDENED = {"quant_method": "compressed-tensors", "dequantize": True}
PER_ROW = {"granularity": [{"_type": "PerRow", "_data": {}}, {"_type": "PerRow", "_data": {}}]}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2, "_data": PER_ROW}},
}
TOKENS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in FP8, a scale for each output and for each row of inputs (`FP8-dynamic`)."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    root = tmp_path_factory.mktemp("fp8")
    plain = build_tiny_checkpoint(root / "plain", "llama", eos_token_id=None)
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format="float-quantized")
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            largest = torch.finfo(torch.float8_e4m3fn).max
            layer.weight_scale.data = (layer.weight.data.abs().amax(1, keepdim=True) / largest).to(torch.bfloat16)
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(root / "fp8")
    compressor.update_config(str(root / "fp8"))
    return root / "fp8"


def load(folder: Path, **settings: Any) -> Any:
    own = ModelSettings(huggingface_model=str(folder), dtype="bfloat16", **settings)
    return load_model(folder, load_config(folder, own), own, {"": "cpu"}).eval()


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
        return load(folder)


def num_bytes(model: Any) -> int:
    return sum(each.nbytes for each in model.model.layers.parameters())


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS).logits.float()
    return found


def test_a_device_that_can_computes_in_fp8(model: Any, folder: Path) -> None:
    kinds = {type(layer).__name__ for layer in model.model.layers.modules() if hasattr(layer, "weight_scale")}
    assert kinds == {"CompressedTensorsFP8Linear"}
    widened = load(folder)
    expected = logits(widened)
    assert num_bytes(model) < 0.58 * num_bytes(widened)
    assert (logits(model) - expected).abs().max() < 0.1 * expected.abs().max()


def test_others_and_folders_that_say_so_widen_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(type(layer).__name__ == "CompressedTensorsFP8Linear" for layer in load(folder).modules())
    monkeypatch.setattr(pretrained, "computes_fp8", lambda: True)
    plain = load(folder, quantization_config=WIDENED)
    assert not any(type(layer).__name__ == "CompressedTensorsFP8Linear" for layer in plain.modules())


def test_the_trial_sees_weights_in_float32(model: Any) -> None:
    before, weights = logits(model), {name: each.float() for name, each in model.state_dict().items()}
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith("weight_scale")}
    for name, scale in scales.items():
        weights[name.removesuffix("_scale")] *= scale.view(-1, 1)
    config = copy.deepcopy(model.config)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.load_state_dict(weights)
    expected = logits(plain)
    for hooked in (False, True):  # as a model on several devices is
        if hooked:
            dispatch_model(model, {"": "cpu"}, force_hooks=True)
        with in_float32(model):
            found = logits(model)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        assert torch.equal(logits(model), before)


def test_the_engine_packs_it(model: Any) -> None:
    items = [([5, 6, 7], SamplingParams(6)), ([8, 9, 10, 11, 12], SamplingParams(6))]
    with closing(start_engine(model, max_num_seqs=4, context_length=64)) as engine:
        assert engine.runner.is_packed
        check(model, Client(engine), items, expected=greedy_ids(model, items))


def test_torchao_quantises_at_load_and_the_engine_packs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny_checkpoint(tmp_path / "plain", "llama", eos_token_id=None)
    plain = load(folder)
    monkeypatch.setattr(pretrained, "computes_fp8", lambda: True)
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
    model = load(folder, quantization_config=TORCHAO)
    weights = {name: each for name, each in model.named_parameters() if type(each).__name__ == "Float8Tensor"}
    assert len(weights) == 14
    assert {each.qdata.dtype for each in weights.values()} == {torch.float8_e4m3fn}
    expected = logits(plain)
    assert 0.001 < float((logits(model) - expected).norm() / expected.norm()) < 0.25
    widened = copy.deepcopy(plain).float()
    for name, each in weights.items():
        widened.get_parameter(name).data = each.dequantize().float()
    with in_float32(model):
        found = logits(model)
    expected = logits(widened)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    items = [([5, 6, 7], SamplingParams(6)), ([8, 9, 10, 11, 12], SamplingParams(6))]
    with closing(start_engine(model, max_num_seqs=4, context_length=64)) as engine:
        assert engine.runner.is_packed
        check(model, Client(engine), items, expected=greedy_ids(model, items))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_torchao_says_what_card_it_needs(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "plain", "llama")
    with pytest.raises(CheckpointError, match=r"needs a GPU of CUDA capability 8.9 \(L4, RTX 40, H100\)") as error:
        load(folder, quantization_config=TORCHAO)
    assert error.value.code == "device_unavailable"
