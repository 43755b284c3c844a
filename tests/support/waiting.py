# SPDX-License-Identifier: Apache-2.0
"""Waiting for what must come."""

import time
from collections.abc import Callable


def wait_until(claim: Callable[[], object], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.002)
