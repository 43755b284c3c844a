# SPDX-License-Identifier: Apache-2.0
"""How much of a KV cache is in memory, as the kernel says."""

import ctypes
import mmap
from pathlib import Path

import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine


def resident_bytes(tensor: torch.Tensor) -> int:
    pages = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    address, length = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert ctypes.CDLL(None).mincore(address, length, pages) == 0
    return bytes(pages).count(1) * mmap.PAGESIZE


def resident_cache_bytes(engine: ContinuousBatchingEngine) -> int:
    return sum(resident_bytes(layer.keys) + resident_bytes(layer.values) for layer in engine.runner.cache.blocks())


def resident_process_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
