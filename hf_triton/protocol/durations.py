# SPDX-License-Identifier: Apache-2.0
"""How long a model stays when it is idle, as settings, options and requests write it."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Final

import annotated_types
from pydantic import BeforeValidator

from hf_triton.errors import clip

FOR_EVER: Final = -1.0
UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION: Final = re.compile(r"(-?)(?:(\d{1,9}(?:\.\d{1,9})?)|((?:\d{1,9}(?:\.\d{1,9})?(?:ms|[smh])){1,4}))")
ALLOWED: Final = "a duration such as 30s, 10m or 1h, 0 (at once) or -1 (for ever)"


def read_duration(value: object) -> float | None:
    """Seconds of a duration such as `10m` or `1h30m`, or of a number; what is negative is FOR_EVER, and None is None.

    Raises:
        ValueError: It is no duration.
    """
    if value is None:
        return None
    if isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value) if value >= 0 else FOR_EVER
    parsed = DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if parsed is None:
        raise ValueError(f"keep_alive must be {ALLOWED}, got {clip(value)}")
    sign, seconds, parts = parsed.groups()
    if sign:
        return FOR_EVER
    units = re.findall(r"([\d.]+)(ms|[smh])", parts or f"{seconds}s")
    return sum(float(number) * UNITS_S[unit] for number, unit in units)


Duration = Annotated[float, BeforeValidator(read_duration), annotated_types.doc(ALLOWED)]
