# SPDX-License-Identifier: Apache-2.0
"""Folders that are not to be trusted."""

from pathlib import Path


def shadow_modules(folder: Path) -> None:
    """Write modules that fail, by names that ours import early: of the library, of packages, of a model folder."""
    for name in ("hf_triton", "h2", "json", "model", "numpy", "pydantic", "torch"):
        (folder / f"{name}.py").write_text("raise ImportError('code of the current folder ran')")
