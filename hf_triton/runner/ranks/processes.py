# SPDX-License-Identifier: Apache-2.0
"""Rank 0's side of the other ranks: their processes, what is sent to them, and the thread that sees one of them die.

    rank 0 --- commands: name, arguments ---> rank 1 ... N-1     by the standard input of each; it ends when that closes
           <-- beats, answers, a fault -----                     by its standard output; 8 s without a beat are a death

No command is answered unless it asks for that: steps go one way, and collective operations keep the ranks together. A
rank that ends, stands still or fails ends all of them, as none can continue without the others.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from hf_triton.errors import CheckpointError, LoadError
from hf_triton.runner.faults import RankError
from hf_triton.scratch import ScratchFolder

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
MAX_SILENT_BEATS: Final = 8
"""So many beats without a word are a death."""
MAX_STOPPED_BEATS: Final = 3
"""A rank 0 that is stopped at so many beats is ended: its server then has 10 s to end (`Sentinel`), and 15 s in all."""
MAX_SILENT_BEATS_AT_LOAD: Final = 60
"""Reading one large tensor from a slow disk may hold a process up."""
GRACE_S: Final = 3.0
"""How long an operation between the ranks may take to fail after one of them has died."""
LOAD_GRACE_S: Final = 60.0
"""The same at load, when rank 0 may read weights meanwhile."""
JOIN_S: Final = 30.0
"""How long ranks that have told that they come may take to find each other; less than `LOAD_GRACE_S`."""
OPERATION_S: Final = 600.0
"""How long an operation between the ranks may take; loading is one."""
END_S: Final = 5.0
"""How long a rank may take to end after its input is closed."""


class Ranks:
    """The processes of ranks 1 to N-1, for the process of rank 0.

    Args:
        size: N, at least 2.
        module: What a rank runs, as `python -m` names it.
        environment: Of the processes, for the rank with this number.
        first: The arguments of their first command, `load`, for all of them, behind the group's folder and size.
    """

    def __init__(
        self, size: int, module: str, environment: Callable[[int], Mapping[str, str]], first: tuple[Any, ...]
    ) -> None:
        self.size = size
        self.fault = ""
        """Why the ranks have ended, as a sentence; empty: they have not."""
        self.shares: list[dict[str, Any]] = []
        """What each rank holds, rank 0 first, once the cache is allocated; see `ModelInfo.ranks`."""
        self._module, self._environment = module, environment
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._inputs: list[Connection] = []
        self._outputs: dict[Connection, int] = {}
        self._answers: dict[int, queue.SimpleQueue[Any]] = {rank: queue.SimpleQueue() for rank in range(1, size)}
        self._fail: Callable[[float], None] | None = None
        self._store = ScratchFolder("ranks")
        self._started, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_triton-ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        with self.loading():
            self.send("load", self._store.name, size, *first)
            self.answers()  # each has imported what it needs
            join_group(self._store.name, 0, size)

    # --- commands ----------------------------------------------------------------------------------------------------

    def send(self, name: str, *arguments: Any) -> None:
        """Send a command to all ranks; raises RankError if one has ended."""
        data = ForkingPickler.dumps((name, arguments))
        if self.fault:
            raise self.error()
        try:
            for connection in self._inputs:
                connection.send_bytes(data)
        except OSError:
            raise self.error() from None

    def answers(self) -> list[Any]:
        """What each rank answers to a command that asks for it; raises RankError if one ends in place of that."""
        answers = [answer.get() for answer in self._answers.values()]
        if self.fault:
            raise self.error()
        return answers

    def check_equal(self, own: Any, what: str) -> None:
        """Refuse a model of which the ranks answer something else than what rank 0 has found.

        Raises:
            CheckpointError: They do.
        """
        for rank, answer in zip(self._answers, self.answers(), strict=True):
            if answer != own:
                raise CheckpointError(
                    "unsupported_model",
                    f"rank {rank} of {self.size} has {what} {answer}, and rank 0 {own}: the ranks must run alike; "
                    "use equal devices and one environment, or leave out tensor_parallel_size",
                )

    def error(self, otherwise: str = "another rank has ended") -> RankError:
        """Why an operation with the ranks has failed; `otherwise`, if none has told."""
        self._closed.wait(GRACE_S if not self.fault else 0)  # for the thread to see why
        return RankError(self.fault or otherwise)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """End the ranks if the block raises; what one of them said is the reason then, except for an error of ours.

        One of ours that explains another error is no exception: a rank's death may have caused that one.

        Raises:
            CheckpointError: One of them has failed.
        """
        try:
            yield
        except BaseException as error:
            is_own = isinstance(error, LoadError) and error.__cause__ is None
            deadline_s = time.monotonic() + GRACE_S
            while isinstance(error, Exception) and not is_own and not self.fault and time.monotonic() < deadline_s:
                time.sleep(0.05)
            self.close()
            is_own = is_own or (isinstance(error, LoadError) and error.sentence in self.fault)  # all ranks failed alike
            if self.fault and not is_own:
                raise CheckpointError("device_unavailable", f"{self.fault}: look at its lines in the log") from error
            raise

    def serve(self, fail: Callable[[float], None]) -> None:
        """From now on a death is answered by `fail`, see `Worker.fail`."""
        self.send("serve")
        self._fail = fail

    def close(self) -> None:
        """End all ranks, and the connection to them; nothing runs on this one."""
        self._closed.set()
        for connection in self._inputs:
            with contextlib.suppress(OSError):
                connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        _leave_group()
        self._store.cleanup()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Start the ranks and listen to them. The kernel ends them with this thread, and so with this process."""
        try:
            for rank in self._answers:
                self._start(rank)
        except OSError as error:
            self.fault = f"the process of rank {rank} cannot be started ({error})"
        self._started.set()
        try:
            if not self.fault:
                self._listen()
        finally:
            self._end()

    def _start(self, rank: int) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, str(rank), str(os.getpid())],
            env=dict(self._environment(rank)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._processes[rank] = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._inputs.append(Connection(os.dup(process.stdin.fileno()), readable=False))
        self._outputs[Connection(os.dup(process.stdout.fileno()), writable=False)] = rank
        process.stdin.close()
        process.stdout.close()

    def _listen(self) -> None:
        silent = dict.fromkeys(self._answers, 0)
        last_s = time.monotonic()
        while not self._closed.is_set():
            ready = wait([*self._outputs], max(0.0, last_s + BEAT_S - time.monotonic()))
            for connection, rank in self._outputs.items():
                if connection not in ready:
                    continue
                silent[rank] = 0
                try:
                    kind, value = connection.recv()
                except (EOFError, OSError):
                    kind, value = "fault", self._describe_end(rank)
                if kind == "fault":
                    self._lose(rank, value)
                    return
                if kind == "answer":
                    self._answers[rank].put(value)
            now_s = time.monotonic()
            if now_s - last_s < BEAT_S:
                continue
            last_s = now_s  # beats are counted, not seconds: if all processes stood still, none has died
            limit = MAX_SILENT_BEATS_AT_LOAD if self._fail is None else MAX_SILENT_BEATS
            for rank in silent:
                silent[rank] += 1
                if silent[rank] >= limit:
                    self._lose(rank, f"has said nothing for {limit} s")
                    return

    def _describe_end(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._processes[rank].wait(GRACE_S)
            hint = ": killed, often for lack of memory" if code == -signal.SIGKILL else ""
            return f"has ended (exit code {code}{hint})"
        return "has closed its output"

    def _lose(self, rank: int, what: str) -> None:
        """End the other ranks too, so that operations with them fail here, and have the requests answered."""
        if self._closed.is_set():
            return
        self.fault = f"rank {rank} of {self.size} {what}"
        logger.error("%s", self.fault)
        self._kill()
        for answer in self._answers.values():
            answer.put(None)
        _abort_operations()
        if self._fail is not None:
            self._fail(GRACE_S)
        elif not self._closed.wait(LOAD_GRACE_S):  # an operation that does not fail; nothing is served yet
            print(f"hf_triton: {self.fault}; ending the model's process", file=sys.stderr, flush=True)
            os._exit(1)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _end(self) -> None:
        deadline_s = time.monotonic() + END_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
        self._kill()
        for process in self._processes.values():
            process.wait()
        for connection in self._outputs:
            connection.close()
        self._closed.set()


def join_group(store: str, rank: int, size: int) -> None:
    """Make this process one of the ranks. On CPUs they are connected by the loopback interface alone.

    Args:
        store: A folder for this user alone, where they find each other.
        rank: The number of this one.
        size: How many there are.
    """
    import torch
    from torch import distributed
    from torch.distributed import distributed_c10d

    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)  # transformers' own device, of a server that Slurm or torchrun has started too
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # read whenever a group is made
    distributed.init_process_group(
        "nccl" if has_gpus else "gloo",
        store=distributed.FileStore(f"{store}/store", size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=JOIN_S),
    )
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=OPERATION_S))


def _abort_operations() -> None:
    """End NCCL's operations, which wait for ever; those of gloo fail with the connection."""
    import torch
    from torch.distributed import distributed_c10d

    if torch.cuda.is_available():
        with contextlib.suppress(Exception):
            distributed_c10d._abort_process_group()


def _leave_group() -> None:
    from torch import distributed
    from torch.distributed import distributed_c10d

    _abort_operations()
    with contextlib.suppress(Exception):
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed_c10d._world.group_count = 0  # one that was not joined is counted too, and ranks meet by the count
