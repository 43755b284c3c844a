# SPDX-License-Identifier: Apache-2.0
"""A simulated CUDA device with the rules of a real one, for machines without a GPU.

Tensors say that they are on `cuda:0`, and are computed on the CPU. What a device would refuse is refused, and what goes
wrong on one goes wrong here:

- tensors of the host and of the device, or of two devices, in one operation;
- a tensor that is larger than what the living ones leave of a device's memory;
- the host waiting for the device where `torch.cuda.set_sync_debug_mode("error")` forbids it, or while a graph is being
  captured;
- torch's grouped product, of mixtures of experts, waits for the device but in bfloat16 on some compute capabilities,
  `Device.capability`;
- a graph: nothing runs while it is captured; its replay is the same operations on the same addresses, with the host's
  numbers as they were then; what it has allocated is garbage before the first replay;
- a copy to the host that does not wait: garbage until an event behind it, or all, was waited for;
- a copy to the device that does not wait: the host's memory must not change on its way.

It says nothing of a device's rounding, speed, kernels, or how much memory an operation needs meanwhile. All is of one
process: a model sees its neighbours' memory as torch's own.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, ValuesView
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

HAS_GPU: Final = torch.cuda.is_available()
"""Whether there is a real one."""
TOTAL_BYTES: Final = 2**27
"""The memory of a device."""
CUDA, META = 1, 14  # c10::DeviceType
CAPTURE: Final = "capture"
"""What the host waits for before it captures a graph."""
HOST: Final = torch.device("cpu")
WAITING: Final = frozenset(  # the host needs a number, or a shape that depends on numbers
    {
        *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default),
        *(aten.masked_select.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
        *(aten.repeat_interleave.Tensor, aten.bincount.default),
    }
)
GROUPED_BF16: Final = 9, 10
"""The first numbers of the compute capabilities whose grouped product reads its offsets on the device, in bfloat16."""
ALLOCATING: Final = {aten.empty.memory_format: 0, aten.new_empty.default: 1, aten.new_zeros.default: 1}
"""Which argument is the shape."""
SMALL: Final = 2**12
"""Numbers of a tensor for which there is always room."""
COPYING: Final = frozenset({aten.copy_.default, aten._to_copy.default})
INDEXING: Final = frozenset(  # takes indices from the host, and waits for them
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)
WHOLE: Final = frozenset(  # a device has kernels of their own for them
    {aten.scaled_dot_product_attention.default, aten.rms_norm.default}
)
NUM_KERNELS: Final = {  # one for any other operation
    **dict.fromkeys(("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"), 0),
    **dict.fromkeys(("aten::new_empty_strided", "aten::_unsafe_view"), 0),
    "hf_triton::attend": 2,  # parts are attended to and combined
}


def _histogram(numbers: torch.Tensor, *arguments: float) -> torch.Tensor:
    """`torch.histc`, which counts whole numbers on devices alone."""
    return torch.histc(numbers.double(), *arguments).to(numbers.dtype)


def _softmax(numbers: torch.Tensor, dim: int, widens: bool) -> torch.Tensor:
    """`torch.softmax` in float32 of numbers in float16, which devices alone do at once."""
    return torch._softmax(numbers.float() if widens else numbers, dim, False)


STANDING_IN: Final = {aten.histc.default: _histogram, aten._softmax.default: _softmax}


class OnDevice(torch.Tensor):
    """A tensor whose numbers are `numbers`, on the CPU, and which says that it is on a CUDA device."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, device: torch.device) -> OnDevice:
        tensor: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )
        tensor.numbers = numbers
        LIVING[id(tensor)] = tensor
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # torch would copy a view's storage, which is not here
        copied = self.detach().clone()
        memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def tolist(self) -> Any:  # which torch does not do for classes of others
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} in a thread that has not begun since there is a device")


LIVING: Final[WeakValueDictionary[int, OnDevice]] = WeakValueDictionary()
"""The tensors that there are, by identity."""


