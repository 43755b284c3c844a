# SPDX-License-Identifier: Apache-2.0
"""The budget of key/value tokens, and the free memory behind it, read from process and control group files."""

import os
import time
from pathlib import Path

import pytest
import torch

from hf_triton.runner import budget
from hf_triton.runner.budget import HOST_FRACTION, FreeMemory, TokenBudget
from tests.support.machine import MIB, Machine

CPU = torch.device("cpu")


def free_mib(machine: Machine) -> float:
    return FreeMemory(machine.proc).of(CPU) / MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.set_available(1000)
    return machine


def test_without_cgroups_available_memory_is_free(machine: Machine) -> None:
    assert free_mib(machine) == 1000


@pytest.mark.parametrize(
    ("numbers", "free"),
    [
        ({"limit": 700, "used": 200}, 500),
        ({"limit": 7000, "used": 200}, 1000),  # as much as the machine has
        ({"limit": 700, "used": 690, "inactive_file": 300}, 310),
        ({"limit": 700, "used": 200, "high": 400}, 200),
        ({"limit": 100, "used": 130}, 0),
    ],
    ids=str,
)
def test_a_cgroups_limit_less_its_use_is_free(machine: Machine, numbers: dict[str, int], free: int) -> None:
    machine.mount_v2()
    machine.set_group("0::/a")
    machine.v2("a", **numbers)
    assert free_mib(machine) == free


@pytest.mark.parametrize(
    ("outer", "middle", "inner", "free"),
    [(None, 900, 600, 590), (900, 300, None, 270), (400, None, None, 350), (None, None, None, 1000)],
)
def test_the_smallest_limit_up_to_the_root_wins(
    machine: Machine, outer: int | None, middle: int | None, inner: int | None, free: int
) -> None:
    machine.mount_v2()
    machine.set_group("0::/outer/middle/inner")
    machine.v2("outer/middle/inner", inner, used=10)
    machine.v2("outer/middle", middle, used=30)
    machine.v2("outer", outer, used=50)
    machine.v2("elsewhere", 20, used=19)
    assert free_mib(machine) == free


@pytest.mark.parametrize("path", ["/", "/docker/0a1b", "/../../system.slice/docker-0a1b.scope", "/not/there"])
def test_a_namespace_and_a_host_path_have_the_limit_of_the_mounts_root(machine: Machine, path: str) -> None:
    machine.mount_v2()
    machine.set_group(f"0::{path}")
    machine.v2("", limit=512, used=12)
    assert free_mib(machine) == 500


@pytest.mark.parametrize(("path", "free"), [("/docker/0a", 500), ("/docker/0a/inner", 100), ("/docker/0a1b", 500)])
def test_mount_of_a_part_of_the_cgroups(machine: Machine, path: str, free: int) -> None:
    machine.mount_v1(root="/docker/0a")
    machine.set_group("9:name=systemd:/docker/0a", f"4:memory:{path}", "0::/")
    machine.v1("", limit=512, used=12)
    machine.v1("inner", limit=150, used=50)
    machine.v1("1b", limit=9, used=1)
    assert free_mib(machine) == free


def test_cgroup_v1_nests_too(machine: Machine) -> None:
    machine.mount_v1()
    machine.set_group("5:cpu,cpuacct:/elsewhere", "4:hugetlb,memory:/outer/inner")
    machine.v1("outer/inner", limit=None, used=100)
    machine.v1("outer", limit=400, used=350, inactive_file=25)
    machine.v1("elsewhere", limit=2, used=1)
    assert free_mib(machine) == 75


def test_both_cgroup_versions_side_by_side(machine: Machine, tmp_path: Path) -> None:
    machine.mount_v1()
    machine.set_group("4:memory:/a", "0::/a")
    machine.v1("a", limit=600, used=100)
    unified = tmp_path / "unified"
    (unified / "a").mkdir(parents=True)
    with (machine.proc / "self" / "mountinfo").open("a") as file:
        file.write(f"41 31 0:38 / {unified} rw,relatime - cgroup2 cgroup2 rw\n")
    assert free_mib(machine) == 500


