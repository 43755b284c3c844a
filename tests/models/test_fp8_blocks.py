# SPDX-License-Identifier: Apache-2.0
"""Block-wise FP8 and MXFP4: widened as their definition has it, or computed by a pulled kernel; nothing is fetched."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_triton.errors import CheckpointError
from hf_triton.hub import pretrained
from hf_triton.hub.pretrained import load_config, load_model
from hf_triton.settings import ModelSettings
from hf_triton.testing import LoopbackHub, build_tiny_checkpoint
from tests.support.commands import hf_triton
from tests.support.fp8_blocks import CONFIG, KERNEL, edit_config, quantize, widen, write_kernel, write_stand_in
from tests.support.paths import ROOT

pytestmark = pytest.mark.full
CUT = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "head_dim": 32}
"""Sizes that blocks of 128 do not divide: 64 are left of each; `eos_token_id` is none."""
SCALES = "model.layers.1.mlp.up_proj.weight_scale_inv"


def load(folder: Path, **settings: Any) -> Any:
    own = ModelSettings(huggingface_model=str(folder), **settings)
    return load_model(folder, load_config(folder, own), own, {"": "cpu"}).eval()


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert error.value.code == "weights_mismatch"
    return error.value.sentence


def edit_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({name: each for name, each in stored.items() if each is not None}, folder / "model.safetensors")


@pytest.fixture
def quantized(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = build_tiny_checkpoint(tmp_path / "blocks", "llama", eos_token_id=None, **CUT)
    return folder, quantize(folder)


def test_cut_blocks_are_widened_by_their_own_scales(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, widened = quantized
    found = load(folder).state_dict()
    assert {name: each.dtype for name, each in found.items()} == dict.fromkeys(widened, torch.bfloat16)
    assert [name for name in widened if not torch.equal(found[name], widened[name])] == []


def test_576_rows_as_of_deepseek_are_widened(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 576, "num_attention_heads": 4, "head_dim": 32}
    folder = build_tiny_checkpoint(tmp_path / "blocks", "llama", **sizes)
    widened = quantize(folder)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert load_file(folder / "model.safetensors")[f"{name}_scale_inv"].shape == (5, 1)
    assert torch.equal(load(folder).state_dict()[name], widened[name])


def test_experts_are_widened_before_they_are_joined(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=192, moe_intermediate_size=160, num_experts=3, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=64,
        mlp_only_layers=[], decoder_sparse_step=1, intermediate_size=128,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    widened = quantize(tmp_path)
    assert not any(path.endswith("gate_up_proj") for path in widened)  # as in published files
    found = load(tmp_path).state_dict()
    for expert in range(3):
        stem = f"model.layers.0.mlp.experts.{expert}"
        joined = torch.cat([widened[f"{stem}.gate_proj.weight"], widened[f"{stem}.up_proj.weight"]])
        assert torch.equal(found["model.layers.0.mlp.experts.gate_up_proj"][expert], joined)
        assert torch.equal(found["model.layers.0.mlp.experts.down_proj"][expert], widened[f"{stem}.down_proj.weight"])


def test_a_weight_without_scales_is_refused_by_name(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = quantized
    edit_tensors(folder, **{SCALES: None})
    sentence = refusal(folder)
    assert sentence.startswith("model.layers.1.mlp.up_proj.weight of ")
    assert f"has no scales ({SCALES})" in sentence


def test_scales_of_other_blocks_are_refused_by_name(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = quantized
    edit_tensors(folder, **{SCALES: torch.ones(5, 3)})
    assert "model.layers.1.mlp.up_proj.weight of " in (sentence := refusal(folder))
    assert "is [320, 192] and has [5, 3] scales, against [3, 2] by weight_block_size [128, 128]" in sentence


@pytest.mark.parametrize("block", [[128], [0, 128], [128, 128.0], 128, "128"])
def test_blocks_that_are_none_are_refused(block: Any, quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = quantized
    edit_config(folder, quantization_config=CONFIG | {"weight_block_size": block})
    with pytest.raises(CheckpointError, match=r"weight_block_size in config.json of .* must be two integers > 0, got"):
        load(folder)


def gpt_oss(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of gpt-oss with experts in MXFP4; returns its experts as they are when they are widened."""
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=32, num_local_experts=2, num_experts_per_tok=1,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
        layer_types=["full_attention"], sliding_window=16,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors, widened = load_file(folder / "model.safetensors"), {}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).transpose(1, 2).shape
        packed = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": packed, f"{name}_scales": scales}
        pairs = torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], -1).flatten(-2)
        scaled = pairs * torch.exp2(scales.float() - 127)[..., None]
        widened[name] = scaled.flatten(-2).transpose(1, 2).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    return widened


def test_mxfp4_is_widened_and_not_without_its_scales(tmp_path: Path) -> None:
    widened = gpt_oss(tmp_path)
    found = load(tmp_path).state_dict()
    assert len(widened) == 2
    assert all(torch.equal(found[name], each) for name, each in widened.items())
    name = "model.layers.0.mlp.experts.down_proj"
    edit_tensors(tmp_path, **{f"{name}_scales": None})
    assert f"{name}_blocks of {tmp_path} has no scales ({name}_scales)" in refusal(tmp_path)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.usefixtures("gpu")
