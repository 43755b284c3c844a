# SPDX-License-Identifier: Apache-2.0
"""The one step that talks to the Hub: fetch what a model needs into a cache folder, and check it.

Runs as a process of its own (`python -m hf_triton.hub.download`, started by `download_process.py`), because the Hub's
client can wait for ever on a Hub that accepts and never answers, and a process can be stopped at its deadline. It reads
a `Job` as JSON on standard input, writes a line of JSON to standard output for every event, and finds its access token
in HF_TOKEN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from hf_triton.errors import CheckpointError, HubError
from hf_triton.hub.failures import Failure, explain, is_transient, one_line, status_of
from hf_triton.hub.snapshot import PICKLE, SAFETENSORS, is_sound, missing_weights, weight_files

PROGRESS_INTERVAL_S: Final = 1.0
NUM_WORKERS: Final = 4
NUM_TRIES: Final = 4
MAX_SMALL_BYTES: Final = 32 << 20
"""Files up to this size are checked even where they were cached before."""
STALE_AFTER_S: Final = 3600.0
CHUNK_BYTES: Final = 256 << 10
"""How often the client tells its progress; its own 10 MB look like a stall on a slow line."""
SMALL_FILES: Final = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.bpe",
    "additional_chat_templates/*.jinja",
)
CODE_FILES: Final = ("*.py",)
USUAL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    *SAFETENSORS,
    *PICKLE,
)
"""What to ask for, file by file, where a mirror of the Hub cannot list a repository."""

T = TypeVar("T")

logger = logging.getLogger("hf_triton.hub.download")  # this module's name is another when it is run


@dataclass(frozen=True)
class Job:
    """What to fetch."""

    model: str
    """Name on the Hub."""
    revision: str
    cache_dir: str
    wants_weights: bool
    allows_pickle: bool
    wants_code: bool
    """Whether the repository's Python files are fetched too."""
    setting: str = "huggingface_model"
    """The setting that names the model, for messages."""


def run(job: Job, report: Callable[[Mapping[str, Any]], None]) -> Path:
    """Fetch what the job wants, small files first.

    Args:
        job: What to fetch.
        report: Takes an event about once a second: `{"num_bytes": so far, "total_bytes": in all so far}`.

    Returns:
        The snapshot folder.

    Raises:
        HubError: It cannot be had.
        CheckpointError: The repository has no usable weights.
    """
    fetch = _Fetch(job, report)
    commit, sizes = fetch.list_files()
    small = [name for name in sizes if _matches(name, SMALL_FILES + (CODE_FILES if job.wants_code else ()))]
    fetch.check_room(sizes, small, commit)
    snapshot = fetch.fetch(small, commit)
    if job.wants_weights:
        names = weight_files(snapshot, sizes, job.allows_pickle)
        _require_weights(job, names, sizes)
        fetch.check_room(sizes, names, commit)
        fetch.fetch(names, commit)
        _require(job, missing_weights(snapshot, job.allows_pickle))
    return snapshot


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _require(job: Job, missing: list[str]) -> None:
    if missing:
        raise CheckpointError(
            "checkpoint_incomplete",
            f"{job.model} (revision {job.revision}) has no {', '.join(missing[:3])} on the Hub: set {job.setting} to a "
            "complete model in the form of transformers",
        )


