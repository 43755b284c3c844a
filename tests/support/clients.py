# SPDX-License-Identifier: Apache-2.0
"""Clients with an environment of their own under .venv/, which `make test-clients` and others make."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CLIENTS = ROOT / ".venv"


def has(program: Path, target: str = "test-clients") -> Path:
    """What `make TARGET` installs; skip the test if it is not there, or fail if REQUIRE_CLIENTS is set."""
    if not program.exists():
        assert not os.environ.get("REQUIRE_CLIENTS"), f"{program} is missing"
        pytest.skip(f"{program.relative_to(ROOT)} is not installed: run `make {target}`")
    return program


def run(command: list[str], folder: Path, *, timeout_s: float = 240, **environment: str) -> str:
    """What a client prints; it runs in `folder`, without a proxy."""
    direct = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    direct["PWD"] = str(folder)  # as a shell's `cd` does; some clients work there
    done = subprocess.run(
        command,
        cwd=folder,
        env=direct | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
