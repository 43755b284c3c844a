# SPDX-License-Identifier: Apache-2.0
"""Hints: what a request asks for and the gateway drops since no answer depends on it. A header names them.

An endpoint, or a body's model, calls `pass_over` with the field's name; `Observe` adds the header to the response.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

LOG: Final = logging.getLogger("hf_triton_gateway")
HEADER: Final = "x-hf-triton-ignored"
MAX_NAMES: Final = 32
"""One response's header has no more."""
MAX_LOGGED: Final = 256
"""Names that are logged, one line each."""
OTHER: Final = "(another name)"
"""A name that is no word: clients choose names, and a header or a log line holds none of their texts."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INDEX: Final = re.compile(r"\[\d+\]")
_names: ContextVar[dict[str, None] | None] = ContextVar("names", default=None)
_place: ContextVar[str] = ContextVar("place", default="")
_logged: Final[set[str]] = set()


def begin() -> dict[str, None]:
    """Start a request; the hints that are passed over from now on, by name and in order."""
    names: dict[str, None] = {}
    _names.set(names)
    return names


@contextmanager
def inside(place: str) -> Iterator[None]:
    """What is passed over inside is a field of `place`: `tools[2]`."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def pass_over(name: str) -> None:
    """Note that a hint is dropped: the response names it, and the first one of this name is logged.

    Args:
        name: The client's: `reasoning.effort`. Positions in lists are left out: `tools[2].strict` is `tools.strict`.
    """
    name = _INDEX.sub("", ".".join(filter(None, (_place.get(), name))))
    if not _NAME.fullmatch(name):
        name = OTHER
    names = _names.get()
    if names is not None and len(names) < MAX_NAMES:
        names[name] = None
    if name not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(name)
        LOG.info("passed over: %s, which changes no answer here; responses name it in %s", name, HEADER)


def header(names: dict[str, None]) -> list[tuple[bytes, bytes]]:
    """The header of a response, as ASGI has headers; none if nothing was passed over."""
    return [(HEADER.encode(), ", ".join(names).encode())] if names else []
