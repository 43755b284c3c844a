# SPDX-License-Identifier: Apache-2.0
"""The one step that talks to the Hub: fetch what a model needs into a cache folder, and check it.

Runs as a process of its own (`python -m hf_triton.download`, started by `hub.py`), because the Hub's client can wait
for ever on a Hub that accepts and never answers, and a process can be stopped at its deadline. It reads a `Job` as JSON
on standard input, writes a line of JSON to standard output for every event, and finds its access token in HF_TOKEN.
"""

from __future__ import annotations

import dataclasses
import errno
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

from hf_triton.errors import CheckpointError, HfTritonError, HubError
from hf_triton.snapshot import PICKLE, SAFETENSORS, is_sound, missing_weights, weight_files

PROGRESS_INTERVAL_S: Final = 1.0
NUM_WORKERS: Final = 4
NUM_TRIES: Final = 4
TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
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
    *SAFETENSORS,
    *PICKLE,
)
"""What to ask for, file by file, where a mirror of the Hub cannot list a repository."""

T = TypeVar("T")


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


def run(job: Job, report: Callable[[Mapping[str, Any]], None]) -> Path:
    """Fetch what the job wants, small files first.

    Args:
        job: What to fetch.
        report: Takes `{"num_bytes": so far, "total_bytes": in all, or None}` about once a second.

    Returns:
        The snapshot folder.

    Raises:
        HubError: It cannot be had.
        CheckpointError: The repository has no usable weights.
    """
    fetch = _Fetch(job, report)
    commit, sizes = fetch.list_files()
    small = [name for name in sizes if _matches(name, SMALL_FILES + (CODE_FILES if job.wants_code else ()))]
    fetch.check_room(sizes, small)
    snapshot = fetch.fetch(small, commit)
    if job.wants_weights:
        names = weight_files(snapshot, sizes, job.allows_pickle)
        _require_weights(job, names, sizes)
        fetch.check_room(sizes, names)
        fetch.fetch(names, commit)
        missing = missing_weights(snapshot, job.allows_pickle)
        if missing:
            raise CheckpointError("checkpoint_incomplete", f"{job.model} has no {', '.join(missing[:3])}")
    return snapshot


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _require_weights(job: Job, names: list[str], available: Iterable[str]) -> None:
    if names:
        return
    pickles = [name for name in available if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise HubError(
            "weights_not_safe",
            f"{job.model} has pickle weights only ({pickles[0]}), which can run code when they are read: choose a "
            "revision with safetensors, or set allow_pickle to true if you trust the repository",
        )
    raise CheckpointError("checkpoint_incomplete", f"{job.model} has no weights that transformers can read")


class _Fetch:
    """The real Hub client, with retries, room and checksums looked after."""

    def __init__(self, job: Job, report: Callable[[Mapping[str, Any]], None]) -> None:
        from huggingface_hub import HfApi

        self._job = job
        self._api = HfApi()
        self._progress = _Progress(report)

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
            if error.response is None or error.response.status_code != 404:
                raise
        # A mirror that serves files and no listing.
        return commit, dict.fromkeys([each.rfilename for each in info.siblings or []] or USUAL_FILES)

    def check_room(self, sizes: Mapping[str, int | None], names: Iterable[str]) -> None:
        """Refuse a download that the disk has no room for, before it begins."""
        wanted = sum(sizes.get(name) or 0 for name in names)
        folder = Path(self._job.cache_dir)
        folder.mkdir(parents=True, exist_ok=True)
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
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            paths = [path for path in pool.map(lambda name: self._fetch_checked(name, commit), names) if path]
        if not paths:
            raise CheckpointError("checkpoint_incomplete", f"{self._job.model} has none of the files of a model")
        return paths[0]

    def _note_revision(self, names: list[str], commit: str) -> None:
        """Let the client write down which commit the revision is, so that a later start needs no Hub."""
        if names and self._job.revision != commit:
            self._download(names[0], self._job.revision)

    def _fetch_checked(self, name: str, commit: str) -> Path | None:
        path = self._download(name, commit)
        if path is None or not self._progress.take_new(name) or is_sound(path):
            return path and _snapshot_of(path, name)
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        path = self._download(name, commit)
        if path is None or not is_sound(path):
            raise HubError(
                "hub_incomplete",
                f"{name} of {self._job.model} arrived damaged twice (its checksum is wrong): look for a proxy or "
                "mirror that alters files, and start again",
            )
        return _snapshot_of(path, name)

    def _download(self, name: str, revision: str) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        try:
            path = hf_hub_download(
                self._job.model,
                name,
                revision=revision,
                cache_dir=self._job.cache_dir,
                tqdm_class=self._progress.bar_class(name),
            )
        except RemoteEntryNotFoundError:
            return None
        return Path(path)


def _snapshot_of(path: Path, name: str) -> Path:
    return path.parents[name.count("/")]


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _retry(call: Callable[[], T]) -> T:
    """Call, again after a pause where the Hub is busy or cannot be reached."""
    from huggingface_hub.errors import HfHubHTTPError

    for attempt in range(NUM_TRIES):
        try:
            return call()
        except HfHubHTTPError as error:
            if attempt == NUM_TRIES - 1 or error.response is None or error.response.status_code not in TRANSIENT:
                raise
        except OSError:
            if attempt == NUM_TRIES - 1:
                raise
        time.sleep(2**attempt / 2)
    raise AssertionError("not reached")


class _Progress:
    """Adds the bytes of all downloads up and reports them now and then."""

    def __init__(self, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._report = report
        self._num_bytes = 0
        self._total_bytes = 0
        self._reported_at = 0.0
        self._new: set[str] = set()
        self._lock = threading.Lock()

    def take_new(self, name: str) -> bool:
        """Whether the file came over the network since it was asked last."""
        with self._lock:
            was_new = name in self._new
            self._new.discard(name)
            return was_new

    def _add(self, name: str, num_bytes: int, total_bytes: int = 0) -> None:
        with self._lock:
            self._new.add(name)
            self._num_bytes += num_bytes
            self._total_bytes += total_bytes
            if time.monotonic() - self._reported_at >= PROGRESS_INTERVAL_S:
                self._reported_at = time.monotonic()
                self._report({"num_bytes": self._num_bytes, "total_bytes": self._total_bytes})

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


def explain(error: BaseException, job: Job, environment: Mapping[str, str]) -> HfTritonError:
    """Say in one sentence what an error of the Hub's client means and what to do.

    Args:
        error: What the client raised; its causes are looked at too.
        job: What was being fetched.
        environment: To know whether there is an access token.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    chain = list(_causes(error))
    ours = next((each for each in chain if isinstance(each, HfTritonError)), None)
    if ours is not None:
        return ours
    model, page = job.model, f"{constants.ENDPOINT}/{job.model}"
    has_token = bool(environment.get("HF_TOKEN"))
    status = next((status for each in chain if (status := _status(each))), None)
    system = next((each.errno for each in chain if isinstance(each, OSError) and each.errno), None)
    if any(isinstance(each, GatedRepoError) for each in chain):
        remedy = (
            "accept its terms there with the account that HF_TOKEN belongs to"
            if has_token
            else ("accept its terms there and set HF_TOKEN to an access token of that account")
        )
        return HubError("hub_gated", f"{model} is gated, and this server has no access to it: open {page}, {remedy}")
    if any(isinstance(each, RevisionNotFoundError) for each in chain):
        return HubError(
            "hub_revision_not_found",
            f"{model} has no revision '{job.revision}': see {page}, and correct the setting revision",
        )
    if status in (401, 403) and has_token and not any(isinstance(each, RepositoryNotFoundError) for each in chain):
        return HubError(
            "hub_auth", f"the Hub refuses the access token in HF_TOKEN for {model} ({status}): make a new one"
        )
    if any(isinstance(each, RepositoryNotFoundError) for each in chain) or status in (401, 404):
        remedy = (
            "whether the access token in HF_TOKEN may read it"
            if has_token
            else ("set HF_TOKEN to an access token if it is private")
        )
        return HubError(
            "hub_not_found",
            f"there is no model {model} at {page}, or it is private: check huggingface_model, and {remedy}",
        )
    if status == 403:
        return HubError(
            "hub_auth", f"the Hub forbids {model} ({page}): set HF_TOKEN to an access token that may read it"
        )
    if status == 429:
        return HubError(
            "hub_rate_limited",
            f"the Hub answers 429 (too many requests) for {model}: wait some minutes, or set HF_TOKEN for more",
        )
    if system == errno.ENOSPC:
        return HubError(
            "disk_full", f"{job.cache_dir} has no room left for {model}: make room, or set TRANSFORMERS_CACHE"
        )
    if system in (errno.EACCES, errno.EPERM, errno.EROFS):
        return HubError(
            "cache_not_writable",
            f"{job.cache_dir} cannot be written to: set TRANSFORMERS_CACHE to a folder that can be",
        )
    cause = f"answers {status}" if status else f"cannot be reached ({type(chain[-1]).__name__})"
    return HubError(
        "hub_unavailable",
        f"{model} is not in any cache, and the Hub at {constants.ENDPOINT} {cause}: check the network, HF_ENDPOINT and "
        "HTTPS_PROXY, or copy the model into the cache",
    )


def _causes(error: BaseException) -> Iterable[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) and status >= 400 else None


def main() -> int:
    """Do the job on standard input; the last line says where the files are, or what went wrong."""
    job = Job(**json.load(sys.stdin))
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    out = sys.stdout
    sys.stdout = sys.stderr

    def report(event: Mapping[str, Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

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
