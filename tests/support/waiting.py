# SPDX-License-Identifier: Apache-2.0
"""Waiting for what must come."""

import time
from collections.abc import Callable


def wait_until(claim: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Ask at once, and then less and less often, as a claim may be a request."""
    end_s, pause_s = time.monotonic() + timeout_s, 0.002
    while not claim():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
