# SPDX-License-Identifier: Apache-2.0
"""The kernel of linear layers: a few rows times packed weights, beside the same in 64 bits."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_triton.runner import cpu
from hf_triton.runner.cpu import linear, linear_kernel, llvm
from hf_triton.runner.cpu.layer_packing import pack
from hf_triton.runner.cpu.linear import MAX_ROWS, LinearKernel, PackedLinear
from tests.support.architectures import BASE, build

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if linear_kernel.can_run(dtype)]
COUNTS = [*range(1, 26), 31, 48, 63, MAX_ROWS]
SHAPES = [(64, 256), (128, 288), (192, 1408), (64, 4096), (1024, 512)]

pytestmark = pytest.mark.skipif(not DTYPES, reason="there is no kernel for this processor")


def packed(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    plain = torch.randn(outputs, inputs).to(dtype)
    return plain, torch.ops.mkldnn._reorder_linear_weight(plain, None)


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    layer = PackedLinear.of(weight, bias)
    layer.kernel = LinearKernel(layer.weight)
    assert is_for_kernel(layer, x)
    product: torch.Tensor = layer(x)
    return product


def is_for_kernel(layer: PackedLinear, x: torch.Tensor) -> bool:
    """Whether the kernel computes a layer's outputs for an input."""
    kernel, calls = layer.kernel, []
    assert kernel
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run", "parallel") if kernel.parallel else ("run",):
            patch.setattr(kernel, name, lambda *_: calls.append(0))
        with contextlib.suppress(RuntimeError):  # oneDNN's
            layer(x)
    return bool(calls)