def test_without_kernels_a_gpu_widens_and_says_so(
    quantized: tuple[Path, dict[str, torch.Tensor]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, widened = quantized
    monkeypatch.setattr(pretrained, "use_pulled", lambda: None)
    own = ModelSettings(huggingface_model=str(folder), quantization_config={"quant_method": "fp8"})
    config = load_config(folder, own)
    method, is_undone, why = pretrained.check_quantization(config, own) or ("", False, "")
    assert (method, is_undone) == ("fp8", True)
    assert why == (
        "fp8 needs the package kernels (>= 0.18.2, < 0.19.0), not installed: `pip install 'hf-triton[kernels]'`, then "
        f"`hf-triton pull --kernels {folder}`"
    )
    with caplog.at_level("INFO"):
        found = load_model(folder, config, own, {"": "meta"})
    assert f"its quantisation is undone at load, since {why}" in caplog.text
    assert "the weights take " in caplog.text
    assert {each.dtype for each in found.parameters()} == {torch.bfloat16}
    assert len(found.state_dict()) == len(widened)


@pytest.mark.usefixtures("gpu")
def test_a_model_is_not_quantised_without_kernels(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "plain", "llama")
    own = ModelSettings(huggingface_model=str(folder), quantization_config={"quant_method": "fp8"})
    config = load_config(folder, own)
    with pytest.raises(CheckpointError, match=r"fp8 needs the package kernels .*; or leave out the setting quantiz"):
        load_model(folder, config, own, {"": "meta"})


@pytest.mark.usefixtures("gpu")
def test_a_model_beside_a_gpu_is_widened(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, widened = quantized
    found = load(folder).state_dict()
    assert all(torch.equal(found[name], each) for name, each in widened.items())


@pytest.mark.usefixtures("gpu")
def test_experts_of_cut_blocks_are_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "describe_lack", lambda *_: None)
    config = AutoConfig.for_model("qwen3_moe", moe_intermediate_size=224, num_experts=4)
    config.quantization_config = dict(CONFIG)
    own = ModelSettings(huggingface_model="acme/moe")
    why = pretrained.undo_without_kernels(config, own)
    assert why == "its experts have 224 rows, no whole blocks of 128, and transformers joins two of them"
    assert config.quantization_config["dequantize"] is True
    config = AutoConfig.for_model("qwen3_moe", moe_intermediate_size=256, num_experts=4)
    config.quantization_config = dict(CONFIG)
    assert pretrained.undo_without_kernels(config, own) is None


COMPUTE = """
import logging, sys
from contextlib import closing
from pathlib import Path
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (8, 9)
from hf_triton.hub import pretrained
from hf_triton.runner.float32 import in_float32
from hf_triton.sampling.params import SamplingParams
from hf_triton.settings import ModelSettings

logging.basicConfig(level=logging.INFO)
folder = Path(sys.argv[1])
own = ModelSettings(huggingface_model=str(folder))
find = pretrained.undo_without_kernels
pretrained.undo_without_kernels = lambda *given, is_on_cpu: find(*given)  # the CPU is the GPU here
model = pretrained.load_model(folder, pretrained.load_config(folder, own), own, {"": "cpu"}).eval()
torch.cuda.is_available = lambda: False
tokens = torch.tensor([[5, 6, 7, 8, 9]])
with torch.inference_mode():
    logits = model(tokens).logits.float()
    with in_float32(model):
        exact = model(tokens).logits.float()
from tests.support.engine import Client, check, greedy_ids, start_engine
items = [([5, 6, 7], SamplingParams(6)), ([8, 9, 10, 11, 12], SamplingParams(6))]
with closing(start_engine(model, max_num_seqs=4, context_length=64)) as engine:
    is_packed = engine.runner.is_packed
    check(model, Client(engine), items, expected=greedy_ids(model, items))
torch.save({"logits": logits, "exact": exact, "is_packed": is_packed,
            "kinds": sorted({type(each).__name__ for each in model.modules()})}, sys.argv[2])
"""


@pytest.mark.usefixtures("clean_environment")
def test_a_pulled_kernel_computes_and_nothing_is_fetched(
    quantized: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, widened = quantized
    write_stand_in(tmp_path / "packages")
    with LoopbackHub() as hub:
        repository = write_kernel(tmp_path / "kernel")
        commit = hub.add(KERNEL, repository, revisions={"v4": repository})
        environment = hub.environment() | {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": f"{ROOT}"}

        def compute(name: str) -> subprocess.CompletedProcess[str]:
            path = f"{tmp_path / 'packages'}:{ROOT}"
            arguments = [sys.executable, "-c", COMPUTE, str(folder), str(tmp_path / name)]
            given = os.environ | environment | {"PYTHONPATH": path}
            return subprocess.run(arguments, env=given, capture_output=True, text=True, timeout=240)

        pulled = hf_triton("pull", "--kernels", str(folder), **environment)
        assert pulled.returncode == 0, pulled.stderr
        assert json.loads((tmp_path / "home" / "hub" / "kernels.lock").read_text()) == {KERNEL: commit}
        hub.requests.clear()
        done = compute("fp8.pt")
        assert done.returncode == 0, done.stderr
        assert hub.requests == []
    found = torch.load(tmp_path / "fp8.pt")
    assert found["is_packed"]
    assert "FP8Linear" in found["kinds"]
    plain = AutoConfig.from_pretrained(folder)
    del plain.quantization_config
    model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32).eval()
    model.load_state_dict({name: each.float() for name, each in widened.items()})
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if f"{name}_scale_inv" in stored]:  # not rounded to bfloat16
        model.get_parameter(name).data = widen(stored[name], stored[f"{name}_scale_inv"])
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 6, 7, 8, 9]])).logits
    torch.testing.assert_close(found["exact"], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    distance = float((found["logits"] - expected).norm() / expected.norm())
    assert 0.001 < distance < 0.2  # of inputs that are rounded to 8 bits
