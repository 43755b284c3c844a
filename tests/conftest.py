# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: no Hub settings of the developer, a temporary cache, model folders."""

import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.paths import ROOT

# Two workers with two OpenMP threads each would wait for one another at every barrier. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Beside a gateway's thread, gRPC's handlers of a fork crash one in a hundred new processes. Read when grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

FOREIGN = ("HF_", "TRANSFORMERS_", "HUGGING_FACE_", "HUGGINGFACE", "PRIVATE_REPO_TOKEN", "XDG_CACHE_HOME")
SHARED_SERVER = re.compile(r"^(?:def test|    ).*\b(standard|triton|agents): \w", flags=re.MULTILINE)
"""A test's argument: a server that several modules share (tests/server/conftest.py, tests/openai/conftest.py)."""


class ServerScheduling(LoadScopeScheduling):
    """One worker runs the tests of a module, and the modules that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid.partition("::")[0])


@functools.cache
def _scope(path: str) -> str:
    shared = SHARED_SERVER.search((ROOT / path).read_text(encoding="utf-8"))
    return f"the server {shared[1]}" if shared else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ServerScheduling:
    """Called by pytest-xdist, whose groups of tests (`--dist loadgroup`) are of no effect with pytest 9.2."""
    return ServerScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the developer's Hub settings from the environment, and move `HF_HOME` to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(FOREIGN):
                patch.delenv(name)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield


@pytest.fixture(scope="session")
def make_folder() -> Callable[..., Path]:
    """Make a model folder: `make_folder(repository, "mine", huggingface_model=..., config="max_batch_size: 8")`."""

    def make(repository: Path, name: str, *, config: str = "", **settings: object) -> Path:
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        shutil.copy(ROOT / "falcon7b" / "1" / "model.py", folder / "1" / "model.py")
        lines = ['backend: "python"', config]
        for key, value in settings.items():
            text = str(value).replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}')
        (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")
        return folder

    return make
