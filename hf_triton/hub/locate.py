# SPDX-License-Identifier: Apache-2.0
"""Finds a model's folder by its name: in caches first, then on the Hub. Loads nothing and reads no weights.

transformers 5 ignores TRANSFORMERS_CACHE, and tools disagree on the variable of the access token; both are read here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from hf_triton.errors import CheckpointError, HubError, SettingsError
from hf_triton.files import ADAPTER_IS_PICKLE, ADAPTER_PICKLE
from hf_triton.hub.download_parent import DownloadLimits, download
from hf_triton.hub.failures import FOLDER_HINT
from hf_triton.hub.gguf import SUFFIX, find_gguf
from hf_triton.hub.kind import describe_other_kind
from hf_triton.hub.snapshot import (
    check_regular,
    check_weights_named,
    has_only_pickle,
    missing_files,
    verify_unchecked,
)
from hf_triton.hub.spec import CheckpointSpec
from hf_triton.settings import ModelSettings

logger = logging.getLogger(__name__)

CACHE_VARIABLES: Final = ("TRANSFORMERS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
"""Variables that name a cache folder, in search order; `hub` in HF_HOME follows."""
TOKEN_VARIABLES: Final = (
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "PRIVATE_REPO_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACEHUB_API_TOKEN",
)
"""Variables that hold an access token (HF_TOKEN_PATH: the name of its file); the first that is set wins."""
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
FOLDER_CACHE: Final = "hf_cache"
"""The cache inside a model folder, which survives the container together with the model repository."""

Download = Callable[[CheckpointSpec, Path, Mapping[str, str], DownloadLimits], Path]


class Hub:
    """Finds the checkpoints of one model folder, and downloads them if no cache has them.

    Args:
        model_folder: The folder with config.pbtxt: relative paths start there, and its `hf_cache` is the last cache.
        environment: Holds cache, token and offline variables.
    """

    def __init__(
        self,
        model_folder: Path,
        settings: ModelSettings,
        environment: Mapping[str, str],
        download: Download = download,
    ) -> None:
        self.model_folder = model_folder
        self._settings = settings
        self._environment = environment
        self._download = download

    def resolve_model(self) -> Path:
        """Return the folder with the model's files; download them if no cache is complete.

        Raises:
            HubError: The checkpoint cannot be found or downloaded.
            CheckpointError: It lacks files, or has others than those that are checked.
        """
        settings = self._settings
        self._warn_of_unused_settings()
        needs_weights = settings.load_format == "auto" and settings.has_weights and settings.runtime == "torch"
        folder = self._resolve(self._model_spec(needs_weights=needs_weights))
        check_weights_named(folder)
        return folder

    def fetch_config(self) -> None:
        """Download the model's small files, which say what it does, unless they are on disk."""
        spec = self._model_spec(needs_weights=False)
        if self._settings.gguf_file is None and not spec.is_local and self.find_config_folder() is None:
            self._resolve(spec)

    def _model_spec(self, *, needs_weights: bool) -> CheckpointSpec:
        settings = self._settings
        return CheckpointSpec(
            settings.huggingface_model,
            settings.revision,
            needs_weights=needs_weights,
            needs_tokenizer=settings.tokenizer is None,
            allow_pickle=settings.allow_pickle,
            trust_remote_code=settings.trust_remote_code,
            gguf_file=settings.gguf_file,
        )

    def find_config_folder(self) -> Path | None:
        """The folder on disk with the model's config, complete or not; None if it would have to be downloaded."""
        spec = CheckpointSpec(self._settings.huggingface_model, self._settings.revision)
        with contextlib.suppress(PermissionError):
            if spec.is_local:
                folders = [(self.model_folder / spec.name).resolve()]
            else:
                found = (_cached_snapshot(spec, cache) for cache in self.caches())
                folders = [folder for folder in found if folder is not None]
            return next(filter(self._has_config, folders), None)
        return None

    def _has_config(self, folder: Path) -> bool:
        with contextlib.suppress(CheckpointError):  # which the download or the load reports
            return (folder / "config.json").exists() or bool(find_gguf(folder, self._settings.gguf_file))
        return False

    def resolve_tokenizer(self) -> Path | None:
        """Return the folder of a separate tokenizer; None if the model's own is used."""
        settings = self._settings
        if settings.tokenizer is None:
            return None
        return self._resolve(
            CheckpointSpec(
                settings.tokenizer,
                settings.tokenizer_revision,
                setting="tokenizer",
                needs_config=False,
                needs_weights=False,
                trust_remote_code=settings.trust_remote_code,
            )
        )

    def resolve_adapter(self, source: str) -> Path:
        """The folder of a LoRA adapter, of a Hub name, with `@REVISION` or without, or a path."""
        name, _, revision = source.partition("@") if not CheckpointSpec(source).is_local else (source, "", "")
        return self._resolve(CheckpointSpec(name, revision or "main", setting="adapters", files=ADAPTER_FILES))

    def fetch_kernel(self, kernel: CheckpointSpec, cache: Path) -> Path:
        """Download a kernel of the Hub; returns its folder in the cache."""
        if is_offline(self._environment):
            raise HubError(
                "offline_and_not_cached",
                f"the kernel {kernel.name} ({kernel.revision}) is not in {cache}, and HF_HUB_OFFLINE forbids a "
                "download: unset it once, or mount a cache that has it",
            )
        return self._download_to(cache, kernel)

    def _warn_of_unused_settings(self) -> None:
        settings = self._settings
        model_is_local = CheckpointSpec(settings.huggingface_model).is_local
        tokenizer_is_local = settings.tokenizer is None or CheckpointSpec(settings.tokenizer).is_local
        is_unused = {
            "revision": settings.revision != "main" and model_is_local,
            "tokenizer_revision": settings.tokenizer_revision != "main" and tokenizer_is_local,
            "cache_dir": settings.cache_dir is not None and model_is_local and tokenizer_is_local,
        }
        for name in filter(is_unused.get, is_unused):
            logger.warning("the setting %s has no effect: nothing that it applies to comes from the Hub", name)

    def _resolve(self, spec: CheckpointSpec) -> Path:
        if spec.is_local:
            return self._local_folder(spec)
        searched = []
        for cache in self.caches():
            try:
                folder = _cached_snapshot(spec, cache)
                if folder is not None and (damaged := verify_unchecked(folder)):
                    logger.warning("%s was damaged in the cache %s, and is removed", ", ".join(damaged), cache)
                if folder is not None:
                    check_regular(folder)
                missing = [] if folder is None else missing_files(folder, spec)
            except PermissionError as error:
                logger.warning("skipping the cache %s: no permission to read %s", cache, error.filename)
                searched.append(f"{cache} (no permission)")
                continue
            if folder is not None and not missing:
                logger.info("%s: found in the cache %s", spec.name, cache)
                return folder
            searched.append(f"{cache} (without {', '.join(missing[:3])})" if missing else str(cache))
        if is_offline(self._environment):
            raise HubError(
                "offline_and_not_cached",
                f"{spec.name} (revision {spec.revision}) is not complete in any cache, and HF_HUB_OFFLINE forbids a "
                f"download: unset it once, or mount a cache that has the model; searched {', '.join(searched)}; "
                f"{FOLDER_HINT}",
            )
        return self._download_to(self._writable_cache(spec), spec)

    def _local_folder(self, spec: CheckpointSpec) -> Path:
        folder = (self.model_folder / spec.name).resolve()
        if not os.path.isdir(folder):
            if folder.suffix == SUFFIX and folder.is_file():
                raise SettingsError(
                    f"{spec.setting} is the file {folder}: set it to the folder, and gguf_file to {folder.name}"
                )
            is_whole = os.path.isabs(spec.name)
            base = "" if is_whole else f" for '{spec.name}', relative to {self.model_folder.resolve()}"
            raise HubError("path_not_found", f"there is no folder {folder}{base}: correct {spec.setting}")
        try:
            check_regular(folder)
            if spec.needs_config:
                find_gguf(folder, spec.gguf_file)
            missing = missing_files(folder, spec)
        except PermissionError as error:
            raise CheckpointError(
                "checkpoint_invalid",
                f"the user of this process ({os.geteuid()}) may not read {error.filename}: change its mode or owner, "
                "or the user",
            ) from None
        if missing and spec.needs_weights and not spec.allow_pickle and has_only_pickle(folder):
            raise CheckpointError(
                "weights_not_safe",
                f"{folder} has pickle weights only, which can run code when they are read: convert them to "
                "safetensors, or set allow_pickle to true if you trust them",
            )
        if missing and spec.files and (folder / ADAPTER_PICKLE).exists():
            raise CheckpointError("weights_not_safe", f"{folder} {ADAPTER_IS_PICKLE}")
        is_model = not spec.files
        other = describe_other_kind(folder, [path.name for path in folder.iterdir()]) if missing and is_model else None
        if other:
            raise CheckpointError("unsupported_model", f"{folder} {other}")
        if missing:
            raise CheckpointError(
                "checkpoint_incomplete", f"{folder} has no {', '.join(missing[:3])}: copy the whole checkpoint there"
            )
        logger.info("%s: found in the folder %s", spec.name, folder)
        return folder

    def can_download_again(self, folder: Path) -> bool:
        """Whether a damaged file of this snapshot can be removed and downloaded again."""
        if is_offline(self._environment) or not any(cache in folder.parents for cache in self.caches()):
            return False
        return all(os.access(path, os.W_OK) for path in (folder, folder.parents[1] / "blobs"))

    def _download_to(self, cache: Path, spec: CheckpointSpec) -> Path:
        logger.info("%s (revision %s): downloading to %s", spec.name, spec.revision, cache)
        started_s = time.monotonic()
        limits = DownloadLimits(self._settings.download_timeout_s, self._settings.download_stall_timeout_s)
        folder = self._download(spec, cache, self._download_environment(), limits)
        logger.info("%s: downloaded in %.1f s", spec.name, time.monotonic() - started_s)
        return folder

    def _download_environment(self) -> dict[str, str]:
        """The process's environment: the chosen access token, and no other."""
        environment = {name: value for name, value in self._environment.items() if name not in TOKEN_VARIABLES}
        token = self.access_token()
        if token is not None:
            environment["HF_TOKEN"] = token
        return environment | {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "0"}

    # --- caches ------------------------------------------------------------------------------------------------------

    def caches(self) -> list[Path]:
        """All folders in which a checkpoint may be cached, in search order."""
        return list(dict.fromkeys([*self._named_caches(), self._standard_cache(), self.model_folder / FOLDER_CACHE]))

    def _named_caches(self) -> list[Path]:
        named = [self._environment.get(variable) for variable in CACHE_VARIABLES]
        caches = [_expand_home(os.path.expandvars(path)) for path in named if path]
        if self._settings.cache_dir is not None:
            caches.insert(0, self.model_folder / _expand_home(self._settings.cache_dir))
        if self._environment.get("HF_HOME"):
            caches.append(self._standard_cache())
        return caches

    def _standard_cache(self) -> Path:
        """The default cache of the Hub's client: `hub` in HF_HOME."""
        home = self._environment.get("HF_HOME")
        if not home:
            home = os.path.join(self._environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        return _expand_home(os.path.expandvars(home)) / "hub"

    def _writable_cache(self, spec: CheckpointSpec) -> Path:
        """The first writable cache to download to: a named one, the standard one if it exists, `hf_cache`."""
        standard = self._standard_cache()
        candidates = self._named_caches() or [
            *([standard] if os.path.isdir(standard) else []),
            self.model_folder / FOLDER_CACHE,
            standard,
        ]
        for folder in candidates:
            if _is_writable(folder):
                return folder
        raise HubError(
            "cache_not_writable",
            f"{spec.name} is not cached and must be downloaded, but {', '.join(map(str, dict.fromkeys(candidates)))} "
            "cannot be written to: set TRANSFORMERS_CACHE to a writable folder, or mount a cache that has the model",
        )

    # --- access token ------------------------------------------------------------------------------------------------

    def access_token(self) -> str | None:
        """The Hub's access token: of the first of `TOKEN_VARIABLES` that is set, else of a login.

        Different tokens cause a warning, which shows none of them.
        """
        tokens = {name: token for name in TOKEN_VARIABLES if (token := self._read_token(name))}
        if len(set(tokens.values())) > 1:
            logger.warning("%s hold different access tokens; using %s", " and ".join(tokens), next(iter(tokens)))
        return next(iter(tokens.values()), None) or _read_file(self._standard_cache().parent / "token")

    def _read_token(self, variable: str) -> str | None:
        value = self._environment.get(variable, "").strip()
        if variable != "HF_TOKEN_PATH" or not value:
            return value or None
        token = _read_file(_expand_home(value))
        if token is None:
            logger.warning("HF_TOKEN_PATH names %s, which cannot be read or is empty", value)
        return token


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether network access is forbidden, read as the Hub's client reads it."""
    values = [environment.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    return any(value.strip().lower() in ("1", "true", "yes", "on") for value in values)


def _cached_snapshot(spec: CheckpointSpec, cache: Path) -> Path | None:
    """The snapshot folder of a revision in the cache layout of the Hub's client, complete or not."""
    repository = cache / spec.cache_name
    commit: str | None = spec.revision
    if not re.fullmatch(r"[0-9a-f]{40}", spec.revision):
        commit = _read_file(repository / "refs" / spec.revision)
    folder = repository / "snapshots" / commit if commit else None
    return folder if folder is not None and os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK) else None


def _expand_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(f"{path} cannot be expanded: its user has no home directory here") from None


def _read_file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _is_writable(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
