# SPDX-License-Identifier: Apache-2.0
"""The Hub's kernels, by which transformers computes block-wise FP8 and MXFP4: which, where, and how a load finds them.

They are code for a GPU, in repositories of their own. `hf-triton pull --kernels` fetches them into a cache, where
`kernels.lock` has their commits; a load takes them from there and asks no network. Downloads nothing.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from hf_triton.errors import CheckpointError
from hf_triton.files import read_json
from hf_triton.hub.snapshot import is_sound, unchecked_mark
from hf_triton.hub.spec import CheckpointSpec

LOCK: Final = "kernels.lock"
CAPABILITIES: Final = {"fp8": (8, 9), "mxfp4": (7, 5)}
"""Methods of quantisation that need such kernels, and the CUDA capability from which transformers takes them."""
PLAIN_BUILDS: Final = "torch-(cuda|universal)"
"""Builds in Triton's language, for any version of PyTorch."""


class _AskedError(Exception):
    """Raised in place of fetching a kernel; has its repository and its revision."""


def find_kernels(method: str | None) -> list[CheckpointSpec]:
    """The kernels that transformers takes for a method of quantisation, at the revision that it asks for."""
    from transformers.integrations import hub_kernels, mxfp4

    def refuse(name: str, revision: str | None = None, version: int | None = None, **_: Any) -> None:
        raise _AskedError(name, revision or f"v{version or 1}")

    asked: Any = ()
    if method == "fp8":
        entry: Mapping[str, Any] = hub_kernels._HUB_KERNEL_MAPPING["finegrained-fp8"]
        asked = entry["repo_id"], entry.get("revision") or f"v{entry.get('version', 1)}"
    elif method == "mxfp4":  # which it names where it fetches them
        fetch, hub_kernels.get_kernel = hub_kernels.get_kernel, refuse  # type: ignore[assignment]
        try:
            mxfp4.replace_with_mxfp4_linear(None, SimpleNamespace(dequantize=False))
        except _AskedError as error:
            asked = error.args
        finally:
            hub_kernels.get_kernel = fetch
    return [kernel_spec(*asked)] if asked else []


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation in a config.json, of the model or of the part of it that reads text; empty: there is none."""
    parts = (config, config.get("text_config"))
    found = (part.get("quantization_config") for part in parts if isinstance(part, dict))
    return next((each for each in found if isinstance(each, dict)), {})


def kernel_spec(name: str, revision: str) -> CheckpointSpec:
    return CheckpointSpec(name, revision, setting=LOCK, repo_type="kernel")


def kernel_cache(environment: Mapping[str, str]) -> Path:
    """The cache that has the kernels: KERNELS_CACHE, as of the package kernels, or the Hub's."""
    home = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    named = environment.get("KERNELS_CACHE") or environment.get("HF_HUB_CACHE")
    return Path(os.path.expanduser(named or os.path.join(home, "hub")))


def read_lock(cache: Path) -> dict[str, str]:
    """The commits of kernels by their repositories; none without a file."""
    try:
        lock: Any = read_json(cache / LOCK)
        if isinstance(lock, dict) and all(
            isinstance(commit, str) and re.fullmatch("[0-9a-f]{40}", commit) for commit in lock.values()
        ):
            return lock
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        pass
    raise CheckpointError(
        "checkpoint_invalid",
        f"{cache / LOCK} is damaged: it must be a JSON object with the commit of each kernel's repository; restore it, "
        "or remove it and run `hf-triton pull --kernels MODEL`, which takes the newest commits",
    )


def write_lock(cache: Path, lock: Mapping[str, str]) -> None:
    """Write the commits of kernels; a reader has the old file or the new one."""
    part = cache / f".{LOCK}.{os.getpid()}"
    part.write_text(json.dumps(dict(sorted(lock.items())), indent=2) + "\n", encoding="ascii")
    part.replace(cache / LOCK)


def find_pulled(name: str, cache: Path) -> Path | None:
    """The folder of a kernel at its locked commit.

    None unless a build for this machine is there, and every file has the checksum of its name.
    """
    if (commit := read_lock(cache).get(name)) is None:
        return None
    folder = cache / kernel_spec(name, commit).cache_name / "snapshots" / commit
    if any(path.is_file() for path in unchecked_mark(folder, "").rglob("*")):  # of a pull that was stopped
        return None
    files = [path for path in folder.glob("build/**/*") if path.is_symlink() or path.is_file()]
    fits = fitting_builds([path.relative_to(folder).as_posix() for path in files])
    return folder if fits and all(path.is_file() and is_sound(path) for path in files) else None


def fitting_builds(names: Collection[str]) -> list[str]:
    """The files of a kernel's repository that are for this processor, the installed PyTorch, and CUDA."""
    torch = "".join(version("torch").split(".")[:2])
    own = rf"(torch{torch}(-cxx11)?|torch-stable-abi\d+)-cu\d+-{platform.machine()}-linux"
    return [name for name in names if re.match(f"build/({PLAIN_BUILDS}|{own})/", name)]


def describe_lack(method: str, name: str) -> str | None:
    """What keeps a method's kernels from being used, and the remedy; None: nothing."""
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

    pull = f"`hf-triton pull --kernels {name}`"
    if not is_kernels_available():
        return (
            f"{method} needs the package kernels (>= {KERNELS_MIN_VERSION}, < {KERNELS_MAX_VERSION}), not installed: "
            f"`pip install 'hf-triton[kernels]'`, then {pull}"
        )
    cache = kernel_cache(os.environ)
    missing = [kernel.name for kernel in find_kernels(method) if find_pulled(kernel.name, cache) is None]
    return f"{method} needs {', '.join(missing)}, not whole in {cache}: {pull}" if missing else None


def use_pulled() -> None:
    """Give transformers in this process pulled kernels alone; the package fetches any, at a load or a request."""
    from transformers.integrations import hub_kernels
    from transformers.utils.import_utils import is_kernels_available

    # By name: transformers asks for some in every layer of every forward.
    find = functools.cache(lambda name: find_pulled(name, kernel_cache(os.environ)))

    def load(name: str, **_: Any) -> Any:
        folder = find(name)
        if folder is None:  # of this type, transformers takes another way where it has one
            raise FileNotFoundError(f"the kernel {name} has not been pulled")
        from kernels import get_local_kernel

        with _offline():
            return get_local_kernel(folder)

    if is_kernels_available():
        hub_kernels.get_kernel_hub = load  # type: ignore[attr-defined]


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the Hub's client from the network: a kernel may ask for others."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
