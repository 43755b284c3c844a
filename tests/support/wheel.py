# SPDX-License-Identifier: Apache-2.0
"""The wheel, built from a copy of the repository, and an environment with it in which nothing of the repository is."""

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

from tests.support.paths import PACKAGES, ROOT

SOURCES = (*PACKAGES, "stream_door", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build the wheel into a folder by its build backend, which pip takes from an index."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source)
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", folder, source, **environment)
    [wheel] = folder.glob("hf_triton-*.whl")
    return wheel


def install_wheel(environment: Path, wheel: Path) -> None:
    """Install a wheel alone in an environment; its dependencies are those of this process."""
    pip(str(environment / "bin" / "python"), "install", "--no-deps", wheel)
    [packages] = environment.glob("lib/python*/site-packages")
    # As a plain path it adds the packages, and not the repository, which an editable installation adds by a file.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))


def pip(python: str, *arguments: str | Path, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, *arguments, "--quiet"]
    done = subprocess.run(command, env=clean_environment() | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def clean_environment() -> dict[str, str]:
    """This process's variables without those that would let Python find the repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
