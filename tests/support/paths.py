# SPDX-License-Identifier: Apache-2.0
"""Paths in the repository, and its scripts as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
TORCHVISION = Path(sys.prefix) / "torchvision"
"""On sys.path it is torchvision that fits this environment's torch, for image processors alone (Makefile). A
model's process has it by a line in its folder's `1/model.py`: `sys.path.append(...)`."""
PACKAGES = ("hf_triton", "hf_triton_gateway", "hf_triton_cli")


def sources() -> list[Path]:
    """Every module of the packages."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
