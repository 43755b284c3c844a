# SPDX-License-Identifier: Apache-2.0
"""Damages checkpoints on purpose, for tests of error messages.

Each function edits the files in place: pass a copy. The tensor functions take a checkpoint folder with safetensors
weights, sharded or not; the byte functions take any file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    _Tensors = dict[str, torch.Tensor]


def drop_tensor(folder: Path, name: str) -> None:
    """Remove a tensor from the safetensors weights, as in an incomplete conversion.

    Raises:
        KeyError: The checkpoint has no tensor of this name.
    """
    _edit_weights(folder, name, lambda tensors: tensors.pop(name))


def add_tensor(folder: Path, name: str, shape: tuple[int, ...] = (4,)) -> None:
    """Add a float32 tensor of ones that the architecture does not have, to the first weight file."""
    import torch

    _edit_weights(folder, None, lambda tensors: tensors.update({name: torch.ones(shape)}))


def reshape_tensor(folder: Path, name: str) -> None:
    """Cut the last row off a tensor, so that its shape `[n, ...]` becomes `[n - 1, ...]`.

    Raises:
        KeyError: The checkpoint has no tensor of this name.
    """
    _edit_weights(folder, name, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))


def flip_bit(path: Path, offset_bytes: int | None = None) -> None:
    """Invert the lowest bit of one byte in place; the file keeps its size.

    Args:
        path: Any non-empty file.
        offset_bytes: Which byte; by default the one in the middle, which lies in a weight file's tensor data.
    """
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset_bytes is None else offset_bytes] ^= 1
    path.write_bytes(content)


def truncate(path: Path, keep_bytes: int | None = None) -> None:
    """Cut a file short in place, as an interrupted copy does; by default to half its size."""
    size_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size_bytes // 2 if keep_bytes is None else keep_bytes)


def _edit_weights(folder: Path, name: str | None, change: Callable[[_Tensors], object]) -> None:
    """Rewrite the weight file that holds a tensor (the first file when `name` is None), and the shard index."""
    from safetensors.torch import load_file, save_file

    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else None
    if index is None:
        file_name = "model.safetensors"
    else:
        file_name = index["weight_map"][name] if name is not None else min(index["weight_map"].values())
    tensors = load_file(folder / file_name)
    change(tensors)
    save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if index is not None:
        others = {key: file for key, file in index["weight_map"].items() if file != file_name}
        index["weight_map"] = others | dict.fromkeys(tensors, file_name)
        index_path.write_text(json.dumps(index, indent=2))
