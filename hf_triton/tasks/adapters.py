# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapters of a folder by name: those of the setting `adapters`, and those in its subfolder, while it serves.

A subfolder of `adapters/` with an adapter is one more adapter, of the subfolder's name. It may come, change and go at
any time; sequences that have begun keep the adapter that they have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_triton.errors import RequestError, as_own_error
from hf_triton.hub.resolve import ADAPTER_FILES
from hf_triton.protocol.validation import suggest
from hf_triton.settings import ADAPTER_NAME

if TYPE_CHECKING:
    from hf_triton.runner.adapters import Adapter, Adapters

logger = logging.getLogger(__name__)

SUBFOLDER: Final = "adapters"
SCAN_INTERVAL_S: Final = 1.0
ENDS_A_SENTENCE: Final = "adapter_invalid"
"""The code whose sentences go on after the adapter's name; others are whole ones, such as the Hub's."""


@dataclass(frozen=True)
class _Found:
    """An adapter on disk, and what came of loading it."""

    version: object
    """Changes with its files."""
    adapter: Adapter | None
    fault: str = ""
    """Why there is none, as the end of a sentence; not the exception, whose frames hold tensors."""


class AdapterStore:
    """Finds and loads adapters. May be used from several threads.

    Args:
        adapters: Those in the model.
        sources: Hub names and paths by adapter name, as the setting has them.
        model_folder: Has the subfolder.
        resolve: From a source to the adapter's folder on disk.
    """

    def __init__(
        self, adapters: Adapters, sources: Mapping[str, str], model_folder: Path, resolve: Callable[[str], Path]
    ) -> None:
        self._adapters = adapters
        self._folder = model_folder / SUBFOLDER
        self._lock = threading.Lock()
        self._scanned_s = float("-inf")
        self._of_folder: dict[str, _Found] = {}
        self._of_settings = {name: self._load(name, partial(resolve, source)) for name, source in sources.items()}
        self.names()

    def names(self) -> list[str]:
        """The names of all adapters, those that cannot be used included."""
        with self._lock:
            self._scan()
            return sorted({*self._of_settings, *self._of_folder})

    def get(self, name: str) -> Adapter:
        """The adapter of a name.

        Raises:
            RequestError: There is none, or it cannot be used.
        """
        with self._lock:
            self._scan()
            found = self._of_settings.get(name) or self._of_folder.get(name)
        if found is None:
            names = self.names()
            known = suggest(name, names) if names else ": this model has no adapters"
            raise RequestError("adapter_not_found", f"there is no adapter {name!r}{known}")
        if found.adapter is None:
            raise RequestError("adapter_invalid", f"the adapter {name!r} {found.fault}")
        return found.adapter

    def _scan(self) -> None:
        """Load what has come to the subfolder, and forget what has gone, at most once a second."""
        if time.monotonic() - self._scanned_s < SCAN_INTERVAL_S:
            return
        found = {}
        try:
            folders = sorted(self._folder.iterdir())
        except OSError:  # there is none, or none that this process may read
            folders = []
        for folder in folders:
            version = _version(folder)
            if version is None or not ADAPTER_NAME.fullmatch(folder.name) or folder.name in self._of_settings:
                continue
            known = self._of_folder.get(folder.name)
            if known is None or known.version != version:
                known = self._load_again(known, folder, version)
            found[folder.name] = known
        for name in self._of_folder.keys() - found.keys():
            logger.info("adapter %s: dropped", name)
        self._of_folder = found
        self._adapters.sweep()
        self._scanned_s = time.monotonic()

    def _load_again(self, known: _Found | None, folder: Path, version: object) -> _Found:
        """Load an adapter whose files have come or changed; one that is in use stays until the new files are whole."""
        loaded = self._load(folder.name, partial(Path, folder), version)
        if known is None or known.adapter is None:
            return loaded
        if loaded.adapter is None or _version(folder) != version:
            logger.warning("adapter %s: stays as it was before its files changed", folder.name)
            return _Found(version, known.adapter)
        return loaded

    def _load(self, name: str, find: Callable[[], Path], version: object = None) -> _Found:
        try:
            adapter = self._adapters.load(find(), name)
        except Exception as error:
            own = as_own_error(f"loading the adapter {name}", error)
            fault = own.sentence if own.code == ENDS_A_SENTENCE else f"cannot be loaded: {own.sentence}"
            logger.error("adapter %s: its requests are refused: it %s", name, fault)
            return _Found(version, None, fault)
        logger.info("adapter %s: loaded", name)
        return _Found(version, adapter)


def _version(folder: Path) -> object:
    """What changes with an adapter's files; None if they are not all there."""
    try:
        return tuple(
            (status.st_mtime_ns, status.st_size) for status in ((folder / name).stat() for name in ADAPTER_FILES)
        )
    except OSError:
        return None
