# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapters of a folder by name: those of the setting `adapters`, and those in its subfolder, while it serves.

A subfolder of `adapters/` with an adapter is one more adapter, of the subfolder's name. It may come, change and go at
any time; sequences that have begun keep the adapter that they have.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_triton.errors import RequestError, as_own_error, where
from hf_triton.hub.locate import ADAPTER_FILES
from hf_triton.protocol.validation import suggest
from hf_triton.settings import ADAPTER_NAME

if TYPE_CHECKING:
    from hf_triton.runner.lora.model_adapters import Adapter, Adapters

logger = logging.getLogger(__name__)

SUBFOLDER: Final = "adapters"
SCAN_INTERVAL_S: Final = 0.5
MIN_PAUSE_S: Final = 0.05
"""The pause between two looks at the subfolder, however many requests name adapters that are not there."""
NUM_LOADERS: Final = 4
"""Adapters that are read at a time."""
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


class Waiter:
    """A request that needs adapters before it can be prepared.

    Args:
        names: Of the adapters.
        start: Called once, without a lock, when all of them are loaded, refused or not there.
    """

    def __init__(self, names: Collection[str], start: Callable[[], None]) -> None:
        self.names = frozenset(names)
        self.start = start
        self.is_done = False
        """Whether it has started, or was given up."""
        self.scan = 0
        """The look at the subfolder that tells which names are not there: the first that begins after the request."""


