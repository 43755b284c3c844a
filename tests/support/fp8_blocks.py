# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in blocks of FP8, as DeepSeek and Qwen publish them, and a kernel of the Hub for them, in PyTorch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = (128, 128)
LARGEST = torch.finfo(torch.float8_e4m3fn).max
KERNEL = "kernels-community/finegrained-fp8"
STAND_IN = """
import importlib.metadata, importlib.util, sys
from pathlib import Path

class CUDAProperties: pass
class Device: pass
class KernelizeFallback: pass
class LayerRepository: pass
class LocalLayerRepository: pass
class Mode: pass
class ROCMProperties: pass

def use_kernel_forward_from_hub(name):
    return lambda cls: cls

def use_kernelized_func(*functions):
    return lambda cls: cls

def register_kernel_mapping(*args, **kwargs): pass
replace_kernel_forward_from_hub = use_kernel_mapping = kernelize = register_kernel_mapping

def get_kernel(name, revision=None, version=None, **kwargs):
    from huggingface_hub import snapshot_download
    return get_local_kernel(Path(snapshot_download(name, repo_type="kernel", revision=revision or f"v{version}")))

def get_local_kernel(folder):
    [file] = Path(folder).glob("build/torch-cuda/__init__.py")
    spec = importlib.util.spec_from_file_location("pulled_kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
"""What transformers imports of the package kernels, whose `get_kernel` fetches as that does."""
IN_PYTORCH = """
import torch

def matmul_2d(states, weight, scales, block, dtype, activation_scale=None):
    shape, (rows, columns) = states.shape, weight.shape
    states = states.reshape(-1, columns).float()
    parts = list(states.split(block[1], -1))
    for i, part in enumerate(parts):  # a scale for each row and block, as the real one has
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        parts[i] = (part / scale).to(torch.float8_e4m3fn).float() * scale
    whole = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    product = torch.cat(parts, -1) @ (weight.float() * whole).T
    return product.to(dtype).reshape(*shape[:-1], rows)

def matmul_batched(*args, **kwargs):
    raise NotImplementedError

matmul_grouped = matmul_batched
"""


def widen(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    whole = weight.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            rows = slice(row * block[0], (row + 1) * block[0])
            columns = slice(column * block[1], (column + 1) * block[1])
            whole[rows, columns] *= scales[row, column].float()
    return whole


def narrow(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in FP8 and the scales of its blocks, the last of which are cut."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    narrowed = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])
            own = weight[part].float()
            scales[row, column] = own.abs().max() / LARGEST
            narrowed[part] = (own / scales[row, column]).to(torch.float8_e4m3fn)
    return narrowed, scales


def quantize(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint's linear layers in blocks of FP8; returns what its tensors are when they are widened."""
    tensors, stored, widened = load_file(folder / "model.safetensors"), {}, {}
    for index, (name, tensor) in enumerate(tensors.items()):
        tensor = tensor.bfloat16()
        if tensor.ndim == 2 and "proj" in name:
            tensor[: len(tensor) // 3] *= 2 + index % 5  # scales that differ
            weight, scales = narrow(tensor)
            stored |= {name: weight, f"{name}_scale_inv": scales}
            tensor = widen(weight, scales).bfloat16()
        else:
            stored[name] = tensor
        widened[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype="bfloat16", quantization_config=CONFIG)
    return widened


CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def write_stand_in(folder: Path) -> None:
    """The package kernels, to be put on the path: a version that transformers takes."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "__init__.py").write_text(STAND_IN)
    about = folder / "kernels-0.18.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    (about / "RECORD").write_text("kernels/__init__.py,,\n")


def write_kernel(folder: Path, code: str = IN_PYTORCH) -> Path:
    """A kernel's repository: a build for any PyTorch, and one for another processor."""
    for build in ("torch-cuda", "torch213-cxx11-cu130-riscv64-linux"):
        (folder / "build" / build).mkdir(parents=True)
        (folder / "build" / build / "__init__.py").write_text(code)
        (folder / "build" / build / "metadata.json").write_text("{}")
    return folder
