# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: no Hub settings of the developer, a temporary cache, model folders."""

import functools
import gc
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.paths import ROOT, TORCHVISION

# Two workers with two OpenMP threads each would wait for one another at every barrier. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Beside a gateway's thread, gRPC's handlers of a fork crash one in a hundred new processes. Read when grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Processors with a video part need torchvision; found before transformers is imported, or not at all.
if TORCHVISION.is_dir():
    sys.path.append(str(TORCHVISION))

FOREIGN = ("HF_", "TRANSFORMERS_", "HUGGING_FACE_", "HUGGINGFACE", "PRIVATE_REPO_TOKEN", "XDG_CACHE_HOME")
SHARED_SERVERS = {
    "tests/openai": ({"triton", "gateway", "client", "agents", "openai_agent", "responses", "messages"}, {"encoders"}),
    "tests/server": ({"standard"},),
}
"""Folders whose modules share servers, each with the fixtures of its conftest that start them, by the worker."""
LONGEST = ("deploy", "server", "openai", "docs", "cli", "gpu", "models", "engine", "encoder", "tasks", "unit")
FOLDERS = {f"tests/{name}": turn for turn, name in enumerate(LONGEST)}
"""Folders, those with the longest modules first: the short ones fill the workers at the end."""
TAKING = re.compile(r"^(?:@pytest\.fixture.*\n(?:@.*\n)*def \w+|def test_\w+)\(([^)]*)\)", flags=re.MULTILINE)
ARGUMENT = re.compile(r"\b(\w+): \w")
FIXTURE = re.compile(r"^def (\w+)\(", flags=re.MULTILINE)


class ServerScheduling(LoadScopeScheduling):
    """One worker runs the tests of a module, and the modules that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid.partition("::")[0])


@functools.cache
def _scope(path: str) -> str:
    folder = path.rpartition("/")[0]
    if folder not in SHARED_SERVERS:
        return path
    text = (ROOT / path).read_text(encoding="utf-8")
    taken = {name for arguments in TAKING.findall(text) for name in ARGUMENT.findall(arguments)}
    taken -= set(FIXTURE.findall(text))  # the module's own
    shared = (f"{folder}, {min(fixtures)}" for fixtures in SHARED_SERVERS[folder] if taken & fixtures)
    return next(shared, path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let begin first what takes longest, so that the workers end together."""

    def turn(item: pytest.Item) -> int:
        scope = _scope(item.nodeid.partition("::")[0])
        return FOLDERS.get(scope.rpartition("/")[0], len(FOLDERS)) if scope.endswith(".py") else -1

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what the test modules import, some million objects, out of the garbage collections of imports and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module that the marks asked for (`-m`) leave without a test: all imports together take ten seconds."""
    marks = config.getoption("markexpr")
    if collection_path.is_dir() and collection_path.parent.name == "tests" and marks.startswith("serial"):
        modules = collection_path.glob("test_*.py")
        return None if any("mark.serial" in module.read_text(encoding="utf-8") for module in modules) else True
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    is_full = re.search(r"^pytestmark = (?:\[\s*)?pytest\.mark\.full\b", text, flags=re.MULTILINE)
    is_without = ("not full" in marks and is_full) or (marks.startswith("serial") and "mark.serial" not in text)
    return True if is_without else None


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
