# SPDX-License-Identifier: Apache-2.0
"""How many threads a model computes with: within its control groups' quota, shared with other busy models."""

import fcntl
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

from hf_triton.runner.cgroups import core_quota
from hf_triton.runner.cpu import threads
from hf_triton.runner.cpu.threads import Neighbours, SharedCores
from hf_triton.runner.device import DeviceContext
from tests.support.machine import Machine

OTHER = """
import sys
from pathlib import Path
from hf_triton.runner.cpu import threads
threads.SHARED = Path(sys.argv[1])
threads.available_cores = lambda: [0, 1, 2, 3]
other = threads.Neighbours()
for line in sys.stdin:
    getattr(other, line.strip())()
    print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def four_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "SHARED", tmp_path)
    monkeypatch.setattr(threads, "available_cores", lambda: [0, 1, 2, 3])
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Other:
    def __init__(self, folder: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", OTHER, str(folder)], stdin=pipe, stdout=pipe, text=True)

    def do(self, what: str) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def start_other(tmp_path: Path) -> Iterator[Callable[[], Other]]:
    others: list[Other] = []

    def start() -> Other:
        others.append(Other(tmp_path))
        return others[-1]

    yield start
    for other in others:
        with other.process as process:
            process.kill()


@contextmanager
def fcntl_calls() -> Iterator[list[object]]:
    calls: list[object] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call" and argument is fcntl.fcntl:
            calls.append(argument)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


# --- control groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "num"),
    [
        ("max 100000", math.inf),
        ("200000 100000", 2),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("7200 1200", 6),
        ("", math.inf),
        ("150000", math.inf),
        ("150000 0", math.inf),
        ("150000 x", math.inf),
    ],
)
def test_core_quota_of_cgroup_v2(tmp_path: Path, limit: str, num: float) -> None:
    machine = Machine(tmp_path)
    machine.mount_v2()
    machine.set_group("0::/a")
    machine.write("a", {"cpu.max": limit})
    assert core_quota(machine.proc) == num


@pytest.mark.parametrize(("quota", "num"), [(-1, math.inf), (200000, 2), (1000, 1), (1600000, 16)])
def test_core_quota_of_cgroup_v1(tmp_path: Path, quota: int, num: float) -> None:
    machine = Machine(tmp_path)
    machine.mount_v1(controllers="cpu,cpuacct")
    machine.set_group("5:cpu,cpuacct:/a", "4:memory:/other")
    machine.write("a", {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100000})
    machine.write("other", {"cpu.cfs_quota_us": 1000, "cpu.cfs_period_us": 100000})
    assert core_quota(machine.proc) == num


def test_the_smallest_quota_wins(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mount_v2()
    machine.set_group("0::/outer/inner")
    machine.write("outer", {"cpu.max": "300000 100000"})
    machine.write("outer/inner", {"cpu.max": "800000 100000"})
    assert core_quota(machine.proc) == 3


def test_mount_names_of_any_bytes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with (machine.proc / "self" / "mountinfo").open("wb") as file:
        file.write(b"24 1 0:22 / /caf\xe9\x0c\x85\xe2\x80\xa8 rw - tmpfs none rw\n\njunk\n")
    machine.mount_v2()
    machine.set_group("junk", "0::/\udce9")
    machine.write("\udce9", {"cpu.max": "200000 100000"})
    assert core_quota(machine.proc) == 2


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert math.isinf(core_quota(tmp_path))


@pytest.mark.parametrize(("given", "num"), [(None, 2), ("4", 4), ("", 2), ("0", 2), ("all", 2)])
def test_quota_limits_threads_unless_omp_num_threads_is_set(
    given: str | None, num: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "core_quota", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    with caplog.at_level("INFO"), SharedCores():
        assert torch.get_num_threads() == num
    assert torch.get_num_threads() == num
    assert [record.getMessage() for record in caplog.records] == (
        [] if num == 4 else ["computing with 2 threads: the control group allows no more cores"]
    )


# --- neighbours -------------------------------------------------------------------------------------------------------


def test_busy_processes_are_counted_until_they_end(start_other: Callable[[], Other]) -> None:
    own, first, second = Neighbours(), start_other(), start_other()
    assert own.enter()
    assert not own.enter()
    assert own.count() == 0
    first.do("enter")
    second.do("enter")
    assert own.count() == 2
    second.do("leave")
    assert own.count() == 1
    own.leave()
    assert own.count() == 1
    first.process.kill()
    first.process.wait()
    assert own.count() == 0


def test_more_busy_models_than_slots_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "NUM_SLOTS", 2)
    models = [Neighbours() for _ in range(4)]
    assert [model.enter() for model in models] == [True] * 4
    assert [model.count() for model in models] == [1, 1, 2, 2]
    for model in models:
        model.leave()
    assert [model.count() for model in models] == [0] * 4


def test_counting_takes_a_few_system_calls_in_whatever_order_models_became_busy() -> None:
    source, models, own = random.Random(0), [Neighbours() for _ in range(8)], Neighbours()
    busy: set[Neighbours] = set()
    own.enter()
    for model in source.choices(models, k=100):
        if model in busy:
            model.leave()
        else:
            model.enter()
        busy ^= {model}
        with fcntl_calls() as calls:
            assert own.count() == len(busy)
        assert 1 <= len(calls) <= 2 * len(busy) + 1


def next_num_threads(cores: SharedCores) -> int:
    """Torch's threads in the first step after the time within which changes are noticed."""
    time.sleep(threads.LOOK_INTERVAL_S)
    cores.take()
    return torch.get_num_threads()


