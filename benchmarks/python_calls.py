# SPDX-License-Identifier: Apache-2.0
"""Python calls of the package's own code in a decoding step of one sequence: `python benchmarks/python_calls.py`.

What a step costs beside the model's own operations, as a number that does not depend on what else the machine does.
The continuous engine runs a Llama of two small layers, for which no kernel is compiled; and the model of
`benchmarks/engine.py`, of eight layers, alone and beside a process that is busy on the same cores. Calls of C
functions, of torch and of transformers are not counted, nor methods that `dataclass` generates; each time that a
generator resumes is. Runs differ in what is looked at by time (`cgroups.py`, `budget.py`, `threads.py`), and in how
many linear layers take our kernel, which is chosen by its time at load.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType

import click
from engine import accelerate, apart, build_packed_model
from inside import run_requests
from transformers import LlamaForCausalLM

import hf_triton
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import Observer
from hf_triton.runner.cpu import threads
from hf_triton.testing import build_tiny_checkpoint

PACKAGE = Path(hf_triton.__file__).parent
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
NUM_TOKENS = 60
FIRST_STEP, LAST_STEP = 10, 50
NEIGHBOUR = """
import sys
from pathlib import Path
from hf_triton.runner.cpu import threads
threads.SHARED = Path(sys.argv[1])
with threads.SharedCores():
    print("busy", flush=True)
    sys.stdin.read()
"""


class CallCounter(Observer):
    """Counts the package's calls from the end of an engine's step `FIRST_STEP` to the end of `LAST_STEP`."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._calls: Counter[CodeType] = Counter()

    def on_step(self, num_sequences: int) -> None:
        self._num_steps += 1

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a call, for `sys.setprofile` of the engine's threads."""
        if event == "call" and FIRST_STEP <= self._num_steps < LAST_STEP:
            self._calls[frame.f_code] += 1

    def calls_per_step(self) -> dict[str, float]:
        """Calls in a step, by file of the package."""
        if self._num_steps < LAST_STEP:
            raise ValueError(f"the engine made {self._num_steps} steps, and calls are counted up to step {LAST_STEP}")
        calls: Counter[str] = Counter()
        for code, count in self._calls.items():
            file = Path(code.co_filename)
            if file.is_relative_to(PACKAGE):
                calls[file.relative_to(PACKAGE).as_posix()] += count
        return {file: count / (LAST_STEP - FIRST_STEP) for file, count in calls.items()}


def count_calls(model: object) -> dict[str, float]:
    """Calls in a decoding step of one sequence, by file of the package."""
    counter = CallCounter()
    threading.setprofile(counter.profile)  # for the threads that the engine starts
    try:
        engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=16, observer=counter))
    finally:
        threading.setprofile(None)
    with closing(engine):
        run_requests(engine, [(PROMPT, NUM_TOKENS)], width=1)
    return counter.calls_per_step()


def build_small_model(folder: Path) -> LlamaForCausalLM:
    """A Llama of the tests, as the server runs it."""
    model = LlamaForCausalLM.from_pretrained(build_tiny_checkpoint(folder, "llama")).eval()
    accelerate(model)
    return model


@contextmanager
def busy_neighbour(folder: Path) -> Iterator[None]:
    """While it is entered, another process is busy on the same cores."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", NEIGHBOUR, folder], stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        process.stdout.readline()
        yield


@click.command()
def main() -> None:
    """Count, and print a table."""
    model = apart(build_packed_model)
    with tempfile.TemporaryDirectory() as folder:
        threads.SHARED = Path(folder) / "shared"  # other models of this machine are not counted
        threads.SHARED.mkdir()
        columns = {
            "two layers": count_calls(apart(lambda: build_small_model(Path(folder) / "small"))),
            "eight layers": count_calls(model),
        }
        with busy_neighbour(threads.SHARED):
            columns["busy neighbour"] = count_calls(model)
    print(f"{'calls per step':34}" + "".join(f"{name:>16}" for name in columns))
    most = Counter[str]()
    for calls in columns.values():
        most |= Counter(calls)
    for file, _ in most.most_common():
        print(f"{file:34}" + "".join(f"{calls.get(file, 0):>16.1f}" for calls in columns.values()))
    print(f"{'all':34}" + "".join(f"{sum(calls.values()):>16.1f}" for calls in columns.values()))


if __name__ == "__main__":
    main()
