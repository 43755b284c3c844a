# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the modules of torch's compiler, which transformers and torch import where nothing is compiled.

transformers marks functions for the compiler, and torch asks it about shapes on the device `meta`: 1.5 seconds of
processor time, 800 modules and 70 MB in each process. A stand-in answers what they ask; whatever else is asked of one,
or by others, imports the compiler itself, in place of all of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

ASKING: Final = "torch", "transformers"
"""Packages whose questions are answered: to others a class of a stand-in is not that of the module."""
_removing = threading.Lock()


def put_stand_ins() -> None:
    """Put them in the place of modules that are not imported yet."""
    import torch  # noqa: F401  # which looks at the compiler itself when it is imported

    if not STAND_INS.keys() & sys.modules.keys():
        for name in STAND_INS:
            spec = importlib.util.find_spec(name)
            if spec is None:  # another version of torch
                _remove_stand_ins()
                return
            sys.modules[name] = _StandIn(spec)
        sys.meta_path.insert(0, _Submodules())


class _StandIn(ModuleType):
    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__, self.__path__ = spec, spec.origin, spec.submodule_search_locations or []

    def __getattr__(self, name: str) -> Any:
        answers = STAND_INS[self.__name__]
        if name in answers and sys.modules.get(self.__name__) is self and _asking_package() in ASKING:
            return answers[name]
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _asking_package() -> str:
    """The package whose code takes an attribute of a stand-in, by an import too."""
    frame = sys._getframe(2)
    while (package := str(frame.f_globals.get("__name__")).partition(".")[0]) == "importlib" and frame.f_back:
        frame = frame.f_back
    return package


class _Submodules(MetaPathFinder, Loader):
    """Finds the modules below a stand-in, where they are below the module itself."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.rpartition(".")[0] not in STAND_INS:
            return None
        _remove_stand_ins()
        importlib.import_module(fullname)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is imported."""


def _remove_stand_ins() -> None:
    with _removing:  # another thread may have begun to import what one would remove
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Submodules)]
        for name in STAND_INS:
            if isinstance(sys.modules.get(name), _StandIn):
                del sys.modules[name]


def _mark(function: Any = None, *_: object, **__: object) -> Any:
    """Return what a function is marked with: itself, or, called with options alone, this."""
    return _mark if function is None else function


def _index_by_tensors() -> contextlib.AbstractContextManager[None]:
    """Return torch's own transformation, for the few masks that ask for it."""
    _remove_stand_ins()
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


STAND_INS: Final[dict[str, dict[str, Any]]] = {
    "torch._dynamo": {"disable": _mark, "assume_constant_result": _mark, "allow_in_graph": _mark},
    "torch._dynamo._trace_wrapped_higher_order_op": {"TransformGetItemToIndex": _index_by_tensors},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), bool),
        "statically_known_true": bool,
        "sym_and": lambda *conditions: all(conditions),
        "sym_or": lambda *conditions: any(conditions),
        "sym_eq": lambda left, right: left == right if isinstance(left, int) else list(left) == list(right),
        "has_guarding_hint": lambda _: True,
        "guarding_hint_or_throw": lambda size: size,
        "is_nested_int": lambda _: False,
    },
    "sympy": {"Basic": type("Basic", (), {})},
}
"""Modules, each with what is asked of it where nothing is compiled."""
