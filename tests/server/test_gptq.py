# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of GPTQ and AWQ on a real server, with gptqmodel in a folder of its own beside the other packages."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import generate
from tests.support.clients import CLIENTS, has, run
from tests.support.packed import save_awq, save_gptq
from tests.support.paths import ROOT

pytestmark = pytest.mark.full

PACKAGES = CLIENTS / "gptq"
PROMPT = "Where does the river go?"
SAVE = {"gptq": save_gptq, "awq": save_awq}
REFERENCE = """
import json, sys
from pathlib import Path
from tests.support.reference import load_reference
print(json.dumps([load_reference(Path(folder)).text(sys.argv[1], 8) for folder in sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    has(PACKAGES / "gptqmodel", "test-gptq")
    root = tmp_path_factory.mktemp("packed")
    plain = build_tiny_checkpoint(root / "plain")
    for method, save in SAVE.items():
        save(plain, root / method)
    return {name: root / name for name in ("plain", *SAVE)}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By folder, what transformers generates, in a process that finds the packages."""
    command = [sys.executable, "-c", REFERENCE, PROMPT, *map(str, checkpoints.values())]
    paths = os.pathsep.join([str(PACKAGES), str(ROOT)])
    printed = run(command, tmp_path_factory.mktemp("reference"), PYTHONPATH=paths)
    return dict(zip(checkpoints, json.loads(printed.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for method in SAVE:
        code = make_folder(repository, method, huggingface_model=checkpoints[method]) / "1" / "model.py"
        code.write_text(f"import sys\n\nsys.path.append({str(PACKAGES)!r})\n{code.read_text()}")
    with TritonServer(repository) as running:
        yield running


@pytest.mark.parametrize("method", SAVE)
def test_completion_equals_that_of_transformers(server: TritonServer, expected: dict[str, str], method: str) -> None:
    assert expected[method] != expected["plain"]
    answer = generate(server, method, PROMPT, max_new_tokens=8).json()
    assert answer.get("text_output") == expected[method], answer
    assert "engine batch" not in server.read_log()
