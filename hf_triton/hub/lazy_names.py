# SPDX-License-Identifier: Apache-2.0
"""Imports transformers without its reading all of its models' files, twice, for the names that they export.

They are 2,600 files: a second of processor time in each process, and 110 MB of a cold disk. The names of `models.auto`
are known from the start. A look-up of another one reads all of them first, and finds what transformers itself finds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

KNOWN: Final = "auto"
"""The folder of models whose names are read at once."""
UTILS: Final = "utils", "utils.import_utils"
Structure = dict[frozenset[str], dict[str, set[str]]]
"""transformers' names by module, by the packages that they need."""
_completing = threading.RLock()


def import_lazily() -> None:
    """Import transformers; as it does itself, if its version looks for names in another way."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
    package: Any = importlib.util.module_from_spec(spec)
    package.__version__ = version("transformers")  # transformers.utils takes it from there
    sys.modules["transformers"] = package
    try:
        with contextlib.suppress(ImportError, AttributeError):
            utils, import_utils = (importlib.import_module(f"transformers.{name}") for name in UTILS)
            _know_some(Path(str(spec.origin)).parent / "models", utils, import_utils)
        spec.loader.exec_module(package)
    except BaseException:
        sys.modules.pop("transformers", None)
        raise


class _Some(Structure):
    """The structure of some models; `prefix` is the modules'."""

    prefix: str | None


def _know_some(models: Path, utils: Any, import_utils: Any) -> None:
    define, lazy_module = import_utils.define_import_structure, import_utils._LazyModule

    def define_some(module_path: Any, prefix: str | None = None) -> Any:
        if Path(module_path) not in (models, models / "__init__.py"):
            return define(module_path, prefix)
        some = _Some({frozenset(): {}} | define(str(models / KNOWN), ".".join(filter(None, (prefix, KNOWN)))))
        some.prefix = prefix
        return some

    class LazyModule(lazy_module):  # type: ignore[misc, valid-type]
        """A module that looks for all names when one is asked for that it does not know."""

        def __init__(self, name: str, module_file: str, structure: Structure, *rest: Any, **options: Any) -> None:
            super().__init__(name, module_file, structure, *rest, **options)
            if isinstance(structure, _Some):
                self._some = structure, rest, options
                del self.__all__  # so that it is asked for

        def __getattr__(self, name: str) -> Any:
            own = vars(self)
            is_special = name.startswith("__") and name != "__all__"
            if "_some" not in own or is_special or name in own["_objects"] or name in own["_class_to_module"]:
                return super().__getattr__(name)
            if any(Path(self.__path__[0], name + suffix).exists() for suffix in ("", ".py")):
                return importlib.import_module(f"{self.__name__}.{name}")
            self._know_all()
            return getattr(self, name)

        def _know_all(self) -> None:
            with _completing:
                if "_some" in vars(self):
                    self._complete(*self._some)

        def _complete(self, some: _Some, rest: Any, options: Any) -> None:
            whole = {key: dict(names) for key, names in define(str(models), some.prefix).items()}
            for key, names in some.items():
                whole.setdefault(key, {}).update(names)
            known = lazy_module(self._name, self.__file__, whole, *rest, **options)
            self.__dict__.update((name, value) for name, value in vars(known).items() if name != "_objects")
            del self._some

        def __dir__(self) -> list[str]:
            self._know_all()
            names: list[str] = super().__dir__()
            return names

        def __reduce__(self) -> tuple[Any, ...]:
            self._know_all()
            reduced: tuple[Any, ...] = super().__reduce__()
            return reduced

    LazyModule.__module__ = lazy_module.__module__  # as pickles name it
    LazyModule.__qualname__ = lazy_module.__qualname__
    utils._LazyModule = import_utils._LazyModule = LazyModule
    utils.define_import_structure = import_utils.define_import_structure = define_some
