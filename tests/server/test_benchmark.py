# SPDX-License-Identifier: Apache-2.0
"""A short soak runs to its end; the other benchmarks of servers are started in tests/models/test_benchmarks.py."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.full
def test_short_soak() -> None:
    options = ["--requests", "1000", "--samples", "4", "--allowed-kib", str(64 << 10)]
    soak = [sys.executable, ROOT / "benchmarks" / "soak.py", *options]
    run = subprocess.run(soak, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
