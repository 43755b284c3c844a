# SPDX-License-Identifier: Apache-2.0
"""Whether a device has the kernels in Triton's language: the log says why not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_triton.runner.cuda import attention, fused_operations, kernel_cache
from hf_triton.sampling import draw

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    attention.is_usable.cache_clear()
    kernel_cache.have_kernel_cache.cache_clear()
    yield
    attention.is_usable.cache_clear()
    kernel_cache.have_kernel_cache.cache_clear()


@pytest.mark.parametrize("name", ["attend", "attend_packed"])
def test_what_agrees_is_used(name: str) -> None:
    assert attention.is_usable(name, CPU, torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'triton'"), "ModuleNotFoundError: No module named 'triton'"),
        (RuntimeError("Failed to find C compiler."), "RuntimeError: Failed to find C compiler."),
        (
            subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]),
            "/usr/bin/gcc failed: the headers of C or of Python, Python.h, may be missing",
        ),
        (ValueError("ptxas\n\tfatal: sm_50"), "ValueError: ptxas fatal: sm_50"),
    ],
)
def test_the_log_says_why_there_is_no_kernel(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(attention, "attend", fail)
    assert not any(attention.is_usable("attend", CPU, torch.float32, 64) for _ in range(2))
    (message,) = caplog.messages
    assert message == f"no attention kernel on cpu ({reason}): attention of heads of 64 is torch's, slower"


@pytest.mark.parametrize("name", ["attend", "attend_packed"])
def test_a_kernel_whose_large_tiles_find_no_room_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operation = getattr(attention, name)

    def run(query: torch.Tensor, *others: object) -> torch.Tensor:
        if len(query) > 512:  # as on a T4, whose tensors of a small tile find room
            raise RuntimeError("out of resource: shared memory")
        output: torch.Tensor = operation(query, *others)
        return output

    monkeypatch.setattr(attention, name, run)
    assert not attention.is_usable(name, CPU, torch.float16, 128)
    assert "out of resource: shared memory" in caplog.text


def test_a_wrong_kernel_and_large_heads_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "attend_packed", lambda query, *_: torch.zeros_like(query))
    assert not attention.is_usable("attend_packed", CPU, torch.float32, 64)
    assert not attention.is_usable("attend", CPU, torch.float32, 257)
    assert "(it is wrong)" in caplog.messages[0]
    assert "(it has 256 numbers of a head at most)" in caplog.messages[1]


def test_the_other_kernels_say_what_is_missing_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"])

    monkeypatch.setattr(fused_operations, "rotary", fail)
    monkeypatch.setattr(draw, "draw", fail)
    assert not fused_operations.is_usable(CPU, torch.float64)
    assert not draw.is_usable(CPU, torch.float64, 7)
    assert all("(/usr/bin/gcc failed: the headers of C or of Python" in message for message in caplog.messages)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("is_writable", [True, False])
def test_kernels_are_kept_in_a_writable_folder(
    is_writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()  # root may write to every folder, but not below a file
    folder = str(tmp_path / ("cache" if is_writable else "file") / "triton")
    knobs = SimpleNamespace(cache=SimpleNamespace(dir=folder))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kernel_cache.have_kernel_cache()
    assert Path(knobs.cache.dir).is_dir()
    assert (knobs.cache.dir == folder) == is_writable
    assert is_writable or f"{folder} is not writable" in caplog.text


def test_torch_compile_sees_one_operation() -> None:
    def doubled(*arguments: object) -> torch.Tensor:
        return 2 * attention.attend(*arguments)  # type: ignore[arg-type]

    arguments = attention._paged_trial(torch.float32, 64, 20)
    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), doubled(*arguments))
