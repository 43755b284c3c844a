# SPDX-License-Identifier: Apache-2.0
"""What shows that sentence-transformers wrote a checkpoint. All that reads its files is imported where one is there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

MODULES: Final = "modules.json"
GENERAL: Final = "config_sentence_transformers.json"
CROSS_ENCODER: Final = "CrossEncoder"
SPARSE_ENCODER: Final = "SparseEncoder"
SPARSE_LINEAR: Final = ("sparse_linear.safetensors", "sparse_linear.pt")


def sparse_linear_file(folder: Path) -> Path | None:
    """The layer that weighs a text's own tokens, of models such as bge-m3; None if there is none."""
    return next((folder / name for name in SPARSE_LINEAR if (folder / name).exists()), None)


def files_of_modules(folder: Path, available: Collection[str], *, allow_pickle: bool, needs_weights: bool) -> list[str]:
    """Names of the files that modules.json needs, see `module_files`; none if there is no modules.json."""
    if not (folder / MODULES).exists():
        return []
    from hf_triton.hub.sentence_modules import module_files

    return module_files(folder, available, allow_pickle=allow_pickle, needs_weights=needs_weights)