def allocated_bytes(device: torch.device) -> int:
    """What the living tensors of a device take, each storage once."""
    storages = (tensor.numbers.untyped_storage() for tensor in list(LIVING.values()) if tensor.device == device)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Device:
    """State of the devices; all work is in one order."""

    def __init__(self) -> None:
        self.current: dict[int, int] = {}  # device by thread
        self.sync_debug_mode = "default"
        self.capability = 9, 0
        """The compute capability that it pretends to have; a test may change it."""
        self._captures: dict[int, Graph] = {}  # by thread
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that no other memory has it
        self._num_sent = 0
        self._late: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # host memory, and what is on its way there
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []  # host memory on its way here, and what it was
        self.kernels: Counter[str] = Counter()
        """Those that have run or were captured, by operation; views and allocations are none."""

    def index_of(self, place: torch.device) -> int:
        """The number of a device; the thread's current one where it has none."""
        return self.current.get(threading.get_ident(), 0) if place.index is None else place.index

    @property
    def capture(self) -> Graph | None:
        return self._captures.get(threading.get_ident())

    @capture.setter
    def capture(self, graph: Graph | None) -> None:
        if graph:
            self._captures[threading.get_ident()] = graph
        else:
            self._captures.pop(threading.get_ident(), None)

    def wait(self, operation: object) -> None:
        """Synchronize: the host waits for all work of the device."""
        if self.capture:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {operation}")
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {operation}")
        self.arrive(self._num_sent)

    @property
    def num_sent(self) -> int:
        """Copies to the host that are on their way, or were."""
        return self._num_sent

    def arrive(self, number: int) -> None:
        for copy in [copy for copy in self._late if copy[0] <= number]:
            self._late.remove(copy)
            copy[1].copy_(copy[2])
        for source, numbers in self._read:
            if not torch.equal(_bytes(source), _bytes(numbers)):
                raise AssertionError("host memory was written to while it was copied to the device")
        self._read.clear()

    def to_host(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        """Have numbers arrive in the host's memory some time."""
        numbers = numbers.clone()
        spoil(target)
        self._num_sent += 1
        self._late.append((self._num_sent, target, numbers))

    def from_host(self, source: torch.Tensor) -> None:
        """The host's memory is being read."""
        self._read.append((source, source.clone()))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


def spoil(tensor: torch.Tensor) -> None:
    """Garbage, as in uninitialized memory."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    numbers = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return numbers.copy_(tensor.reshape(-1)).view(torch.uint8)


class Operations(TorchDispatchMode):
    """Intercepts every operation of a thread."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to say so costs as much as an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _leaves(args, kwargs.values())
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        given = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        if not given and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
            return self._on_host(func, args, kwargs)
        if func is aten.dropout.default and not args[2]:
            return args[0]  # as a device does; its decomposition copies
        rules = _rules_of(func)
        if rules.decomposes:
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        place = self._place(func, leaves, given, args)
        if rules.copies and (place.type == "cpu" or len(given) < len(tensors)):
            return self._copy(func, args, kwargs, place, given)
        if func in ALLOCATING and math.prod(args[ALLOCATING[func]]) > SMALL:
            self._check_memory(func, args, kwargs, place)
        self._check(func, rules, args, tensors)
        return self._run(func, args, kwargs, place, given)

    def _check_memory(self, func: Any, args: Any, kwargs: Any, place: torch.device) -> None:
        dtype = kwargs.get("dtype") or (
            args[0].dtype if isinstance(args[0], torch.Tensor) else torch.get_default_dtype()
        )
        num_bytes = math.prod(args[ALLOCATING[func]]) * dtype.itemsize
        if num_bytes > TOTAL_BYTES - allocated_bytes(place):
            gc.collect()  # engines that were closed are cycles
            if num_bytes > TOTAL_BYTES - allocated_bytes(place):
                raise torch.OutOfMemoryError("CUDA out of memory")

    def _place(self, func: Any, leaves: list[Any], given: list[OnDevice], args: Any) -> torch.device:
        named = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        if func is aten.copy_.default:
            place = args[0].device
        elif named:
            place = named[0]
        else:
            place = given[0].device if given else HOST
        return torch.device("cuda", self._device.index_of(place)) if place.type == "cuda" else place

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return self._device.pin(func(*args, **kwargs | {"pin_memory": False}))

    def _copy(self, func: Any, args: Any, kwargs: Any, place: torch.device, given: list[OnDevice]) -> Any:
        is_method = func is aten.copy_.default
        source = args[1] if is_method else args[0]
        non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
        if place.type == "cuda":
            if non_blocking and self._device.is_pinned(source) and not self._device.capture:
                self._device.from_host(source)
            elif source.numel():
                self._device.wait(func)
            return self._run(func, args, kwargs, place, given)
        found: torch.Tensor = func(*_numbers(args), **_numbers(kwargs) | ({} if is_method else {"pin_memory": False}))
        if non_blocking and (not is_method or self._device.is_pinned(found)):
            self._device.to_host(self._device.pin(found), found)
        elif found.numel():
            self._device.wait(func)
        return found

    def _check(self, func: Any, rules: Rules, args: Any, tensors: list[torch.Tensor]) -> None:
        if (
            rules.waits
            or (rules.is_grouped and self._reads_offsets(args))
            or (rules.indexes and _reads_indices(func, args))
        ):
            self._device.wait(func)
        if not rules.copies and len(tensors) > 1:
            places = {str(tensor.device) for tensor in tensors if tensor.ndim or isinstance(tensor, OnDevice)}
            if rules.indexes:  # indices may be the host's
                places.discard("cpu")
            if len(places) > 1:
                raise RuntimeError(f"Expected all tensors to be on the same device: {func} of {', '.join(places)}")

    def _reads_offsets(self, args: Any) -> bool:
        """Whether a grouped product loops on the host; see `_grouped_mm_cuda` in torch's GroupedBlas.cpp."""
        is_bf16 = all(matrix.dtype == torch.bfloat16 for matrix in args[:2])
        return not (is_bf16 and self._device.capability[0] in GROUPED_BF16)

    def _run(self, func: Any, args: Any, kwargs: Any, place: torch.device, given: list[OnDevice]) -> Any:
        capture, rules = self._device.capture, _rules_of(func)
        shapes = [tensor.numbers.shape for tensor in given]
        if not rules.is_view:
            writes = rules.name == "hf_triton::attend" and args[1] is not None  # the new keys, by a kernel more
            self._device.kernels[rules.name] += rules.num_kernels + writes
        compute = STANDING_IN.get(func, func)
        found = capture.record(compute, args, kwargs) if capture else compute(*_numbers(args), **_numbers(kwargs))
        if shapes != [tensor.numbers.shape for tensor in given]:
            raise NotImplementedError(f"{func} gives a tensor another shape in place")
        by_numbers = {id(tensor.numbers): tensor for tensor in given}

        def wrapped(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            if id(result) in by_numbers:
                return by_numbers[id(result)]
            if result.is_inference() == torch.is_inference_mode_enabled():
                return OnDevice(result, place)
            with torch.inference_mode(result.is_inference()):
                return OnDevice(result, place)

        return wrapped(found) if isinstance(found, torch.Tensor) else _mapped(wrapped, found)


class Rules(NamedTuple):
    """What holds of an operation whatever its arguments are."""

    name: str
    decomposes: bool
    copies: bool
    waits: bool
    indexes: bool
    is_grouped: bool
    is_view: bool
    num_kernels: int


@functools.cache
def _rules_of(func: Any) -> Rules:
    name = func.name()
    is_fallback = name == "transformers::grouped_mm_fallback"  # where torch has none
    return Rules(
        name=name,
        decomposes=func not in WHOLE and func._can_decompose(),
        copies=func in COPYING,
        waits=func in WAITING or is_fallback,
        indexes=func in INDEXING,
        is_grouped=func is aten._grouped_mm.default,
        is_view=_is_view(func),
        num_kernels=NUM_KERNELS.get(name.split(".")[0], 1),
    )


def _is_view(func: Any) -> bool:
    """Whether an operation's results are its arguments' memory, to which it does not write."""
    results = [result.alias_info for result in func._schema.returns]
    return bool(results) and all(alias is not None and not alias.is_write for alias in results)


def _reads_indices(func: Any, args: Any) -> bool:
    """Whether an index is the host's, or a mask; a number put where one mask says is no index to a device."""
    indices = [index for index in args[1] if index is not None]
    is_fill = func is not aten.index.Tensor and args[2].numel() == 1 and not isinstance(args[2], OnDevice)
    masks = (torch.bool, torch.uint8)
    if is_fill and len(indices) == 1 and indices[0].dtype in masks and isinstance(indices[0], OnDevice):
        return False
    return any(index.dtype in masks or not isinstance(index, OnDevice) for index in indices)


def _leaves(*arguments: Any) -> list[Any]:
    """What is in lists, tuples and dictionaries, flat."""
    found: list[Any] = []
    for each in arguments:
        if isinstance(each, list | tuple | ValuesView):
            for inner in each:
                if isinstance(inner, list | tuple | dict):
                    found += _leaves(inner)
                else:
                    found.append(inner)
        elif isinstance(each, dict):
            found += _leaves(each.values())
        else:
            found.append(each)
    return found


def _mapped(change: Callable[[Any], Any], arguments: Any) -> Any:
    if isinstance(arguments, dict):
        return {name: _mapped(change, each) for name, each in arguments.items()}
    if isinstance(arguments, list | tuple):
        return type(arguments)([_mapped(change, each) for each in arguments])
    return change(arguments)


def _numbers(arguments: Any) -> Any:
    return _mapped(_plain, arguments)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, OnDevice):
        return leaf.numbers
    return HOST if isinstance(leaf, torch.device) else leaf


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, **_: Any) -> None:
        self._steps: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self._fresh: dict[int, torch.Tensor] = {}  # what was allocated while it was captured, by address
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # what was written to
        self._is_whole = False

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation to know its shapes, and keep it."""
        args, kwargs = _mapped(_frozen, (args, kwargs))
        schema = func._schema.arguments if hasattr(func, "_schema") else ()
        for argument, value in zip(schema, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        given = {_address(leaf) for leaf in _leaves(args, kwargs) if isinstance(leaf, torch.Tensor)}
        found = func(*args, **kwargs)
        results = [leaf for leaf in _leaves(found) if isinstance(leaf, torch.Tensor)]
        fresh = [None if _address(result) in given else result for result in results]
        self._fresh |= {_address(result): result for result in fresh if result is not None}
        self._steps.append((func, args, kwargs, fresh))
        return found

    def finish(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        for tensor in self._fresh.values():
            spoil(tensor)
        self._is_whole = True

    def replay(self) -> None:
        assert self._is_whole
        for func, args, kwargs, fresh in self._steps:
            found = func(*args, **kwargs)
            results = [leaf for leaf in _leaves(found) if isinstance(leaf, torch.Tensor)]
            for place, result in zip(fresh, results, strict=True):
                if place is not None:
                    place.copy_(result)

    def _keep(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address not in self._fresh and address not in self._before:
            storage = tensor.untyped_storage()
            self._before[address] = storage, storage.clone()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _frozen(leaf: Any) -> Any:
    """An argument as a graph has it: numbers of the host as they are now."""
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnDevice):
        return leaf.clone()
    return _numbers(leaf)


class Stream:
    """`torch.cuda.Stream`; there is one order in which all is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        self._number = self._device.num_sent

    def synchronize(self) -> None:
        self._device.arrive(self._number)


