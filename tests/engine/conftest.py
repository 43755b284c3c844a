# SPDX-License-Identifier: Apache-2.0
"""What tests of kernels share."""

from collections.abc import Iterator

import pytest

from hf_triton.runner.cpu import availability as numba_here
from hf_triton.runner.cpu import decode_attention as one_token
from hf_triton.runner.cpu import linear as product


@pytest.fixture
def anew() -> Iterator[None]:
    """No kernel has been tried."""
    caches = one_token._kernel, product._has_kernel, numba_here.runs_numba
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()
