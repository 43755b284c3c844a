# SPDX-License-Identifier: Apache-2.0
"""Packed linear layers: a packed model generates what the plain one generates, or it is restored."""

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from hf_triton.runner.cpu import layer_packing, layer_timing, linear, linear_kernel
from hf_triton.runner.cpu.layer_packing import pack
from hf_triton.runner.cpu.linear import PackedLinear
from hf_triton.runner.model_comparison import Verdict
from hf_triton.testing import ARCHITECTURES, build_tiny_checkpoint
from tests.support.architectures import BASE, BATCH, CONTINUOUS, WHOLE, build, requests, some_in_make_test
from tests.support.engine import Client, check, start_engine
from tests.support.marks import full
from tests.support.reference import load_reference, solo_ids

NUM_REQUESTS = 10
READS_ITS_WEIGHTS = ("mamba", "falcon-mamba", "jamba", "longcat", "reformer")
PROMPT = [7, 11, 13, 200, 5]


def load(name: str, folder: Path) -> Any:
    if name in CONTINUOUS | WHOLE | BATCH:
        return build(*(CONTINUOUS | WHOLE | BATCH)[name])
    build_tiny_checkpoint(folder, name, eos_token_id=None)
    return load_reference(folder).model


def llama(**options: Any) -> Any:
    return build("LlamaConfig", BASE | options)


def linear_layers(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, Conv1D, FalconLinear, NonDynamicallyQuantizableLinear)
    return [name for name, module in model.named_modules() if type(module) in kinds]


def packed_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters(remove_duplicate=False)}


@pytest.mark.full
@pytest.mark.parametrize("name", some_in_make_test([*CONTINUOUS, *WHOLE, *BATCH, *ARCHITECTURES]))
def test_packed_model_generates_what_the_plain_one_generates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MIN_INPUTS", 0)
    plain, packed, source = load(name, tmp_path / "a"), load(name, tmp_path / "b"), random.Random(name)
    layers = linear_layers(packed)
    count = pack(packed)
    assert count == len(packed_layers(packed))
    if name not in READS_ITS_WEIGHTS:
        assert packed_layers(packed) == layers
        assert count
    engine = start_engine(packed, max_num_seqs=5, context_length=256)
    try:
        check(plain, Client(engine), requests(NUM_REQUESTS, source), lambda: None)
    finally:
        engine.close()


WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "vocab_size": 320}


@pytest.mark.skipif(not linear_kernel.can_run(torch.float32), reason="there is no kernel for this processor")
@pytest.mark.parametrize("name", ["cohere", "smollm3", *full("mistral-window", "olmo2", "stablelm")])
def test_model_with_a_kernel_for_every_layer_generates_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_INPUTS", 0)
    config, options = CONTINUOUS[name]
    plain, packed = (build(config, options | WIDE) for _ in range(2))
    pack(packed)
    layers = [module for module in packed.modules() if isinstance(module, PackedLinear)]
    assert layers
    assert all(layer.kernel for layer in layers)
    engine = start_engine(packed, max_num_seqs=9, context_length=256)
    try:
        check(plain, Client(engine), requests(NUM_REQUESTS, random.Random(name)), lambda: None)
    finally:
        engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_logits_equal_plain_ones_up_to_rounding(dtype: torch.dtype) -> None:
    plain, packed = llama().to(dtype), llama().to(dtype)
    exact = llama().double()(torch.tensor([PROMPT])).logits
    if not pack(packed):
        pytest.skip(f"this processor does not compute with {dtype}")
    with torch.inference_mode():
        strays = [(model(torch.tensor([PROMPT])).logits - exact).abs().max() for model in (plain, packed)]
    assert strays[1] < 2 * strays[0]


def test_packed_layer_with_bias_and_any_number_of_dimensions() -> None:
    model = llama(attention_bias=True, mlp_bias=True)
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(2, 3, 7, BASE["hidden_size"])
    nn.init.normal_(layer.bias)
    wanted = functional.linear(x, layer.weight, layer.bias)
    pack(model)
    assert isinstance(layer, PackedLinear)
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(layer(x.transpose(0, 2)), wanted.transpose(0, 2))


@pytest.mark.parametrize("count", [0, 1, 16, 17, 64, 65, 255, 256, 257, 300, 1000])
def test_packed_layer_with_any_number_of_rows(count: int) -> None:
    model = llama(mlp_bias=True)
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(count, BASE["hidden_size"])
    nn.init.normal_(layer.bias)
    wanted = functional.linear(x, layer.weight, layer.bias)
    pack(model)
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(layer(x[None]), wanted[None])


