# SPDX-License-Identifier: Apache-2.0
"""The simulated device refuses what a CUDA device refuses."""

import threading

import pytest
import torch
from transformers.integrations import moe

from tests.support.simulated_gpu import HAS_GPU, Device, OnDevice, simulated_gpus

pytestmark = pytest.mark.skipif(HAS_GPU, reason="there is a real device")
SYNCHRONIZING = "called a synchronizing CUDA operation"
CAPTURING = "not permitted when stream is capturing"


@pytest.fixture
def numbers() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).to("cuda")


def test_numbers_come_back(numbers: torch.Tensor) -> None:
    assert numbers.is_cuda
    assert numbers.device == torch.device("cuda", 0)
    assert (numbers[1] * 2).tolist() == [6, 8, 10]
    numbers[:, 1:] = numbers[:, :2].clone()
    assert numbers.cpu().tolist() == [[0, 0, 1], [3, 3, 4]]
    assert torch.nn.Linear(3, 4).to("cuda")(numbers).shape == (2, 4)


def test_simulation_ends_with_its_context() -> None:
    with simulated_gpus():
        assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2, "that of the fixture"


def test_threads_have_the_simulated_device(numbers: torch.Tensor) -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(float((numbers + torch.ones(3, device="cuda")).sum())))
    thread.start()
    thread.join()
    assert found == [21.0]


def test_each_thread_has_a_current_device() -> None:
    places: list[int | None] = []
    torch.cuda.set_device(1)
    thread = threading.Thread(target=lambda: places.append(torch.zeros(1, device="cuda").device.index))
    thread.start()
    thread.join()
    assert [*places, torch.zeros(1, device="cuda").device.index] == [0, 1]
    torch.cuda.set_device(0)


def test_memory_is_that_of_the_living_tensors(numbers: torch.Tensor) -> None:
    before, (free, total) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info(0)
    assert free == total - before == total - numbers.nbytes
    large = torch.empty(total // 8, dtype=torch.float32, device="cuda")
    view = large[:4]
    assert torch.cuda.memory_allocated(1) == 0
    assert torch.cuda.mem_get_info()[0] == free - large.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total // 4, dtype=torch.float16, device="cuda")
    del large
    assert torch.cuda.memory_allocated() > before, "a view holds it"
    del view
    assert torch.cuda.memory_allocated() == before


def test_devices_do_not_mix(numbers: torch.Tensor) -> None:
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            numbers + other
    assert (numbers + torch.tensor(1.0))[0, 0] == 1, "a single number of the host may"
    assert torch.empty(2, 3, device="cuda:1").copy_(numbers).tolist() == numbers.tolist(), "a copy may"
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        numbers.numpy()


def test_synchronizing_operations_raise(numbers: torch.Tensor) -> None:
    waiting = (
        numbers.tolist,
        numbers.sum().item,
        numbers.cpu,
        numbers.nonzero,
        lambda: bool(numbers.any()),
        lambda: numbers[numbers > 1],
        lambda: numbers.clone().index_put_((numbers > 1,), numbers.view(-1)[2:]),
        lambda: numbers[[1]],
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to("cuda", non_blocking=True),  # from memory that is not pinned
        lambda: torch.tensor([1, 2], device="cuda"),
        torch.cuda.synchronize,
    )
    for wait in waiting:
        wait()
    torch.cuda.set_sync_debug_mode("error")
    for wait in waiting:
        with pytest.raises(RuntimeError, match=SYNCHRONIZING):
            wait()
    index = torch.tensor([1], pin_memory=True).to("cuda", non_blocking=True)
    assert numbers[index].shape == (1, 3)
    assert torch.where(numbers > 1, numbers, 0).argmax(-1).is_cuda
    numbers[numbers > 1] = 0  # a fill by a mask is no index


def test_a_copy_that_does_not_wait_is_there_behind_its_event(numbers: torch.Tensor) -> None:
    copy = torch.empty(numbers.shape, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    late = numbers.to("cpu", non_blocking=True)
    assert copy.isnan().all()
    event.synchronize()
    assert copy.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert late.isnan().all()
    torch.cuda.synchronize()
    assert late.tolist() == copy.tolist()


def test_host_memory_changed_during_a_copy_raises() -> None:
    pinned = torch.zeros(2).pin_memory()
    pinned.to("cuda", non_blocking=True)
    pinned[0] = 1
    with pytest.raises(AssertionError, match="written to while it was copied"):
        torch.cuda.synchronize()


def test_graph_replays_what_was_captured(numbers: torch.Tensor) -> None:
    graph, factor, total = torch.cuda.CUDAGraph(), 2, torch.zeros(2, 3, device="cuda")
    with torch.cuda.graph(graph):
        product = numbers * factor + torch.ones(3, device="cuda")
        total += product
    assert not total.any(), "nothing runs while it is captured"
    assert product.isnan().all()
    graph.replay()
    assert product.tolist() == [[1, 3, 5], [7, 9, 11]]
    numbers.zero_()
    factor = 100
    graph.replay()
    assert product.eq(1).all(), f"it reads the device's numbers anew, and not the host's, which is {factor} now"
    assert total.tolist() == [[2, 4, 6], [8, 10, 12]]


def test_a_graph_waits_for_nothing(numbers: torch.Tensor) -> None:
    for wait in (
        numbers.tolist,
        lambda: numbers[[1]],
        lambda: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
    ):
        with pytest.raises(RuntimeError, match=CAPTURING), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait()
    assert isinstance(numbers + 1, OnDevice)


@pytest.mark.parametrize(
    ("dtype", "capability", "waits"),
    [
        *[(torch.bfloat16, capability, False) for capability in ((9, 0), (10, 0), (10, 3))],
        *[(torch.bfloat16, capability, True) for capability in ((7, 5), (8, 0), (8, 9), (12, 0))],
        *[(dtype, (9, 0), True) for dtype in (torch.float16, torch.float32)],
    ],
)
def test_a_grouped_product_waits_but_in_bfloat16_on_some_gpus(
    dtype: torch.dtype, capability: tuple[int, int], waits: bool, simulated: Device
) -> None:
    simulated.capability = capability
    rows, weights = torch.ones(6, 16, dtype=dtype, device="cuda"), torch.ones(3, 16, 8, dtype=dtype, device="cuda")
    ends = torch.arange(2, 7, 2, dtype=torch.int32).to("cuda")
    assert moe._grouped_mm(rows, weights, ends).eq(16).all()
    if not waits:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            product = moe._grouped_mm(rows, weights, ends)
        graph.replay()
        assert product.eq(16).all()
        return
    with pytest.raises(RuntimeError, match=CAPTURING), torch.cuda.graph(torch.cuda.CUDAGraph()):
        moe._grouped_mm(rows, weights, ends)
