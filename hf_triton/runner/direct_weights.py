# SPDX-License-Identifier: Apache-2.0
"""Finds the layers whose weights a model's own code reads, beside their forward; they must stay parameters.

A layer of codes has no `weight`, and an embedding of codes one without its numbers.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any, Final

READ: Final = re.compile(r"(?<!\bmodule)\.([a-zA-Z]\w*)\.weight\b(?![\"'])(\[?)")
"""`module` is what is initialized, and a quoted name is that of a tensor in a file."""
NEVER_HERE: Final = re.compile(r"^.*(?:\binit\.|outproj_weight=|target_dtype = ).*$", re.MULTILINE)
"""Lines that initialize weights, or are for kernels of a GPU: Mamba's, and flash attention."""


def read_directly(model: Any, *, tables: bool = False) -> frozenset[str]:
    """The last parts of the names of layers, such as Mamba's `lm_head`, whose `weight` the code of a model names.

    With `tables`, those of which it takes rows.
    """
    modules = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    found = (_read_in(name) for name in modules if not name.startswith("torch."))
    return frozenset(name for each in found for name, bracket in each if bracket or not tables)


@cache
def _read_in(module: str) -> frozenset[tuple[str, str]]:
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # it has none
        return frozenset()
    return frozenset(READ.findall(NEVER_HERE.sub("", source)))
