# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: no Hub settings of the developer, a temporary cache, model folders."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Two workers with two OpenMP threads each would wait for one another at every barrier. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FOREIGN = ("HF_", "TRANSFORMERS_", "HUGGING_FACE_", "HUGGINGFACE", "PRIVATE_REPO_TOKEN", "XDG_CACHE_HOME")
SERVERS = ("standard", "triton", "agents")
"""Fixtures of servers that several modules share."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one worker run the tests of a module, and those of a shared server."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        group = next((name for name in SERVERS if name in names), item.location[0])
        item.add_marker(pytest.mark.xdist_group(group))


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
