# SPDX-License-Identifier: Apache-2.0
"""The heap keeps what tensors give back, in a process of its own, because it cannot be set back."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, threading
import torch
from hf_triton.runner.cpu.malloc import keep_freed_memory

def forwards():
    for _ in range(20):
        tensors = [torch.zeros(1 << 20) for _ in range(4)]  # 4 MiB each
        del tensors

def run():
    forwards()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    forwards()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

keep_freed_memory()
thread = threading.Thread(target=run)  # as the engine's: it has a part of the heap to itself
thread.start()
thread.join()
"""
PAGES = 20 * 4 * 1024  # touched in all


@pytest.mark.full
@pytest.mark.parametrize("environment", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_heap_keeps_freed_pages(environment: dict[str, str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={"OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    if environment:  # the operator's own choice stands
        assert int(run.stdout) > PAGES / 2
    else:
        assert int(run.stdout) < PAGES / 100
