# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in 4 bits, packed as GPTQ and AWQ save them; rounded to the nearest, without calibration."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP_SIZE = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns is in which four bits, lowest first."""


def save_gptq(plain: Path, folder: Path) -> None:
    """Symmetric: 8 is zero, and is saved as 7."""
    tensors = {}
    for name, weight in _linear_layers(plain).items():  # [out, in]
        grouped = weight.unflatten(1, (-1, GROUP_SIZE))
        scales = (grouped.abs().amax(2, keepdim=True) / 7).half()
        tensors[f"{name}.qweight"] = _pack((grouped / scales).round().add(8).flatten(1), range(8)).T
        tensors[f"{name}.qzeros"] = _pack(torch.full_like(scales[..., 0].T, 7), range(8))
        tensors[f"{name}.scales"] = scales[..., 0].T
        tensors[f"{name}.g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP_SIZE
    # One kernel for every machine: the others are compiled when they are first used.
    _save(plain, folder, tensors, quant_method="gptq", sym=True, desc_act=False, backend="torch")


def save_awq(plain: Path, folder: Path) -> None:
    """Each group has a zero of its own."""
    tensors = {}
    for name, weight in _linear_layers(plain).items():
        grouped = weight.unflatten(1, (-1, GROUP_SIZE))
        low, high = grouped.aminmax(dim=2, keepdim=True)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round()
        values = ((grouped / scales).round() + zeros).clamp(0, 15).flatten(1)
        tensors[f"{name}.qweight"] = _pack(values.T, AWQ_ORDER)
        tensors[f"{name}.qzeros"] = _pack(zeros[..., 0].T, AWQ_ORDER)
        tensors[f"{name}.scales"] = scales[..., 0].T
    _save(plain, folder, tensors, quant_method="awq", zero_point=True, version="gemm", backend="torch_awq")


def _linear_layers(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint / "model.safetensors")
    return {name.removesuffix(".weight"): tensors[name] for name in tensors if name.endswith("_proj.weight")}


def _pack(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Numbers below 16, `[rows, 8 * columns]`, as int32 `[rows, columns]`."""
    eight = values.to(torch.int64).unflatten(1, (-1, 8))[..., list(order)]
    return (eight << torch.arange(0, 32, 4)).sum(2).to(torch.int32)


def _save(plain: Path, folder: Path, packed: dict[str, torch.Tensor], **config: object) -> None:
    shutil.copytree(plain, folder)
    layers = _linear_layers(plain)
    tensors = load_file(plain / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in layers}
    contiguous = {name: tensor.contiguous() for name, tensor in packed.items()}
    save_file(kept | contiguous, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    quantization = {"bits": 4, "group_size": GROUP_SIZE, **config}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
