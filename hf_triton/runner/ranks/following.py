# SPDX-License-Identifier: Apache-2.0
"""What ranks 1 to N-1 do: take commands of rank 0 and follow them, until their input closes. Knows nothing of loading.

Threads of their own read the commands and send the beats, so that a rank ends with rank 0 whatever it computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import HfTritonError
from hf_triton.runner.device import DeviceContext
from hf_triton.runner.faults import described, loggable
from hf_triton.runner.gpu_memory import weight_bytes
from hf_triton.runner.offload import OffloadedWeights, release_freed
from hf_triton.runner.ranks.processes import BEAT_S, MAX_STOPPED_BEATS

PR_SET_PDEATHSIG: Final = 1
LINGER_S: Final = 0.5
"""How long the CPU cores are kept without a step."""


class Orders:
    """The two pipes of a rank: commands of rank 0, and what it is told.

    Args:
        parent: The process id of rank 0.
    """

    def __init__(self, parent: int) -> None:
        with contextlib.suppress(OSError, AttributeError):  # another system than Linux: the closed pipe ends it
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        self._parent = parent
        self._input = Connection(os.dup(0), writable=False)
        self._output = Connection(os.dup(1), readable=False)
        os.dup2(2, 1)  # what a model prints is no answer
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        for target in (self._read, self._beat):
            threading.Thread(target=target, name="hf_triton-rank", daemon=True).start()

    def take(self, timeout_s: float | None = None) -> tuple[str, tuple[Any, ...]]:
        """The next command; raises queue.Empty if there is none so long."""
        return self._commands.get(timeout=timeout_s)

    def tell(self, kind: str, value: Any = None) -> None:
        with self._lock:
            self._output.send((kind, value))

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._commands.put(self._input.recv())
        os._exit(0)

    def _beat(self) -> None:
        num_stopped = 0
        with contextlib.suppress(OSError):
            while num_stopped < MAX_STOPPED_BEATS:
                self.tell("beat")
                time.sleep(BEAT_S)
                num_stopped = num_stopped + 1 if _is_stopped(self._parent) else 0
            print("hf_triton: rank 0 is stopped; ending the model's process", file=sys.stderr, flush=True)
            os.kill(self._parent, signal.SIGKILL)  # which could answer no request, nor see another rank end
        os._exit(0)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; on another system than Linux, never."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def run_rank(parent: int, load: Callable[..., Any]) -> None:
    """Be a rank until rank 0 ends: `load` makes its part of the model, by the arguments of the first command."""
    orders = Orders(parent)
    follower = _Follower(orders)
    try:
        _, arguments = orders.take()
        follower.follow(load(orders, *arguments))
    except BaseException as error:
        describe = loggable if follower.serves else described
        text = error.sentence if isinstance(error, HfTritonError) else describe(error)
        with contextlib.suppress(OSError):
            orders.tell("fault", f"failed: {text}")
        print(f"hf_triton: rank {os.environ.get('LOCAL_RANK')} failed: {text}", file=sys.stderr, flush=True)
    os._exit(1)


class _Follower:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self.serves = False
        """Whether what fails may quote a prompt."""

    def follow(self, model: Any) -> None:
        from hf_triton.runner.model_runner import ModelRunner
        from hf_triton.runner.ranks.parts import check_parts
        from hf_triton.runner.way_probe import find_way

        context = DeviceContext(model.get_input_embeddings().weight.device)
        context.begin()
        runner: Any = None
        weights = OffloadedWeights()
        while True:
            try:
                name, arguments = self._orders.take(LINGER_S)
            except queue.Empty:
                context.idle()
                name, arguments = self._orders.take()
            context.busy()
            if name == "find_way":
                check_parts(model)
                self._orders.tell("answer", find_way(model, *arguments).way)
            elif name == "begin":
                way, block_size = arguments
                runner = ModelRunner(model, way, block_size=block_size)
            elif name == "serve":
                self.serves = True
            elif name == "run":
                step, tokens = arguments
                runner.run(step, None if tokens is None else _receive(tokens, runner.device))
            elif name == "capture":
                self._orders.tell("answer", (runner.capture(*arguments), runner.partly))
            elif name == "memory_per_token":
                self._orders.tell("answer", describe_share(runner, runner.memory_per_token()[0]))
            elif name == "sleep":
                runner.sleep()
                if runner.device.type == "cuda":
                    weights.offload([*model.parameters(), *model.buffers()])
                release_freed(runner.device)
            elif name == "restore":
                weights.restore()
            else:
                getattr(runner, name)(*arguments)


def describe_share(runner: Any, bytes_per_token: Mapping[Any, int]) -> dict[str, Any]:
    """What a rank holds: see `ModelInfo.ranks`, but with the bytes of a token's keys and values in place of all."""
    return {
        "device": str(runner.device),
        "weights_bytes": sum(weight_bytes(runner.model).values()),
        "cache_bytes": sum(bytes_per_token.values()),
    }


def _receive(tokens: tuple[int, dict[int, int]], device: Any) -> Any:
    """The tokens that rank 0 has sampled of the step before and sends to all."""
    import torch
    from torch import distributed

    from hf_triton.runner.step_tensors import InflightTokens

    num, row_of = tokens
    token_ids = torch.empty(num, dtype=torch.int64, device=device)
    distributed.broadcast(token_ids, 0)
    return InflightTokens(token_ids, row_of)
