# SPDX-License-Identifier: Apache-2.0
"""Writes a bundle: one tar file of model folders, their checkpoints and all packages, for a machine without network."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distribution, distributions
from pathlib import Path
from subprocess import run
from typing import Any, BinaryIO, Final

from hf_triton.errors import HfTritonError, HubError, SettingsError
from hf_triton.folders.fetch import Progress, fetch, unused_files
from hf_triton.folders.folders import CONFIG, load_folder_settings, model_folders, parse_config, parse_message
from hf_triton.hub.locate import FOLDER_CACHE, Hub
from hf_triton.settings import ModelSettings

SUMS: Final = "SHA256SUMS"
PLACES: Final = {"huggingface_model": "checkpoint", "tokenizer": "tokenizer"}
"""Where a model folder has what these settings name."""
FROM_THE_HUB: Final = ("revision", "tokenizer_revision", "cache_dir")
"""Settings that say where a checkpoint came from."""
LEFT_OUT: Final = ("__pycache__", FOLDER_CACHE)
INSTALL: Final = """#!/bin/sh
# Checks this bundle, and installs its packages beside it; nothing is fetched. PYTHON=/path/to/{python} ./install.sh
set -eu
cd "$(dirname "$0")"
sha256sum --quiet --check {sums} || {{ echo "the bundle is damaged: copy it again" >&2; exit 1; }}
"${{PYTHON:={python}}}" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "{version}")' 2>/dev/null || {{
  echo "Python {version} is needed, as its packages are for it: PYTHON=/path/to/{python} ./install.sh" >&2; exit 1; }}
"$PYTHON" -m venv --without-pip .venv
.venv/bin/python "$(echo wheels/pip-*.whl)/pip" install --quiet --no-index --no-deps wheels/*.whl
echo "Serve the models: $(pwd)/.venv/bin/hf-triton serve $(pwd)/models"
"""


class BundleWriter:
    """Adds files to a bundle as they are read, and notes their sums; everything is in one folder of the bundle's name.

    Args:
        file: The tar file, written from its beginning to its end.
        name: Of the folder.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        # Links become files: those of a cache point out of the snapshot.
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, dereference=True)  # noqa: SIM115
        self._name = name
        self._sums: list[str] = []

    def add(self, path: Path, name: str) -> None:
        """Add a file under its name in the bundle."""
        info = self._tar.gettarinfo(path, f"{self._name}/{name}")
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.mode & 0o100 else 0o644
        with path.open("rb") as file:
            hashed = _Hashed(file)
            self._tar.addfile(info, hashed)
        self._sums.append(f"{hashed.sum.hexdigest()}  {name}\n")

    def add_text(self, text: str, name: str, *, is_script: bool = False) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text"
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if is_script else 0o644)
            self.add(path, name)

    def add_folder(self, folder: Path, name: str, left_out: Sequence[Path] = ()) -> None:
        for path in sorted(_files(folder)):
            if path not in left_out:
                self.add(path, f"{name}/{path.relative_to(folder)}")

    def close(self) -> None:
        self.add_text("".join(self._sums), SUMS)
        self._tar.close()


class _Hashed:
    """A file that sums up what is read of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sum.update(data)
        return data


def write_bundle(repository: Path, target: Path, extras: Sequence[str], progress: Progress) -> None:
    """Write a bundle of a repository's folders.

    Args:
        repository: Model folders; what their settings name is downloaded unless a cache has it.
        target: The tar file, which takes its place once it is complete.
        extras: Of this package, whose packages come along in the versions that are installed here; none: no package.
        progress: Shows the download of a model.

    Raises:
        HfTritonError: A folder is not fit, a checkpoint or a package cannot be downloaded, or the file not be written.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as file, tempfile.TemporaryDirectory(prefix="hf_triton_") as temporary:
            bundle = BundleWriter(file, target.stem)
            if extras:
                wheels = Path(temporary) / "wheels"
                build_wheels(wheels, extras)
                bundle.add_folder(wheels, "wheels")
                version = "{}.{}".format(*sys.version_info)
                script = INSTALL.format(python=f"python{version}", version=version, sums=SUMS)
                bundle.add_text(script, "install.sh", is_script=True)
            for folder in model_folders(repository):
                _add_model(bundle, folder, progress)
            bundle.close()
        part.replace(target)
    except OSError as error:
        raise HubError("disk_full", f"{target} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def _add_model(bundle: BundleWriter, folder: Path, progress: Progress) -> None:
    """Add a model folder, and in it what its settings name elsewhere; a folder of another backend goes as it is."""
    name, real = f"models/{folder.name}", folder.resolve()
    try:
        settings = load_folder_settings(parse_config(folder), ModelSettings).settings
    except SettingsError as error:
        if parse_message(folder).backend == "python":
            raise SettingsError(f"{folder.name}: {error.sentence}") from None
        bundle.add_folder(real, name)
        return
    checkpoint = fetch(folder, settings, progress)
    hub = Hub(real, settings, os.environ)
    sources = {"huggingface_model": checkpoint, "tokenizer": hub.resolve_tokenizer()}
    elsewhere = {setting: source for setting, source in sources.items() if source and real not in source.parents}
    adapters = {key: hub.resolve_adapter(source) for key, source in settings.adapters.items()}
    changed = {setting: f"./{PLACES[setting]}" for setting in elsewhere}
    if adapters:
        changed["adapters"] = json.dumps({key: f"./lora/{key}" for key in adapters})
    for path in sorted(_files(real)):
        if path != real / CONFIG:
            bundle.add(path, f"{name}/{path.relative_to(real)}")
    bundle.add_text(_config(folder, changed), f"{name}/{CONFIG}")
    for setting, source in elsewhere.items():
        bundle.add_folder(source, f"{name}/{PLACES[setting]}", list(unused_files(source, settings)))
    for key, source in adapters.items():
        bundle.add_folder(source, f"{name}/lora/{key}")


def _config(folder: Path, changed: Mapping[str, str]) -> str:
    """The text of a folder's config.pbtxt with other settings."""
    message: Any = parse_message(folder)
    for setting in FROM_THE_HUB:
        message.parameters.pop(setting, None)
    for setting, value in changed.items():
        message.parameters[setting].string_value = value
    text: str = importlib.import_module("google.protobuf.text_format").MessageToString(message)
    return text


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        yield from (Path(parent, name) for name in names)


def build_wheels(folder: Path, extras: Sequence[str]) -> None:
    """Put wheels of this package and of all that its extras need there, in the versions of this environment, and pip's.

    Raises:
        HfTritonError: pip is not installed, or cannot get one of them.
    """
    own = distribution("hf-triton")
    direct = json.loads(own.read_text("direct_url.json") or "{}").get("url", "")
    source = direct.removeprefix("file://") if direct.startswith("file://") else "hf-triton"
    here = source != "hf-triton"
    wanted = f"{source}[{','.join(extras)}]" if here else f"hf-triton[{','.join(extras)}]=={own.version}"
    names = {each.metadata["Name"]: each.version for each in distributions()}
    pins = [f"{name}=={version}\n" for name, version in sorted(names.items()) if name != own.metadata["Name"]]
    folder.mkdir()
    constraints = folder.parent / "constraints.txt"
    constraints.write_text("".join(pins))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--wheel-dir", str(folder), "--constraint", str(constraints), wanted, "pip"]
    done = run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason")
        remedy = ": `python -m ensurepip` installs it" if "No module named pip" in reason else ""
        raise HfTritonError(
            "client_missing", f"pip cannot collect the packages ({reason.removeprefix('ERROR: ')}){remedy}"
        )
