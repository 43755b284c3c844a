# SPDX-License-Identifier: Apache-2.0
"""From a model's name to a folder on disk: caches first, Hub second. Loads nothing and reads no weights.

Transformers 5 ignores TRANSFORMERS_CACHE, and every system has its own name for the access token: settled here.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hf_triton.errors import CheckpointError, HubError, SettingsError
from hf_triton.hub.download import Job
from hf_triton.hub.failures import OF_FOLDERS
from hf_triton.hub.process import Patience, download
from hf_triton.hub.snapshot import missing_files, missing_weights
from hf_triton.settings import ModelSettings

logger = logging.getLogger(__name__)

CACHE_VARIABLES: Final = ("TRANSFORMERS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
"""Variables that name a cache folder, in the order they are looked at; then comes `hub` in HF_HOME."""
TOKEN_VARIABLES: Final = (
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "PRIVATE_REPO_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACEHUB_API_TOKEN",
)
"""Variables that hold an access token (HF_TOKEN_PATH: the file of one), the first that is set winning."""
FOLDER_CACHE: Final = "hf_cache"
"""The cache inside a model folder, which survives the container together with the model repository."""
OFFLINE_VARIABLES: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables that forbid to ask the Hub, as its client and transformers know them."""


@dataclass(frozen=True)
class Wanted:
    """A repository, and what of it is needed."""

    name: str
    """Name on the Hub, or a folder."""
    revision: str
    setting: str
    """The setting that names it."""
    wants_model: bool
    """Whether it is needed for the model, not for its tokenizer alone."""
    wants_weights: bool
    wants_tokenizer: bool
    allows_pickle: bool
    wants_code: bool

    def missing_in(self, folder: Path) -> list[str]:
        """The files that `folder` lacks."""
        return missing_files(
            folder,
            wants_model=self.wants_model,
            wants_weights=self.wants_weights,
            wants_tokenizer=self.wants_tokenizer,
            allows_pickle=self.allows_pickle,
            wants_code=self.wants_code,
        )

    def has_only_pickle(self, folder: Path) -> bool:
        """Whether `folder` has weights, and of the kind alone that may not be read."""
        is_wanting = self.wants_weights and bool(missing_weights(folder, self.allows_pickle))
        return is_wanting and not missing_weights(folder, allows_pickle=True)


