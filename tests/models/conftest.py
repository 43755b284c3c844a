# SPDX-License-Identifier: Apache-2.0
"""What tests of kernels share."""

from collections.abc import Iterator

import pytest

from hf_triton.runner import numba_here, one_token, product


@pytest.fixture
def anew() -> Iterator[None]:
    """No kernel has been tried."""
    caches = one_token._kernel, product._has_kernel, numba_here.runs_numba
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()