MEMORY = """
import psutil, torch
from torch import nn
from hf_triton.runner.cpu.linear import PackedLinear

layer = nn.Linear(256, 256)
layer.weight = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None), requires_grad=False)
layer.__class__ = PackedLinear
with torch.inference_mode():
    layer(torch.randn(1000, 256))
    before = psutil.Process().memory_info().rss
    for count in range(1, 1000):
        layer(torch.randn(count, 256))
    print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.full
def test_memory_does_not_grow_with_every_number_of_rows() -> None:
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 64 << 20


def test_packed_weights_replace_the_plain_ones() -> None:
    model = llama()
    pack(model)
    assert all(model.get_submodule(name).weight.is_mkldnn for name in packed_layers(model))  # nothing else has them
    assert not model.get_input_embeddings().weight.is_mkldnn


def test_tied_embedding_keeps_its_weights() -> None:
    model = llama(tie_word_embeddings=True)
    embedding = model.get_input_embeddings()
    before = embedding.weight.detach().clone()
    pack(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(embedding.weight, before)


def test_subclass_that_computes_something_else_is_not_packed() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    plain, model = llama(), llama()
    for each in (plain, model):
        each.model.layers[1].mlp.down_proj.__class__ = Doubling
    layers = linear_layers(model)
    assert pack(model) == len(layers)
    assert packed_layers(model) == layers
    assert type(model.model.layers[1].mlp.down_proj) is Doubling
    assert solo_ids(model, PROMPT, 8) == solo_ids(plain, PROMPT, 8)


def test_quantized_weights_are_not_packed() -> None:
    class Quantized(torch.Tensor):
        pass

    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized), requires_grad=False)
    assert pack(model) == len(linear_layers(llama())) - 1
    assert type(layer) is nn.Linear
    assert isinstance(layer.weight, Quantized)


@pytest.mark.parametrize("is_tied", [False, True])
def test_model_that_reads_its_weights_is_restored(is_tied: bool) -> None:
    class Looking(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(x, self.layer.weight.t())

    model = llama(tie_word_embeddings=is_tied)
    before, written = weights(model), solo_ids(model, PROMPT, 8)
    model.lm_head = Looking(model.lm_head)
    assert pack(model) == 0
    model.lm_head = model.lm_head.layer
    after = weights(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert type(model.lm_head) is nn.Linear
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_tied
    assert solo_ids(model, PROMPT, 8) == written


def test_conv1d_of_gpt2_is_restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = load("gpt2", tmp_path)
    before, written = weights(model), solo_ids(model, PROMPT, 8)
    monkeypatch.setattr(layer_packing.Comparison, "judge", lambda *_: Verdict(is_right=False, text="much"))
    assert pack(model) == 0
    after = weights(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert solo_ids(model, PROMPT, 8) == written


def seconds(*ways: tuple[float, float, float]) -> dict[tuple[Any, str, int], float]:
    names = ("torch", "onednn", "kernel")
    return {
        ("shape", name, num_rows): time_s
        for name, times in zip(names, ways, strict=False)
        for num_rows, time_s in zip((1, 4, 16), times, strict=True)
    }


@pytest.mark.parametrize(
    ("ways", "is_packed", "kernel_rows"),
    [
        ([(2, 3, 4), (1, 2, 3)], True, []),
        ([(2, 3, 4), (2.2, 1, 1)], False, []),  # slower for a lone sequence
        ([(2, 3, 4), (2, 3, 4)], False, []),  # not worth the memory
        ([(2, 3, 4), (2.2, 2, 3), (1, 1, 1)], True, range(1, 65)),
        ([(2, 3, 4), (2.2, 2, 3), (1, 1, 4)], True, range(1, 9)),
        ([(2, 3, 4), (1, 2, 3), (2, 1, 1)], True, range(3, 65)),
    ],
)
def test_the_fastest_way_of_a_layer_is_chosen(
    ways: list[tuple[float, float, float]], is_packed: bool, kernel_rows: Sequence[int]
) -> None:
    assert layer_timing.choose("shape", seconds(*ways)) == layer_timing.Choice(is_packed, frozenset(kernel_rows))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_packed", [False, True])
def test_auto_packs_the_shapes_that_are_faster_packed(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    heads = layer_timing.shape_of(model.lm_head)
    assert pack(model, "auto") == 0, "so few weights are not timed"
    monkeypatch.setattr(layer_packing, "MIN_BYTES", 0)
    monkeypatch.setattr(
        layer_timing, "choose", lambda shape, _: layer_timing.Choice(is_packed and shape == heads, frozenset())
    )
    with caplog.at_level("INFO"):
        assert pack(model, "auto") == is_packed
    assert packed_layers(model) == ["lm_head"] * is_packed
    (record,) = caplog.records
    assert f"{int(is_packed)} of 15 linear layers packed for oneDNN" in record.getMessage()
    assert "chosen by timing" in record.getMessage()


def test_model_on_several_devices_is_not_packed() -> None:
    model = llama()
    model.lm_head.to("meta")
    assert pack(model) == 0
    assert not packed_layers(model)