class Hub:
    """Finds checkpoints for one model folder.

    Args:
        model_folder: The folder with config.pbtxt: relative paths start there, and its `hf_cache` is the last cache.
        settings: Cache folder, revisions, deadlines.
        environment: Where cache and token variables are read.
    """

    def __init__(self, model_folder: Path, settings: ModelSettings, environment: Mapping[str, str]) -> None:
        self._model_folder = model_folder
        self._settings = settings
        self._environment = environment

    def model_folder(self) -> Path:
        """The folder with the model's files, downloaded if no cache has them all.

        Raises:
            HubError: It cannot be had.
            CheckpointError: It lacks files.
        """
        settings = self._settings
        self._warn_of_idle_settings()
        return self._find(
            Wanted(
                settings.huggingface_model,
                settings.revision,
                "huggingface_model",
                wants_model=True,
                wants_weights=settings.load_format == "auto",
                wants_tokenizer=settings.tokenizer is None,
                allows_pickle=settings.allow_pickle,
                wants_code=settings.trust_remote_code,
            )
        )

    def tokenizer_folder(self) -> Path | None:
        """The folder of a separate tokenizer; None where the model's own is used."""
        settings = self._settings
        if settings.tokenizer is None:
            return None
        return self._find(
            Wanted(
                settings.tokenizer,
                settings.tokenizer_revision,
                "tokenizer",
                wants_model=False,
                wants_weights=False,
                wants_tokenizer=True,
                allows_pickle=False,
                wants_code=settings.trust_remote_code,
            )
        )

    def _warn_of_idle_settings(self) -> None:
        settings = self._settings
        needs_hub = not _is_local(settings.huggingface_model)
        tokenizer_needs_hub = settings.tokenizer is not None and not _is_local(settings.tokenizer)
        idle = {
            "revision": settings.revision != "main" and not needs_hub,
            "tokenizer_revision": settings.tokenizer_revision != "main" and not tokenizer_needs_hub,
            "cache_dir": settings.cache_dir is not None and not (needs_hub or tokenizer_needs_hub),
        }
        for name in filter(idle.get, idle):
            logger.warning("the setting %s does nothing: what it is for does not come from the Hub", name)

    def _find(self, wanted: Wanted) -> Path:
        if _is_local(wanted.name):
            return self._local(wanted)
        lacking = []
        for cache in self.caches():
            try:
                folder = _cached_snapshot(wanted, cache)
                missing = [] if folder is None else wanted.missing_in(folder)
            except PermissionError as error:
                logger.warning("the cache %s is left out: %s may not be read", cache, error.filename)
                lacking.append(f"{cache} (which may not be read)")
                continue
            if folder is not None and not missing:
                logger.info("%s: taken from the cache %s", wanted.name, cache)
                return folder
            lacking.append(f"{cache} (without {', '.join(missing[:3])})" if missing else str(cache))
        if is_offline(self._environment):
            raise HubError(
                "offline_and_not_cached",
                f"{wanted.name} (revision {wanted.revision}) is complete in no cache, and HF_HUB_OFFLINE forbids a "
                f"download: unset it once, or mount a cache that has the model; looked in {', '.join(lacking)}; "
                f"{OF_FOLDERS}",
            )
        return self._download(wanted, self._writable_cache(wanted))

    def _local(self, wanted: Wanted) -> Path:
        folder = (self._model_folder / wanted.name).resolve()
        if not os.path.isdir(folder):
            base = "" if os.path.isabs(wanted.name) else f", taken from {self._model_folder.resolve()}"
            raise HubError(
                "path_not_found", f"there is no folder {folder} for '{wanted.name}'{base}: correct {wanted.setting}"
            )
        try:
            missing = wanted.missing_in(folder)
        except PermissionError as error:
            raise CheckpointError(
                "checkpoint_invalid",
                f"{error.filename} may not be read by the user of this process ({os.geteuid()}): change its mode or "
                "owner, or the user",
            ) from None
        if missing and wanted.has_only_pickle(folder):
            raise CheckpointError(
                "weights_not_safe",
                f"{folder} has pickle weights only, which can run code when they are read: convert them to "
                "safetensors, or set allow_pickle to true if you trust them",
            )
        if missing:
            raise CheckpointError(
                "checkpoint_incomplete", f"{folder} has no {', '.join(missing[:3])}: copy the whole checkpoint there"
            )
        logger.info("%s: taken from the folder %s", wanted.name, folder)
        return folder

    def can_fetch_again(self, folder: Path) -> bool:
        """Whether a damaged file of this snapshot can be removed and downloaded again."""
        if is_offline(self._environment) or not any(cache in folder.parents for cache in self.caches()):
            return False
        return all(os.access(each, os.W_OK) for each in (folder, folder.parents[1] / "blobs"))

    # --- caches ------------------------------------------------------------------------------------------------------

    def caches(self) -> list[Path]:
        """Every folder a checkpoint may be cached in, in the order they are looked at."""
        standard = [self._standard_cache()]
        return list(dict.fromkeys([*self._chosen_caches(), *standard, self._model_folder / FOLDER_CACHE]))

    def _chosen_caches(self) -> list[Path]:
        """The caches that somebody asked for by name."""
        named = [self._environment.get(variable) for variable in CACHE_VARIABLES]
        chosen = [_expanded(os.path.expandvars(text)) for text in named if text]
        if self._settings.cache_dir is not None:
            chosen.insert(0, self._model_folder / _expanded(self._settings.cache_dir))
        if self._environment.get("HF_HOME"):
            chosen.append(self._standard_cache())
        return chosen

    def _standard_cache(self) -> Path:
        """`hub` in HF_HOME, where the Hub's own client caches."""
        home = self._environment.get("HF_HOME")
        if not home:
            home = os.path.join(self._environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        return _expanded(os.path.expandvars(home)) / "hub"

    def _writable_cache(self, wanted: Wanted) -> Path:
        """Where a download goes: the caches asked for by name, or the standard one if it exists, else `hf_cache`.

        Raises:
            HubError: None of them can be written to.
        """
        chosen = self._chosen_caches()
        standard = self._standard_cache()
        candidates = chosen or [
            *([standard] if os.path.isdir(standard) else []),
            self._model_folder / FOLDER_CACHE,
            standard,
        ]
        for folder in candidates:
            if _is_writable(folder):
                return folder
        looked = ", ".join(map(str, dict.fromkeys(candidates)))
        raise HubError(
            "cache_not_writable",
            f"{wanted.name} is in no cache and must be downloaded, but {looked} cannot be written to: set "
            "TRANSFORMERS_CACHE to a folder that can be, or mount a cache that has the model",
        )

    # --- download ----------------------------------------------------------------------------------------------------

    def access_token(self) -> str | None:
        """The Hub's access token, by the first of `TOKEN_VARIABLES` that is set.

        Two that disagree give a warning, which shows neither.
        """
        found = {name: token for name in TOKEN_VARIABLES if (token := self._read_token(name))}
        if len(set(found.values())) > 1:
            names = list(found)
            logger.warning("%s hold different access tokens; %s is used", " and ".join(names), names[0])
        return next(iter(found.values()), None) or _read_file(self._standard_cache().parent / "token")

    def _read_token(self, variable: str) -> str | None:
        value = self._environment.get(variable, "").strip()
        if variable != "HF_TOKEN_PATH" or not value:
            return value or None
        token = _read_file(_expanded(value))
        if token is None:
            logger.warning("HF_TOKEN_PATH names %s, which cannot be read or is empty", value)
        return token

    def _download(self, wanted: Wanted, cache: Path) -> Path:
        logger.info("%s (revision %s): downloading to %s", wanted.name, wanted.revision, cache)
        job = Job(
            wanted.name,
            wanted.revision,
            str(cache),
            wants_weights=wanted.wants_weights,
            allows_pickle=wanted.allows_pickle,
            wants_code=wanted.wants_code,
            setting=wanted.setting,
        )
        started = time.monotonic()
        patience = Patience(self._settings.download_timeout_s, self._settings.download_stall_timeout_s)
        folder = download(job, self._child_environment(), patience)
        missing = wanted.missing_in(folder)
        if missing:
            raise CheckpointError(
                "checkpoint_incomplete",
                f"{wanted.name} (revision {wanted.revision}) has no {', '.join(missing[:3])} on the Hub: set "
                f"{wanted.setting} to a complete model in the form of transformers",
            )
        logger.info("%s: downloaded in %.1f s", wanted.name, time.monotonic() - started)
        return folder

    def _child_environment(self) -> dict[str, str]:
        """The download's environment: the one token that was chosen, and no other."""
        environment = {key: value for key, value in self._environment.items() if key not in TOKEN_VARIABLES}
        token = self.access_token()
        if token is not None:
            environment["HF_TOKEN"] = token
        return environment | {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "0"}


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether the Hub may not be asked, by the variables that its client and transformers know."""
    return any(environment.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in OFFLINE_VARIABLES)


def _is_local(name: str) -> bool:
    """Whether a model's or tokenizer's name is that of a folder on disk."""
    return name.startswith(("/", "./", "../"))


def _cached_snapshot(wanted: Wanted, cache: Path) -> Path | None:
    """The snapshot folder of a revision in the Hub client's cache layout, complete or not."""
    repository = cache / ("models--" + wanted.name.replace("/", "--"))
    commit: str | None = wanted.revision
    if not re.fullmatch(r"[0-9a-f]{40}", wanted.revision):
        commit = _read_file(repository / "refs" / wanted.revision)
    folder = repository / "snapshots" / commit if commit else None
    return folder if folder is not None and os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK) else None


def _expanded(path: str) -> Path:
    """A path of the environment or the settings, whose `~` is a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(f"{path} is in the home of a user who has none here") from None


def _read_file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _is_writable(folder: Path) -> bool:
    """Whether a folder can be written to, or be made."""
    existing = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
