# SPDX-License-Identifier: Apache-2.0
"""Marks of cases."""

from typing import Any

import pytest


def full(*cases: Any) -> list[Any]:
    """Cases of a test that only `make test-all` runs; a tuple is the arguments of one."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full) for case in cases]