class AdapterStore:
    """Finds and loads adapters. May be used from several threads.

    No request waits for storage but for the adapter that it names. One thread looks at the subfolder; others read the
    adapters that have come, so that one that takes long holds up none. The table changes between two requests, under a
    lock that is held for no file.

    Args:
        sources: Hub names and paths by adapter name, as the setting has them.
        resolve: From a source to the adapter's folder on disk.
    """

    def __init__(
        self, adapters: Adapters, sources: Mapping[str, str], model_folder: Path, resolve: Callable[[str], Path]
    ) -> None:
        self._adapters = adapters
        self._folder = model_folder / SUBFOLDER
        self._lock = threading.Lock()
        self._of_folder: dict[str, _Found] = {}
        self._of_settings = {name: self._load(name, partial(resolve, source)) for name, source in sources.items()}
        self._coming: dict[str, object] = {}  # versions that are to be loaded, by name
        self._queue: deque[Path] = deque()
        self._num_loaders = 0
        self._num_begun = self._num_ended = 0  # looks at the subfolder
        self._waiters: set[Waiter] = set()
        self._wake, self._is_closed = threading.Event(), threading.Event()
        self._scan()
        self._load_queued()
        watched = (weakref.ref(self), self._wake, self._is_closed)
        threading.Thread(target=_watch, args=watched, name="hf_triton-adapters", daemon=True).start()

    def close(self) -> None:
        """Look at the subfolder no more. A thread that reads an adapter is not waited for."""
        self._is_closed.set()
        self._wake.set()

    def names(self) -> list[str]:
        """The names of all adapters, those that cannot be used included."""
        with self._lock:
            return sorted({*self._of_settings, *self._of_folder})

    def when_known(self, waiter: Waiter) -> None:
        """Start a request as soon as its adapters can be had by `get`, or refused: at once, if that is now."""
        with self._lock:
            if waiter.is_done:
                return
            waiter.scan = self._num_begun + 1
            waiter.is_done = self._is_ready(waiter) or self._is_closed.is_set()
            if not waiter.is_done:
                self._waiters.add(waiter)
        if waiter.is_done:
            waiter.start()
        else:
            self._wake.set()

    def give_up(self, waiter: Waiter) -> bool:
        """Do not start a request any more; False: it has started, or was given up before."""
        with self._lock:
            is_first, waiter.is_done = not waiter.is_done, True
            self._waiters.discard(waiter)
        return is_first

    def get(self, name: str) -> Adapter:
        """The adapter of a name; one whose files have changed is the former one until the new one is loaded.

        Raises:
            RequestError: There is none, or it cannot be used.
        """
        with self._lock:
            found = self._of_settings.get(name) or self._of_folder.get(name)
            is_coming = name in self._coming
        if found is not None and found.adapter is not None:
            return found.adapter
        if is_coming:
            raise RequestError(
                "adapter_not_found", f"the adapter {name!r} is being loaded: send the request again", field="lora_name"
            )
        if found is not None:
            raise RequestError("adapter_invalid", f"the adapter {name!r} {found.fault}", field="lora_name")
        names = self.names()
        known = suggest(name, names) if names else ": this model has no adapters"
        raise RequestError("adapter_not_found", f"there is no adapter {name!r}{known}", field="lora_name")

    def _start_ready(self) -> None:
        """Start the requests whose adapters are known."""
        with self._lock:
            ready = list(filter(self._is_ready, self._waiters))
            self._waiters.difference_update(ready)
            for waiter in ready:
                waiter.is_done = True
        for waiter in ready:
            waiter.start()

    def _is_ready(self, waiter: Waiter) -> bool:
        for name in waiter.names:
            found = self._of_settings.get(name) or self._of_folder.get(name)
            is_missing = found is None and self._num_ended < waiter.scan
            if (found is None or found.adapter is None) and (is_missing or name in self._coming):
                return False
        return True

    # --- the subfolder -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """See what has come to the subfolder and what has gone, and have threads load what has come."""
        self._scan()
        with self._lock:
            num_more = min(len(self._queue), NUM_LOADERS - self._num_loaders)
            self._num_loaders += num_more
        for _ in range(num_more):
            threading.Thread(target=self._run_loader, name="hf_triton-adapter", daemon=True).start()
        self._start_ready()
        self._adapters.sweep()

    def _scan(self) -> None:
        self._num_begun += 1
        versions = self._read_versions()
        with self._lock:
            for folder, version in versions.items():
                known = self._of_folder.get(folder.name)
                if folder.name not in self._coming and (known is None or known.version != version):
                    self._coming[folder.name] = version
                    self._queue.append(folder)
            gone = self._of_folder.keys() - {folder.name for folder in versions}
            for name in gone:
                del self._of_folder[name]
            self._num_ended = self._num_begun
        for name in gone:
            logger.info("adapter %s: dropped", name)

    def _read_versions(self) -> dict[Path, object]:
        """The subfolders with an adapter; those whose names are the setting's are left out."""
        try:
            folders = sorted(self._folder.iterdir())
        except OSError:  # there is none, or none that this process may read
            return {}
        named = [folder for folder in folders if ADAPTER_NAME.fullmatch(folder.name)]
        versions = {folder: _version(folder) for folder in named if folder.name not in self._of_settings}
        return {folder: version for folder, version in versions.items() if version is not None}

    def _run_loader(self) -> None:
        try:
            self._load_queued()
        finally:
            with self._lock:
                self._num_loaders -= 1

    def _load_queued(self) -> None:
        """Load what has come, one after the other."""
        while True:
            with self._lock:
                if not self._queue:
                    return
                folder = self._queue.popleft()
                version, known = self._coming[folder.name], self._of_folder.get(folder.name)
            found = self._load_again(known, folder, version)
            with self._lock:
                del self._coming[folder.name]
                self._of_folder[folder.name] = found
            self._start_ready()

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


def _watch(store: weakref.ref[AdapterStore], wake: threading.Event, is_closed: threading.Event) -> None:
    """Look at a store's subfolder every now and then, and when `wake` is set, until it is closed or gone."""
    while not is_closed.wait(MIN_PAUSE_S):
        wake.wait(SCAN_INTERVAL_S)
        wake.clear()
        alive = store()
        if alive is None or is_closed.is_set():
            return
        try:
            alive.look()
        except Exception as error:  # a fault of peft's, while adapters are deleted
            logger.error("the folder of adapters was not looked at: %s", where(error))
        del alive


def _version(folder: Path) -> object:
    """What changes with an adapter's files; None if they are not all there."""
    try:
        return tuple(
            (status.st_mtime_ns, status.st_size) for status in ((folder / name).stat() for name in ADAPTER_FILES)
        )
    except OSError:
        return None