def _require_weights(job: Job, names: list[str], available: Iterable[str]) -> None:
    if names:
        return
    pickles = [name for name in available if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles and not job.allows_pickle:
        raise HubError(
            "weights_not_safe",
            f"{job.model} has pickle weights only ({pickles[0]}), which can run code when they are read: choose a "
            "revision with safetensors, or set allow_pickle to true if you trust the repository",
        )
    _require(job, ["weights that transformers can read"])


class _Fetch:
    """The real Hub client, with retries, room and checksums looked after."""

    def __init__(self, job: Job, report: Callable[[Mapping[str, Any]], None]) -> None:
        from huggingface_hub import HfApi, constants

        constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
        self._job = job
        self._api = HfApi()
        self._progress = _Progress(report)
        self._mending = threading.Lock()
        self._repository = Path(job.cache_dir) / ("models--" + job.model.replace("/", "--"))

    def list_files(self) -> tuple[str, dict[str, int | None]]:
        """The commit behind the revision, and its files with their sizes in bytes."""
        from huggingface_hub.errors import HfHubHTTPError

        job = self._job
        revision = None if job.revision == "main" else job.revision
        info = _retry(lambda: self._api.model_info(job.model, revision=revision))
        commit = info.sha or job.revision
        try:
            tree = _retry(lambda: list(self._api.list_repo_tree(job.model, recursive=True, revision=commit)))
            return commit, {each.path: each.size for each in tree if hasattr(each, "size")}
        except HfHubHTTPError as error:
            if status_of(error) != 404:
                raise
        # A mirror that serves files and no listing.
        return commit, dict.fromkeys([each.rfilename for each in info.siblings or []] or USUAL_FILES)

    def check_room(self, sizes: Mapping[str, int | None], names: Iterable[str], commit: str) -> None:
        """Refuse a download that the disk has no room for, before it begins; files that are there already are free."""
        snapshot = self._repository / "snapshots" / commit
        wanted = sum(sizes.get(name) or 0 for name in names if not (snapshot / name).exists())
        folder = Path(self._job.cache_dir)
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale(self._repository)
        free = shutil.disk_usage(folder).free
        if wanted > free:
            raise HubError(
                "disk_full",
                f"{self._job.model} needs {_gigabytes(wanted)} and {folder} has {_gigabytes(free)} free: make room, or "
                "set TRANSFORMERS_CACHE to a folder on a larger disk",
            )

    def fetch(self, names: Iterable[str], commit: str) -> Path:
        """Fetch files and check the new ones; the snapshot folder they are in."""
        names = list(names)
        self._note_revision(names, commit)
        pool = ThreadPoolExecutor(NUM_WORKERS)
        try:
            paths = [path for path in pool.map(lambda name: self._fetch_checked(name, commit), names) if path]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # one file's failure is told before the others are done
        if not paths:
            _require(self._job, ["file of a model"])
        return paths[0]

    def _note_revision(self, names: list[str], commit: str) -> None:
        """Let the client write down which commit the revision is, so that a later start needs no Hub."""
        if names and self._job.revision != commit:
            self._download(names[0], self._job.revision)

    def _fetch_checked(self, name: str, commit: str) -> Path | None:
        path = self._download(name, commit)
        if path is not None and self._is_worth_a_check(path, name) and self._is_damaged(path):
            path = self._fetch_again(path, name, commit)
        return path and _snapshot_of(path, name)

    def _fetch_again(self, path: Path, name: str, commit: str) -> Path | None:
        with self._mending:  # one at a time, because files of the same content share a blob
            if self._is_damaged(path):
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            again = self._download(name, commit)
            if again is not None and self._is_damaged(again):
                raise HubError(
                    "hub_incomplete",
                    f"{name} of {self._job.model} arrived damaged twice (its checksum is wrong): look for a proxy or "
                    "mirror that alters files, and start again",
                )
            return again

    def _is_worth_a_check(self, path: Path, name: str) -> bool:
        """Whether the file is new; of what was cached before, small files alone are looked at."""
        return self._progress.is_new(name) or not path.exists() or path.stat().st_size < MAX_SMALL_BYTES

    def _is_damaged(self, path: Path) -> bool:
        try:
            return not is_sound(path, self._progress.note_check)
        except FileNotFoundError:  # its blob was another file's too, and was removed
            return True

    def _download(self, name: str, revision: str) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        def download() -> str:
            return hf_hub_download(
                self._job.model,
                name,
                revision=revision,
                cache_dir=self._job.cache_dir,
                tqdm_class=self._progress.bar_class(name),
            )

        try:
            return Path(_retry(download))
        except RemoteEntryNotFoundError:
            return None


def _snapshot_of(path: Path, name: str) -> Path:
    return path.parents[name.count("/")]


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def remove_stale(repository: Path) -> None:
    """Remove the parts of files that downloads left which were killed; the client begins a file afresh each time."""
    for part in repository.glob("blobs/*.incomplete"):
        with contextlib.suppress(OSError):  # another process may have finished or removed it
            if time.time() - part.stat().st_mtime > STALE_AFTER_S:
                part.unlink()


def _retry(call: Callable[[], T]) -> T:
    """Call, again after a pause where the Hub is busy or a connection was lost."""
    for attempt in range(NUM_TRIES - 1):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            logger.warning("%s; trying again", Failure(error, has_token=False).describe())
        time.sleep(2**attempt / 2)
    return call()


class _Progress:
    """Adds the bytes of all downloads up and reports them now and then."""

    def __init__(self, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._report = report
        self._num_bytes = 0
        self._total_bytes = 0
        self._reported_at = 0.0
        self._new: set[str] = set()
        self._lock = threading.Lock()

    def is_new(self, name: str) -> bool:
        """Whether the file came over the network."""
        with self._lock:
            return name in self._new

    def note_check(self) -> None:
        """Show a sign of life while a checksum is computed, which takes minutes for a large file."""
        with self._lock:
            self._report_sometimes(is_checking=True)

    def _add(self, name: str, num_bytes: int, total_bytes: int = 0) -> None:
        with self._lock:
            self._new.add(name)
            self._num_bytes += num_bytes
            self._total_bytes += total_bytes
            self._report_sometimes(is_checking=False)

    def _report_sometimes(self, *, is_checking: bool) -> None:
        if time.monotonic() - self._reported_at >= PROGRESS_INTERVAL_S:
            self._reported_at = time.monotonic()
            so_far = {"num_bytes": self._num_bytes, "total_bytes": self._total_bytes}
            self._report(so_far | {"is_checking": is_checking})

    def bar_class(self, name: str) -> type[Any]:
        """A tqdm class, which is how the client tells its progress."""
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        add = self._add

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs["disable"] = True
                super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
                add(name, 0, int(kwargs.get("total") or 0))

            def update(self, n: float | None = 1) -> bool | None:
                add(name, int(n or 0))
                return None

        return Bar


class _Teller(logging.Handler):
    """Sends the warnings of the Hub's client, about retries and waits, to the process that reads our events."""

    def __init__(self, report: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = report

    def emit(self, record: logging.LogRecord) -> None:
        self._tell({"warning": one_line(record.getMessage())})


def main() -> int:
    """Do the job on standard input; the last line says where the files are, or what went wrong."""
    job = Job(**json.load(sys.stdin))
    out = sys.stdout
    sys.stdout = sys.stderr

    def report(event: Mapping[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")  # in one piece, because several threads report
        out.flush()

    for name in ("huggingface_hub", logger.name):
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).addHandler(_Teller(report))
    try:
        report({"snapshot": str(run(job, report))})
    except Exception as error:
        reason = explain(error, job, os.environ)
        report({"code": reason.code, "sentence": reason.sentence})
        return 1
    return 0


def encode(job: Job) -> bytes:
    """A job as `main` reads it."""
    return json.dumps(dataclasses.asdict(job)).encode()


if __name__ == "__main__":
    sys.exit(main())
