# SPDX-License-Identifier: Apache-2.0
"""Whether a model runs code that is neither transformers' nor ours: it may keep a state, and branch on anything."""

from __future__ import annotations

from typing import Any, Final

PACKAGES: Final = frozenset({"hf_triton", "peft", "torch", "transformers"})
HOOKS: Final = "_forward_pre_hooks", "_forward_hooks"


def has_own_code(model: Any) -> bool:
    """Whether a module's class, a function that stands in its own place, or a hook comes from elsewhere."""
    return any(not _is_known(type(module)) or not all(map(_is_known, _added(module))) for module in model.modules())


def _added(module: Any) -> list[Any]:
    """Functions that a module has in place of its class's, and hooks."""
    own = [value for name, value in vars(module).items() if callable(value) and hasattr(type(module), name)]
    return own + [hook for name in HOOKS for hook in getattr(module, name).values()]


def _is_known(code: Any) -> bool:
    """Whether a class, a function, a method or an object that is called belongs to `PACKAGES`."""
    package = getattr(code, "__module__", None) or type(code).__module__
    return package.partition(".")[0] in PACKAGES
