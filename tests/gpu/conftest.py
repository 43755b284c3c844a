# SPDX-License-Identifier: Apache-2.0
"""These tests run on CUDA devices, or on two simulated ones."""

from collections.abc import Iterator

import pytest

from tests.support.simulated_gpu import HAS_GPU, simulated_gpus


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    if HAS_GPU:
        yield
        return
    with simulated_gpus(2):
        yield