def test_without_proc_all_host_memory_is_free(tmp_path: Path) -> None:
    assert FreeMemory(tmp_path).of(CPU) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_this_machine_has_some_memory_free() -> None:
    assert 0 < FreeMemory().of(CPU) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torchs_reserve_on_a_cuda_device_counts_as_free() -> None:
    device, free = torch.device("cuda", 0), FreeMemory()
    before = free.of(device)
    block = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    with_block = free.of(device)
    del block
    assert torch.cuda.memory_reserved(device) >= 256 * MIB
    assert with_block <= before - 200 * MIB
    assert free.of(device) >= with_block + 256 * MIB - 8 * MIB


class Pool:
    """Memory that several budgets draw on."""

    def __init__(self, size: int) -> None:
        self.free = size

    def read(self, _: torch.device) -> int:
        return self.free


@pytest.fixture
def read_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "READ_INTERVAL_S", 0.0)


def test_max_tokens_is_fixed() -> None:
    fixed = TokenBudget({CPU: 10**15}, 4096)
    assert [fixed.tokens(held) for held in (0, 5000)] == [4096, 4096]
    assert fixed.most == 4096


def test_budget_is_a_part_of_free_memory() -> None:
    allowed = TokenBudget({CPU: 300}, None, lambda _: 300_000)
    assert allowed.most == allowed.tokens(0) == 1000 * HOST_FRACTION


@pytest.mark.usefixtures("read_always")
def test_one_engine_stops_at_its_part_of_memory() -> None:
    pool = Pool(1_000_000)
    alone, held = TokenBudget({CPU: 100}, None, pool.read), 0
    while held < alone.tokens(held):
        held, pool.free = held + 1, pool.free - 100
    assert held == alone.most == 8000


@pytest.mark.usefixtures("read_always")
def test_several_engines_share_memory() -> None:
    pool = Pool(1_000_000)
    budgets, held = [TokenBudget({CPU: 100}, None, pool.read) for _ in range(3)], [0, 0, 0]
    while any(each.tokens(count) > count for each, count in zip(budgets, held, strict=True)):
        for index, each in enumerate(budgets):
            if each.tokens(held[index]) > held[index]:
                held[index], pool.free = held[index] + 1, pool.free - 100
    assert max(held) - min(held) <= 1
    assert pool.free > 0
    budgets_of_two = budgets[:2]
    pool.free += held.pop() * 100  # one leaves, and its part is there for the others
    assert all(each.tokens(count) > count for each, count in zip(budgets_of_two, held, strict=True))


@pytest.mark.usefixtures("read_always")
def test_budget_shrinks_when_others_take_memory() -> None:
    pool = Pool(1_000_000)
    allowed = TokenBudget({CPU: 100}, None, pool.read)
    pool.free = 0
    assert allowed.tokens(8000) == 6400
    assert allowed.most == 8000


def test_free_memory_is_read_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "READ_INTERVAL_S", 3600.0)
    prefill_requests = iter([1_000_000, 500_000])
    allowed = TokenBudget({CPU: 100}, None, lambda _: next(prefill_requests))
    assert [allowed.tokens(held) for held in (0, 1000, 3000)] == [4000, 4000, 4000]


def test_free_memory_is_read_again() -> None:
    prefill_requests = iter([1_000_000, 500_000, 200_000])
    allowed = TokenBudget({CPU: 100}, None, lambda _: next(prefill_requests))
    assert allowed.tokens(0) == 4000
    time.sleep(2 * budget.READ_INTERVAL_S)
    assert allowed.tokens(0) == 1600


def test_real_budget_is_within_the_devices_memory() -> None:
    allowed = TokenBudget({CPU: MIB}, None)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < allowed.tokens(0) * MIB <= total * HOST_FRACTION


@pytest.mark.parametrize(
    ("bytes_per_token", "tokens", "words"),
    [
        (1, 12, "12 tokens (12 bytes)"),
        (1024, 3, "3 tokens (3.0 KiB)"),
        (1_044_381, 1234, "1,234 tokens (1.2 GiB)"),
        (512 * 1024, 1_000_000, "1,000,000 tokens (488.3 GiB)"),
        (512 * 1024, 1 << 33, "8,589,934,592 tokens (4096.0 TiB)"),
    ],
)
def test_tokens_in_words(bytes_per_token: int, tokens: int, words: str) -> None:
    assert TokenBudget({CPU: bytes_per_token}, 1).words(tokens) == words