def has_kernel(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    layer = PackedLinear.of(weight, bias)
    layer.use_kernel()
    return layer.kernel is not None


@pytest.fixture
def wide_layer() -> Any:
    model = build("LlamaConfig", BASE | {"hidden_size": 64, "intermediate_size": 256, "mlp_bias": True})
    nn.init.normal_(model.model.layers[0].mlp.down_proj.bias)
    pack(model)
    return model.model.layers[0].mlp.down_proj


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@torch.inference_mode()
def test_kernel_computes_the_product(outputs: int, inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain, weight = packed(outputs, inputs, dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    before = None if bias is None else bias.clone()
    assert has_kernel(weight, bias)
    for count in COUNTS:
        x = torch.randn(count, inputs).to(dtype)
        exact = functional.linear(x.double(), plain.double(), None if bias is None else bias.double())
        found = multiply(x, weight, bias)
        assert found.dtype is dtype
        stray = (found.double() - exact).abs().max() / exact.abs().max()
        assert stray < (1e-5 if dtype is torch.float32 else 2**-8), count
    assert bias is None or torch.equal(bias, before)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_is_independent_of_other_rows_and_of_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight = packed(1024, 544, dtype)
    bias, x = torch.randn(1024).to(dtype), torch.randn(MAX_ROWS, 544).to(dtype)
    alone = torch.cat([multiply(each[None], weight, bias) for each in x])
    for num_threads in (1, 2, 3, 7, 40):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        for count in COUNTS:
            assert torch.equal(multiply(x[:count], weight, bias), alone[:count])


@torch.inference_mode()
def test_kernel_runs_in_one_thread_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, weight = packed(1024, 512, torch.float32)
    x = torch.randn(9, 512)
    monkeypatch.setattr(llvm, "openmp_parallel", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.testing.assert_close(multiply(x, weight, None), x @ plain.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.inference_mode()
def test_kernel_ignores_torchs_default_dtype(dtype: torch.dtype) -> None:
    """transformers changes it for all threads while it loads a model."""
    plain, weight = packed(1024, 512, torch.float32)
    x = torch.randn(9, 512)
    torch.set_default_dtype(dtype)
    try:
        found = multiply(x, weight, None)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, x @ plain.T, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_nan_and_inf_stay_in_their_row() -> None:
    plain, weight = packed(64, 256, torch.float32)
    x = torch.randn(8, 256)
    x[2, 5], x[3, 7] = float("nan"), float("inf")
    torch.testing.assert_close(multiply(x, weight, None), x @ plain.T, atol=1e-4, rtol=1e-4, equal_nan=True)


@torch.inference_mode()
def test_rows_of_any_memory_layout(wide_layer: PackedLinear) -> None:
    weight = wide_layer.weight.to_dense()
    for x in (torch.randn(2, 3, 256), torch.randn(3, 256, 2).mT, torch.randn(256, 5).T, torch.randn(4, 1024)[:, ::4]):
        assert is_for_kernel(wide_layer, x)
        wanted = functional.linear(x, weight, wide_layer.bias)
        torch.testing.assert_close(wide_layer(x), wanted, atol=1e-5, rtol=1e-5)


def test_other_inputs_are_left_to_onednn(wide_layer: PackedLinear) -> None:
    torch.manual_seed(0)
    weight, x = wide_layer.weight.to_dense(), torch.randn(3, 256)
    assert not is_for_kernel(wide_layer, x)
    torch.testing.assert_close(wide_layer(x), functional.linear(x, weight, wide_layer.bias))  # may be for training
    with torch.inference_mode():
        for other in (torch.randn(MAX_ROWS + 1, 256), torch.randn(0, 256), torch._neg_view(x)):
            assert not is_for_kernel(wide_layer, other)
            wanted = functional.linear(other, weight, wide_layer.bias)
            torch.testing.assert_close(wide_layer(other), wanted, atol=1e-5, rtol=1e-5)
        others = x.double(), x.to("meta"), nn.Parameter(x, requires_grad=False), torch._efficientzerotensor((3, 256))
        assert not any(is_for_kernel(wide_layer, other) for other in others)
        for shape in ((3, 255), (3, 512), (1, 2560)):
            with pytest.raises(RuntimeError):
                wide_layer(torch.randn(shape))
        wide_layer.weight = nn.Parameter(packed(64, 256, torch.float32)[1], requires_grad=False)
        wanted = functional.linear(x, wide_layer.weight.to_dense(), wide_layer.bias)
        torch.testing.assert_close(wide_layer(x), wanted, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_compiled_layer_computes_the_same(wide_layer: PackedLinear) -> None:
    x = torch.randn(3, 256)
    compiled = torch.compile(wide_layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wide_layer(x))


@pytest.mark.parametrize(("outputs", "inputs"), [(100, 256), (65, 512), (64, 258), (64, 255), (64, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_weights_without_whole_blocks_have_no_kernel(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    _, weight = packed(outputs, inputs, dtype)
    assert not has_kernel(weight)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("name", "module", "says"),
    [
        ("llvm", None, "pip install 'hf-triton[cpu]'"),
        ("linear_kernel", SimpleNamespace(can_run=lambda _: True), "ImportError"),
        ("linear_kernel", SimpleNamespace(can_run=lambda _: False), None),
    ],
)
@torch.inference_mode()
def test_without_a_kernel_onednn_computes(
    name: str, module: Any, says: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """numba is missing, or fails, or the processor has no kernel."""
    monkeypatch.setitem(sys.modules, f"hf_triton.runner.cpu.{name}", module)
    if module is None:
        monkeypatch.delattr(cpu, name)
    else:
        monkeypatch.setattr(cpu, name, module)
    _, weight = packed(64, 256, torch.float32)
    assert not has_kernel(weight)
    assert not has_kernel(weight)
    assert [says in record.getMessage() for record in caplog.records] == ([True] if says else [])


def test_kernels_by_processor_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "has", lambda _: True)
    assert linear_kernel.can_run(torch.float32)
    assert not linear_kernel.can_run(torch.bfloat16)
    monkeypatch.setattr(llvm, "has", lambda feature: not feature.startswith("amx"))
    assert linear_kernel.can_run(torch.bfloat16)
    assert not linear_kernel.can_run(torch.float16)
    monkeypatch.setattr(llvm, "has", lambda feature: feature in ("avx2", "fma"))
    assert linear_kernel.can_run(torch.float32)
    assert not linear_kernel.can_run(torch.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("variable", ["NUMBA_ENABLE_AVX=0", "NUMBA_CPU_NAME=generic", "NUMBA_CPU_FEATURES=-avx512f"])
def test_no_kernel_if_numba_is_configured_for_less(variable: str) -> None:
    """LLVM ends the process otherwise."""
    name, value = variable.split("=")
    program = (
        "import torch; from hf_triton.runner.cpu import linear_kernel as k; print(any(map(k.can_run, k.FEATURES)))"
    )
    environment = os.environ | {name: value}
    output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert output.stdout.strip() == "False", output.stderr


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [256, 512, 4096])
@torch.inference_mode()
def test_another_weight_layout_is_noticed(inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight = packed(64, inputs, dtype)
    assert has_kernel(weight)
    plain = PackedLinear.forward

    def swapped(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))

    monkeypatch.setattr(PackedLinear, "forward", swapped)
    assert not has_kernel(weight)
    assert not linear.is_right(dtype)


@pytest.mark.usefixtures("anew")
@torch.inference_mode()
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain = PackedLinear.forward

    def wrong(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        result = plain(self, x)
        return torch.cat([result[:1], torch.zeros_like(result[1:])])

    monkeypatch.setattr(PackedLinear, "forward", wrong)
    _, weight = packed(64, 256, torch.float32)
    assert not has_kernel(weight)
    (record,) = caplog.records
    assert "wrong result" in record.getMessage()


AVX2 = """
import os
from llvmlite.binding import get_host_cpu_features

features = get_host_cpu_features().items()
os.environ["NUMBA_CPU_NAME"] = "haswell"
os.environ["NUMBA_CPU_FEATURES"] = ",".join(
    ("+" if has and not name.startswith("avx512") else "-") + name for name, has in features
)
from hf_triton.runner.cpu import llvm

llvm.has = lambda feature: feature in ("avx2", "fma")
import torch
from hf_triton.runner.cpu import linear

print(linear.has_kernel(torch.float32))
"""


@pytest.mark.full
@pytest.mark.skipif(not llvm.has("fma"), reason="this processor has no AVX2")
def test_kernel_of_avx2_computes_the_product() -> None:
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    output = subprocess.run([sys.executable, "-c", AVX2], env=environment, capture_output=True, text=True)
    assert output.stdout.strip() == "True", output.stderr