@contextmanager
def simulated_gpus(num_devices: int = 1) -> Iterator[Device]:
    """Simulate GPUs for this thread and the threads that start meanwhile."""
    device, patch = Device(), pytest.MonkeyPatch()
    LIVING.clear()  # what an earlier test still refers to
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")

    @contextmanager
    def graph(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
        device.wait(CAPTURE)
        device.capture = graph
        try:
            yield
        finally:
            device.capture = None
            graph.finish()

    @contextmanager
    def in_thread() -> Iterator[None]:
        only_lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # a list becomes a tensor on the host, which is moved
        try:
            with Operations(device):
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(only_lifts)

    @contextmanager
    def on(_: Any) -> Iterator[None]:
        yield

    def run(self: threading.Thread) -> None:
        with in_thread():
            run_thread(self)

    run_thread, make_tensor, move = threading.Thread.run, torch.tensor, torch.Tensor.to

    def numbered(place: Any) -> Any:
        """A device with its number: torch built without CUDA does not know which one is current."""
        if type(place) is int:
            return torch.device("cuda", place)
        is_named = isinstance(place, str | torch.device) and str(place) == "cuda"
        return torch.device("cuda", device.index_of(torch.device(place))) if is_named else place

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return move(self, *map(numbered, args), **{name: numbered(value) for name, value in kwargs.items()})

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = numbered(kwargs["device"])
        made = make_tensor(*args, **kwargs)
        return device.pin(made) if pin_memory else made

    def memory_allocated(place: Any = None) -> int:
        place = torch.device("cuda") if place is None else torch.device(numbered(place))
        return allocated_bytes(torch.device("cuda", device.index_of(place)))

    def mem_get_info(place: Any = None) -> tuple[int, int]:
        gc.collect()  # engines that were closed are cycles
        return TOTAL_BYTES - memory_allocated(place), TOTAL_BYTES

    def set_device(place: Any) -> None:
        device.current[threading.get_ident()] = device.index_of(torch.device(numbered(place)))

    replacements: dict[str, Callable[..., Any] | type] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: device.index_of(torch.device("cuda")),
        "set_device": set_device,
        "get_device_capability": lambda *_: device.capability,
        "get_device_name": lambda *_: "simulated",
        "mem_get_info": mem_get_info,
        "memory_reserved": memory_allocated,
        "memory_allocated": memory_allocated,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: device.wait("synchronize"),
        "get_sync_debug_mode": lambda: device.sync_debug_mode,
        "set_sync_debug_mode": lambda mode: setattr(device, "sync_debug_mode", mode),
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: device.capture is not None,
        "current_stream": Stream,
        "Stream": Stream,
        "stream": on,
        "Event": lambda *_, **__: Event(device),
        "CUDAGraph": Graph,
        "graph": graph,
    }
    guard = guards[CUDA]  # none where torch is built without CUDA
    _device_constructors()  # which remembers the functions that there are
    try:
        for name, replacement in replacements.items():
            patch.setattr(torch.cuda, name, replacement)
        patch.setattr(threading.Thread, "run", run)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch, "_has_compatible_shallow_copy_type", lambda *_: False)  # moved weights are new ones
        patch.setattr("transformers.modeling_utils.caching_allocator_warmup", lambda *_: None)  # leaves 1.2 GiB free
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "pin_memory", lambda self, *_: device.pin(self.clone()))
        guards[CUDA] = guards[META]
        with in_thread():
            yield device
    finally:
        guards[CUDA] = guard
        patch.undo()
