# SPDX-License-Identifier: Apache-2.0
"""Files that cannot be read to an end are never waited for, nor read."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_triton.errors import LoadError
from hf_triton.files import read_bytes, read_json
from hf_triton.hub.kind import find_task
from hf_triton.hub.locate import Hub
from hf_triton.settings import ModelSettings
from tests.support.hub import build_hub, write_snapshot

KINDS = ("FIFO", "socket", "device", "link to a FIFO", "link to a device")


@pytest.fixture(params=KINDS)
def irregular(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    file, kind = tmp_path / "file", request.param
    if kind.endswith("device"):
        file.symlink_to("/dev/zero")
    elif kind == "FIFO":
        os.mkfifo(file)
    elif kind == "link to a FIFO":
        os.mkfifo(tmp_path / "fifo")
        file.symlink_to(tmp_path / "fifo")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(file))
            yield file
            return
    yield file


def test_what_is_not_regular_is_not_read(irregular: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(irregular)


def test_reading_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text("{}")
    assert read_json(file) == {}
    assert read_bytes(file, 2) == b"{}"
    with pytest.raises(ValueError, match=r"file\.json has more than 1 bytes"):
        read_bytes(file, 1)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(ValueError, match="has more bytes than its size says"):
        read_bytes(Path("/proc/self/status"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_checkpoint_with_such_a_file_is_refused(irregular: Path, tmp_path: Path, name: str, is_cached: bool) -> None:
    folder = write_snapshot(tmp_path / "home" / "hub")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(irregular)
    settings = {} if is_cached else {"huggingface_model": str(folder)}
    with pytest.raises(LoadError, match=rf"{name} is a link to a (FIFO|socket|device), and no file of a checkpoint"):
        build_hub(tmp_path, **settings).resolve_model()
    find_task(folder)  # when the folder's inputs are declared, before that


def test_a_cache_s_own_links_are_followed(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "home" / "hub")
    blob = folder.parents[1] / "blobs" / ("0" * 40)
    blob.parent.mkdir()
    (folder / "config.json").rename(blob)
    (folder / "config.json").symlink_to(os.path.relpath(blob, folder))
    assert build_hub(tmp_path).resolve_model() == folder


def test_a_config_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "home" / "hub")
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(LoadError, match=r"tokenizer\.json is larger than the 256 MiB that are read"):
        Hub(tmp_path, ModelSettings(huggingface_model=str(folder)), {}).resolve_model()
