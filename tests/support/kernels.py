# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of kernels."""

from collections.abc import Iterator

import pytest

from hf_triton.runner.cpu import availability, linear, paged_attention


@pytest.fixture
def anew() -> Iterator[None]:
    """Forget which kernels were tried."""
    caches = (paged_attention.compiled_for, linear.has_kernel, availability.runs_numba)
    for kernel_cache in caches:
        kernel_cache.cache_clear()
    yield
    for kernel_cache in caches:
        kernel_cache.cache_clear()
