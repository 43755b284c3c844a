# SPDX-License-Identifier: Apache-2.0
"""Programs that tests/server/programs.sh lays into .venv/programs, or that the machine has."""

import os
import shutil

import pytest

from tests.support.paths import ROOT

PROGRAMS = ROOT / ".venv" / "programs"
PATH = os.pathsep.join([str(PROGRAMS / "bin"), os.environ["PATH"]])
ENVIRONMENT = {**os.environ, "PATH": PATH, "LD_LIBRARY_PATH": str(PROGRAMS / "lib")}


def program(name: str) -> str:
    """The path of a program; skip the test if it is not there."""
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"there is no {name} (make test brings it where there is apt-get)")
    return found
