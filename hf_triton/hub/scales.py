# SPDX-License-Identifier: Apache-2.0
"""FP8 weights with a scale for each block, and MXFP4: whether each weight has its scales, and how they are undone.

transformers widens a weight without scales as if they were 1, and takes equal parts of a weight for its blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError, clip
from hf_triton.hub.sizes import read_safetensors_header
from hf_triton.hub.snapshot import weight_files
from hf_triton.settings import ModelSettings

BLOCK: Final = (128, 128)
"""The blocks where a config does not say."""


def check_scales(folder: Path, quantization: Mapping[str, Any], settings: ModelSettings) -> None:
    """Refuse weights without scales, or with scales for other blocks, by name. Headers are read, and no weights."""
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size", BLOCK)
    if method not in ("fp8", "mxfp4"):
        return
    is_block = isinstance(block, list | tuple) and len(block) == 2
    if block and not (is_block and all(type(size) is int and size > 0 for size in block)):
        raise CheckpointError(
            "checkpoint_invalid",
            f"weight_block_size in config.json of {settings.huggingface_model} must be two integers > 0, got "
            f"{clip(block)}: correct it, or choose another revision",
        )
    names = weight_files(folder, os.listdir(folder), settings.allow_pickle)
    files = [folder / name for name in names if name.endswith(".safetensors") and (folder / name).exists()]
    tensors = {name: tensor for file in files for name, tensor in read_safetensors_header(file).items()}
    for name, tensor in tensors.items():
        if method == "mxfp4" and name.endswith("_blocks"):
            wanted = [f"{name.removesuffix('_blocks')}_scales"]
        elif method == "fp8" and tensor["dtype"].startswith("F8_E4M3"):
            stem = name.removesuffix(".weight")
            wanted = [f"{name}_scale_inv", f"{stem}.scale", f"{stem}.qscale_weight"]
            is_table = any(stem.endswith(each) for each in quantization.get("modules_to_convert") or ())
            wanted += [f"{name}_scale"] if stem == name or is_table else []
        else:
            continue
        scales = next((tensors[each]["shape"] for each in wanted if each in tensors), None)
        if scales is None:
            raise CheckpointError(
                "weights_mismatch",
                f"{name} of {settings.huggingface_model} has no scales ({wanted[0]}), without which its numbers are "
                "not those of the model: fetch the whole checkpoint again, or choose another revision",
            )
        shape = tensor["shape"]
        if method == "fp8" and block and len(shape) > 1 and set(scales) - {1}:
            grid = [*shape[:-2], *_grid(shape, block)]
            if scales != grid:
                raise CheckpointError(
                    "weights_mismatch",
                    f"{name} of {settings.huggingface_model} is {shape} and has {scales} scales, against {grid} by "
                    f"weight_block_size {list(block)}: correct it in config.json, or choose another revision",
                )


def _grid(shape: Any, block: Any) -> list[int]:
    """Blocks of a weight, the last of which may be cut."""
    return [-(-size // of) for size, of in zip(shape[-2:], block, strict=True)]


@contextmanager
def whole_blocks(quantization: Mapping[str, Any]) -> Iterator[None]:
    """Have transformers widen FP8 by the blocks of the config where a weight's edge cuts the last.

    Of 192 rows in blocks of 128 it takes 96 and 96, and it refuses 576.
    """
    if quantization.get("quant_method") != "fp8":
        yield
        return
    import torch
    from torch.nn import functional
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    plain: Any = Fp8Dequantize._dequantize_one

    def undo(self: Any, weight: Any, scales: Any, output_dtype: Any = None) -> Any:
        block, shape = self.hf_quantizer.quantization_config.weight_block_size, weight.shape
        is_blocks = block is not None and weight.dtype == torch.float8_e4m3fn and scales.ndim > 1
        if not is_blocks or list(scales.shape[-2:]) != _grid(shape, block):
            return plain(self, weight, scales, output_dtype)
        padding = 0, -shape[-1] % block[1], 0, -shape[-2] % block[0]
        whole = functional.pad(weight.view(torch.uint8), padding).view(weight.dtype) if any(padding) else weight
        return plain(self, whole, scales, output_dtype)[..., : shape[-2], : shape[-1]].contiguous()

    Fp8Dequantize._dequantize_one = undo  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = plain  # type: ignore[method-assign]