def test_cores_are_shared_among_busy_models(start_other: Callable[[], Other]) -> None:
    others, own = [start_other() for _ in range(5)], SharedCores()
    seen = []
    for other in others:
        seen.append(next_num_threads(own))
        other.do("enter")
    assert [*seen, next_num_threads(own)] == [4, 2, 1, 1, 1, 1]
    for other in others[1:]:
        other.do("leave")
    assert next_num_threads(own) == 2
    others[0].do("leave")
    assert next_num_threads(own) == 4


def test_a_busy_model_looks_now_and_then_and_an_idle_one_as_it_becomes_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LOOK_INTERVAL_S", math.inf)
    own, other = SharedCores(), Neighbours()
    own.take()
    other.enter()
    with fcntl_calls() as calls:
        own.take()
    assert not calls
    assert torch.get_num_threads() == 4
    own.leave()
    own.take()
    assert torch.get_num_threads() == 2


def test_fewer_threads_than_the_share_stay(start_other: Callable[[], Other]) -> None:
    torch.set_num_threads(2)
    own, other = SharedCores(), start_other()
    other.do("enter")
    own.take()
    assert torch.get_num_threads() == 2


def test_threads_are_restored_afterwards(start_other: Callable[[], Other]) -> None:
    other = start_other()
    other.do("enter")
    with SharedCores():
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4
    assert Neighbours().count() == 1


def test_model_on_a_gpu_takes_no_cores(start_other: Callable[[], Other]) -> None:
    other = start_other()
    other.do("enter")
    with DeviceContext(torch.device("meta")):
        assert torch.get_num_threads() == 4
        assert Neighbours().count() == 1


def test_models_on_other_cores_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Neighbours()
    here.enter()
    assert Neighbours().count() == 1
    monkeypatch.setattr(threads, "available_cores", lambda: [4, 5])
    assert Neighbours().count() == 0


@pytest.mark.parametrize("obstacle", ["no_folder", "link", "pipe", "no_locks"])
def test_without_the_file_a_model_uses_all_cores(
    obstacle: str,
    tmp_path: Path,
    start_other: Callable[[], Other],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = start_other()
    other.do("enter")
    path = next(tmp_path.iterdir())
    if obstacle == "no_folder":
        monkeypatch.setattr(threads, "SHARED", tmp_path / "nowhere")
    elif obstacle == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif obstacle == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        monkeypatch.setattr(threads.fcntl, "F_OFD_GETLK", 9999)
    own = SharedCores()
    for _ in range(3):
        own.take()
        own.leave()
    assert torch.get_num_threads() == 4
    assert len([record for record in caplog.records if "do not share the cores" in record.getMessage()]) == 1
