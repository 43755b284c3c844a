# SPDX-License-Identifier: Apache-2.0
"""These tests run on CUDA devices, or on two simulated ones."""

from collections.abc import Iterator

import pytest

from tests.support.simulated_gpu import HAS_GPU, Device, simulated_gpus


@pytest.fixture(autouse=True)
def simulated() -> Iterator[Device | None]:
    """State of the simulated devices; None: there are real ones."""
    if HAS_GPU:
        yield None
        return
    with simulated_gpus(2) as device:
        yield device
