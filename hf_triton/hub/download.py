# SPDX-License-Identifier: Apache-2.0
"""The download process: fetches the files of a checkpoint into a cache folder, and verifies them.

`download_parent.py` starts it as `python -m hf_triton.hub.download`, because the Hub's client can block forever on a
server that accepts connections and never answers, and only a process can be killed at its deadline. It reads one line
of JSON from standard input, `{"spec": fields of CheckpointSpec, "cache_dir": path}`, and takes the access token from
HF_TOKEN. It writes events to standard output, one line of JSON each, and exits when its standard input ends with its
parent.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from hf_triton.errors import CheckpointError, HubError
from hf_triton.files import ADAPTER_IS_PICKLE, ADAPTER_PICKLE
from hf_triton.hub.failures import Failure, explain_download, incomplete_on_hub, is_transient, one_line
from hf_triton.hub.gguf import SAFETENSORS, choose_gguf, part_names
from hf_triton.hub.headers import write_header
from hf_triton.hub.kernels import fitting_builds
from hf_triton.hub.kind import describe_other_kind
from hf_triton.hub.sentence_names import SPARSE_LINEAR, files_of_modules
from hf_triton.hub.snapshot import (
    TOKENIZER_FILES,
    is_sound,
    lacking_weights,
    missing_files,
    remove_blob,
    unchecked_mark,
    weight_files,
)
from hf_triton.hub.spec import CheckpointSpec

NUM_TRIES: Final = 4
SMALL_FILES: Final = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.bpe",
    "*.spm",
    "*.codes",
    "prophetnet.tokenizer",
    "additional_chat_templates/*.jinja",
    *SPARSE_LINEAR,
)

T = TypeVar("T")
Report = Callable[[Mapping[str, Any]], None]
"""Takes an event: `{"num_bytes": so far, "total_bytes": known so far, "is_checking": bool}` or `{"warning": text}`."""

logger = logging.getLogger("hf_triton.hub.download")  # `__name__` is `__main__` in the process


class Downloader:
    """Downloads one checkpoint with the Hub's own client, and adds retries, a check of disk space, and checksums.

    `cache_dir` has the layout of the Hub's client; `report` gets an event a second, from several threads.
    """

    def __init__(self, spec: CheckpointSpec, cache_dir: str, report: Report) -> None:
        from huggingface_hub import HfApi, constants

        constants.DOWNLOAD_CHUNK_SIZE = 256 << 10  # between progress updates; 10 MB look like a stall on a slow line
        self._spec = spec
        self._cache_dir = Path(cache_dir)
        self._repository = self._cache_dir / spec.cache_name
        self._api = HfApi()
        self._progress = _Progress(report)
        self._repair_lock = threading.Lock()
        self._checksums: dict[str, str] = {}

    def run(self) -> Path:
        """Download the needed files, small ones first.

        Returns:
            The snapshot folder, which has every needed file.

        Raises:
            HubError: There is no room, the weights are pickle files only, or a file arrives damaged.
            CheckpointError: The repository lacks needed files.
        """
        spec = self._spec
        commit, sizes = self._list_files()
        if spec.repo_type == "kernel":
            return self._fetch(fitting_builds(sizes), sizes, commit)
        if spec.files:
            missing = [name for name in spec.files if name not in sizes]
            if missing and ADAPTER_PICKLE in sizes:
                raise HubError("weights_not_safe", f"{spec.name} {ADAPTER_IS_PICKLE}")
            if missing:
                raise incomplete_on_hub(spec, missing)
            return self._fetch(list(spec.files), sizes, commit)
        gguf = choose_gguf(sizes, spec.gguf_file, allow_pickle=spec.allow_pickle) if spec.needs_config else None
        patterns = SMALL_FILES + (("*.py",) if spec.trust_remote_code else ())
        small = [name for name in sizes if _matches(name, patterns)]
        if spec.headers_only:
            small = [name for name in small if name.endswith((".json", ".py")) and name not in TOKENIZER_FILES]
        if gguf is not None and spec.headers_only:
            return self._fetch_headers(part_names(gguf), sizes, commit)
        if gguf is not None:
            return self._fetch([*small, *part_names(gguf)], sizes, commit)
        if not small:
            self._check_kind(self._repository, sizes)
        snapshot = self._fetch(small, sizes, commit)
        if spec.needs_weights:
            names = weight_files(snapshot, sizes, spec.allow_pickle)
            if not names:
                self._check_kind(snapshot, sizes)
                raise self._no_weights(sizes)
            if spec.headers_only:
                return self._fetch_headers(names, sizes, commit)
            self._fetch(names, sizes, commit)
        if spec.needs_config:
            self._fetch_modules(snapshot, sizes, commit)
        missing = missing_files(snapshot, spec)
        if missing:
            raise incomplete_on_hub(spec, missing)
        return snapshot

    def _fetch_headers(self, names: list[str], sizes: Mapping[str, int], commit: str) -> Path:
        """Write files with the headers of weights alone; returns the snapshot folder."""
        snapshot = self._repository / "snapshots" / commit
        if missing := [name for name in names if name not in sizes]:
            raise incomplete_on_hub(self._spec, missing)
        snapshot.mkdir(parents=True, exist_ok=True)

        def write(name: str) -> None:
            _retry(lambda: write_header(self._spec.name, name, commit, sizes[name], snapshot))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, names))
        return snapshot

    def _fetch_modules(self, snapshot: Path, sizes: Mapping[str, int], commit: str) -> None:
        """Download what modules.json of sentence-transformers names, if there is one."""
        spec = self._spec
        names = files_of_modules(snapshot, sizes, allow_pickle=spec.allow_pickle, needs_weights=spec.needs_weights)
        for name in names:
            pickled = f"{name.rpartition('/')[0]}/pytorch_model.bin"
            if name.endswith(".safetensors") and name not in sizes and pickled in sizes:
                raise self._no_weights([pickled])
        there = [name for name in names if name in sizes]  # the others are reported as missing
        if there:
            self._fetch(there, sizes, commit)

    def _list_files(self) -> tuple[str, dict[str, int]]:
        """The commit behind the revision, and the sizes of its files in bytes."""
        spec = self._spec
        revision = None if spec.revision == "main" else spec.revision
        of: dict[str, Any] = {"repo_type": spec.repo_type}
        commit = _retry(lambda: self._api.repo_info(spec.name, revision=revision, **of)).sha or spec.revision
        tree = _retry(lambda: list(self._api.list_repo_tree(spec.name, recursive=True, revision=commit, **of)))
        files: dict[str, Any] = {entry.path: entry for entry in tree if hasattr(entry, "size")}
        self._checksums = {name: file.lfs.sha256 if file.lfs else file.blob_id for name, file in files.items()}
        return commit, {name: file.size for name, file in files.items()}

    def _check_kind(self, folder: Path, names: Collection[str]) -> None:
        other = describe_other_kind(folder, names)
        if other:
            raise CheckpointError("checkpoint_incomplete", f"{self._spec.name} {other}")

    def _no_weights(self, available: Collection[str]) -> Exception:
        pickles = [name for name in available if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        if not pickles or self._spec.allow_pickle:
            lacking = lacking_weights(available)
            named = "weights that transformers can read" if lacking == SAFETENSORS[1] else lacking
            return incomplete_on_hub(self._spec, [named])
        return HubError(
            "weights_not_safe",
            f"{self._spec.name} has pickle weights only ({pickles[0]}), which can run code when they are read: choose "
            "a revision with safetensors, or set allow_pickle to true if you trust the repository",
        )

    def _fetch(self, names: list[str], sizes: Mapping[str, int], commit: str) -> Path:
        """Download files that are not cached, and verify them; returns the snapshot folder."""
        if not names:
            part = "build for this processor and PyTorch" if self._spec.repo_type == "kernel" else "file of a model"
            raise incomplete_on_hub(self._spec, [part])
        self.check_disk_space({name: sizes[name] for name in names}, commit)
        snapshot = self._repository / "snapshots" / commit
        marks = {name: unchecked_mark(snapshot, name) for name in names}
        for name in (name for name in names if not (snapshot / name).exists()):
            marks[name].parent.mkdir(parents=True, exist_ok=True)
            marks[name].write_text(self._checksums.get(name, ""), encoding="ascii")
        if self._spec.revision != commit:  # the client records the revision's commit, which later starts read offline
            self._download(names[0], self._spec.revision)
        pool = ThreadPoolExecutor(4)
        try:
            paths = list(pool.map(lambda name: self._download_verified(name, commit, marks[name]), names))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a failure is reported while other files still download
        return paths[0].parents[names[0].count("/")]

    def check_disk_space(self, sizes: Mapping[str, int], commit: str) -> None:
        """Refuse a download that does not fit on the disk, before it begins; files that are cached are not counted."""
        snapshot = self._repository / "snapshots" / commit
        needed = sum(size for name, size in sizes.items() if not (snapshot / name).exists())
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        remove_stale(self._repository)
        free = shutil.disk_usage(self._cache_dir).free
        if needed > free:
            raise HubError(
                "disk_full",
                f"{self._spec.name} needs {_decimal(needed)} and {self._cache_dir} has {_decimal(free)} free: make "
                "room, or set TRANSFORMERS_CACHE to a folder on a larger disk",
            )

    def _download(self, name: str, revision: str) -> Path:
        from huggingface_hub import hf_hub_download

        spec, given = self._spec, {"cache_dir": self._cache_dir, "tqdm_class": self._progress.bar_class()}
        fetch = partial(hf_hub_download, spec.name, name, repo_type=spec.repo_type, revision=revision, **given)
        return Path(_retry(fetch))

    def _download_verified(self, name: str, commit: str, mark: Path) -> Path:
        """Download a file, twice if its checksum is wrong; cached files over 32 MiB are not verified again.

        Its mark says that it is not verified yet, to whom this process leaves it.
        """
        path = self._download(name, commit)
        is_small = not path.exists() or path.stat().st_size < 32 << 20
        if (is_small or mark.exists()) and self._is_damaged(path, name):
            path = self._repair(path, name, commit)
        mark.unlink(missing_ok=True)
        return path

    def _repair(self, path: Path, name: str, commit: str) -> Path:
        """Download a file again, unless another thread has; if it is damaged again, nothing of it stays."""
        with self._repair_lock:  # one at a time, because files with the same content share a blob
            if self._is_damaged(path, name):
                remove_blob(path)
            path = self._download(name, commit)
            if not self._is_damaged(path, name):
                return path
            remove_blob(path)
        raise HubError(
            "hub_incomplete",
            f"{name} of {self._spec.name} arrived damaged twice (its checksum is wrong): look for a proxy or mirror "
            "that alters files, and start again",
        )

    def _is_damaged(self, path: Path, name: str) -> bool:
        try:
            return not is_sound(path, self._progress.report_check, self._checksums.get(name, ""))
        except FileNotFoundError:  # another file shared its blob, which was removed
            return True


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _decimal(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def remove_stale(repository: Path) -> None:
    """Remove partial files of downloads that were killed, after an hour; the client never resumes them."""
    for part in repository.glob("blobs/*.incomplete"):
        with contextlib.suppress(OSError):  # another process may have finished or removed it
            if time.time() - part.stat().st_mtime > 3600:
                part.unlink()


def _retry(call: Callable[[], T]) -> T:
    """Call, and again after a pause if the Hub is busy or a connection was lost."""
    for attempt in range(NUM_TRIES - 1):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            logger.warning("%s; retrying", Failure(error, has_token=False).describe())
        time.sleep(2**attempt / 2)
    return call()


class _Progress:
    """Sums the bytes of all files and reports them at intervals."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._num_bytes = 0
        self._total_bytes = 0
        self._reported_at = 0.0
        self._lock = threading.Lock()

    def report_check(self) -> None:
        """Show that a checksum is being computed, which takes minutes for a large file."""
        with self._lock:
            self._report_at_interval(is_checking=True)

    def _add(self, num_bytes: int, total_bytes: int = 0) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            self._total_bytes += total_bytes
            self._report_at_interval(is_checking=False)

    def _report_at_interval(self, *, is_checking: bool) -> None:
        if time.monotonic() - self._reported_at >= 1:
            self._reported_at = time.monotonic()
            counts = {"num_bytes": self._num_bytes, "total_bytes": self._total_bytes}
            self._report(counts | {"is_checking": is_checking})

    def bar_class(self) -> type[Any]:
        """A tqdm class, through which the client reports its progress."""
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        add = self._add

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs["disable"] = True
                super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
                add(0, int(kwargs.get("total") or 0))

            def update(self, n: float | None = 1) -> bool | None:
                add(int(n or 0))
                return None

        return Bar


class _WarningReporter(logging.Handler):
    """Turns log records into events."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report({"warning": one_line(record.getMessage())})


def _exit_with_parent() -> None:
    """Exit when standard input ends: only the parent holds its other end."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def main() -> int:
    """Serve the request on standard input; the last event has the snapshot folder, or a code and a sentence."""
    request = json.loads(sys.stdin.readline())
    spec, cache_dir = CheckpointSpec(**request["spec"]), request["cache_dir"]
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    out = sys.stdout
    sys.stdout = sys.stderr

    def report(event: Mapping[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")  # in one write, because several threads report
        out.flush()

    for name in ("huggingface_hub", logger.name):
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).addHandler(_WarningReporter(report))
    try:
        report({"snapshot": str(Downloader(spec, cache_dir, report).run())})
    except Exception as error:
        reason = explain_download(error, spec, cache_dir, os.environ)
        report({"code": reason.code, "sentence": reason.sentence})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
