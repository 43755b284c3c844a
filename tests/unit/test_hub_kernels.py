# SPDX-License-Identifier: Apache-2.0
"""Kernels of the Hub: which a method needs, where they are found, and lock files that are damaged."""

import hashlib
import json
import platform
from pathlib import Path

import pytest
from transformers.integrations import hub_kernels

from hf_triton.errors import CheckpointError
from hf_triton.hub.kernels import (
    LOCK,
    find_kernels,
    find_pulled,
    fitting_builds,
    kernel_cache,
    quantization_of,
    read_lock,
    write_lock,
)
from hf_triton.hub.snapshot import unchecked_mark
from tests.support.fp8_blocks import KERNEL
from tests.support.hub import COMMIT

CODE = b"answer = 42\n"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A pulled kernel in the cache `tmp_path`, as the Hub's client writes it."""
    repository = tmp_path / "kernels--kernels-community--finegrained-fp8"
    name = hashlib.sha1(b"blob %d\0" % len(CODE) + CODE).hexdigest()
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / name).write_bytes(CODE)
    folder = repository / "snapshots" / COMMIT
    (folder / "build" / "torch-cuda").mkdir(parents=True)
    (folder / "build" / "torch-cuda" / "__init__.py").symlink_to(repository / "blobs" / name)
    write_lock(tmp_path, {KERNEL: COMMIT})
    return folder


def test_transformers_names_the_kernels() -> None:
    before = hub_kernels.get_kernel
    [fp8], [mxfp4] = find_kernels("fp8"), find_kernels("mxfp4")
    assert (fp8.name, fp8.revision) == (KERNEL, "v4")
    assert (mxfp4.name, mxfp4.revision) == ("kernels-community/gpt-oss-triton-kernels", "v1")
    assert hub_kernels.get_kernel is before
    assert find_kernels("gptq") == find_kernels(None) == []


def test_a_whole_kernel_is_found_at_its_locked_commit(snapshot: Path, tmp_path: Path) -> None:
    assert find_pulled(KERNEL, tmp_path) == snapshot
    assert find_pulled("kernels-community/other", tmp_path) is None
    write_lock(tmp_path, {KERNEL: COMMIT[::-1]})
    assert find_pulled(KERNEL, tmp_path) is None
    (tmp_path / LOCK).unlink()
    assert find_pulled(KERNEL, tmp_path) is None


def test_a_kernel_for_another_machine_is_not_found(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "build" / "torch-cuda").rename(snapshot / "build" / "torch213-cxx11-cu130-riscv64-linux")
    assert find_pulled(KERNEL, tmp_path) is None


def test_half_a_kernel_is_not_found(snapshot: Path, tmp_path: Path) -> None:
    mark = unchecked_mark(snapshot, "build/torch-cuda/other.py")  # a pull that was stopped
    mark.parent.mkdir(parents=True)
    mark.write_text("")
    assert find_pulled(KERNEL, tmp_path) is None


def test_an_altered_kernel_is_not_found(snapshot: Path, tmp_path: Path) -> None:
    file = snapshot / "build" / "torch-cuda" / "__init__.py"
    file.resolve().write_bytes(CODE.replace(b"42", b"43"))
    assert find_pulled(KERNEL, tmp_path) is None
    file.resolve().unlink()
    assert find_pulled(KERNEL, tmp_path) is None


LOCKS = ("", "{", "[]", '{"a/b": 1}', f'{{"a/b": {10**39}}}', '{"a/b": "main"}', '{"a/b": null}', "\xff", "[" * 9999)


@pytest.mark.parametrize("text", LOCKS)
def test_a_damaged_lock_file_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as error:
        read_lock(tmp_path)
    assert error.value.sentence.startswith(f"{tmp_path / LOCK} is damaged: it must be a JSON object")
    assert "or remove it and run `hf-triton pull --kernels MODEL`" in error.value.sentence


def test_builds_for_this_machine_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_triton.hub.kernels.version", lambda _: "2.13.0+cu130")
    own = platform.machine()
    wanted = [
        "build/torch-cuda/__init__.py",
        "build/torch-universal/x/y.py",
        f"build/torch213-cxx11-cu130-{own}-linux/_ops.abi3.so",
        f"build/torch-stable-abi29-cu128-{own}-linux/a.py",
    ]
    others = [
        "README.md",
        "build/torch-rocm/__init__.py",
        f"build/torch212-cxx11-cu130-{own}-linux/a.py",
        f"build/torch213-cxx11-rocm71-{own}-linux/a.py",
        "build/torch213-cxx11-cu130-riscv64-linux/a.py",
        f"build/torch213-cu130-{own}-windows/a.py",
        "src/build/torch-cuda/a.py",
    ]
    assert fitting_builds(wanted + others) == wanted


def test_the_cache_is_that_of_the_package() -> None:
    assert kernel_cache({"KERNELS_CACHE": "/k", "HF_HUB_CACHE": "/h", "HF_HOME": "/x"}) == Path("/k")
    assert kernel_cache({"HF_HUB_CACHE": "/h", "HF_HOME": "/x"}) == Path("/h")
    assert kernel_cache({"HF_HOME": "/x", "XDG_CACHE_HOME": "/y"}) == Path("/x/hub")
    assert kernel_cache({}) == Path("~/.cache/huggingface/hub").expanduser()


def test_the_quantisation_of_a_part_counts() -> None:
    own = {"quant_method": "fp8"}
    assert quantization_of({"text_config": {"quantization_config": own}}) == own
    assert quantization_of({"quantization_config": own, "text_config": None}) == own
    assert quantization_of({"quantization_config": None}) == {}


def test_a_lock_file_is_json(tmp_path: Path) -> None:
    write_lock(tmp_path, {"b/c": COMMIT, "a/b": COMMIT})
    assert list(json.loads((tmp_path / LOCK).read_text())) == ["a/b", "b/c"]
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
