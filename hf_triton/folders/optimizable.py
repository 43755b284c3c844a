# SPDX-License-Identifier: Apache-2.0
"""Says which folders `hf-triton optimize` takes, what it may write for one here, and what this machine is."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import HfTritonError, ServerError, SettingsError
from hf_triton.folders.comparison import Row
from hf_triton.folders.fetch import Progress, fetch, use_standard_cache
from hf_triton.folders.folders import folder_defect, load_folder_settings, parse_config
from hf_triton.folders.own_code import own_class
from hf_triton.settings import ModelSettings

PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")
VERSIONS: Final = ("hf-triton", "torch", "transformers", *PACKAGES, "onnxruntime-gpu", "openvino")
"""Packages whose versions are reported."""


def check_folder(folder: Path, progress: Progress) -> None:
    """Refuse what cannot be optimized, for want of packages too, before anything is loaded."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ServerError("client_missing", f"optimize needs {', '.join(missing)}: `pip install 'hf-triton[optimize]'`")
    if defect := folder_defect(folder):
        raise SettingsError(f"{folder.name}: {defect}")
    own = own_class(folder)
    settings = load_folder_settings(parse_config(folder), own.settings_class).settings
    if not isinstance(settings, ModelSettings):
        raise HfTritonError("wrong_usage", "a stream door has no model: optimize an encoder's folder")
    if settings.runtime != "torch":
        raise HfTritonError(
            "wrong_usage", f"{folder.name} is an optimized folder: optimize the one that it was made of"
        )
    from hf_triton.hub.pretrained import READ_IMAGES, SPEECH
    from hf_triton.tasks.hooks import Hooks
    from hf_triton.tasks.registry import folder_task

    if own.load is not Hooks.load:
        raise HfTritonError(
            "wrong_usage", "the hook load of 1/model.py changes the model, which a graph would not have"
        )
    use_standard_cache()
    fetch(folder, settings, progress)
    task = folder_task(own.task_class, settings, folder)
    if task is None or task.auto_class in ("AutoModelForCausalLM", SPEECH):
        raise HfTritonError(
            "wrong_usage", f"{folder.name} generates text, and optimize is for encoders: serve it as it is"
        )
    if task.auto_class in READ_IMAGES:
        raise HfTritonError(
            "wrong_usage", f"{folder.name} reads images, and optimize is for encoders of texts: serve it as it is"
        )
    if not settings.has_weights:
        raise HfTritonError(
            "wrong_usage", f"{folder.name} has no model, only its tokenizer: optimize the model's folder"
        )


def available_providers() -> Sequence[str]:
    """The execution providers of the installed ONNX Runtime."""
    from hf_triton.runner.graph_model import available_providers as available

    return available()


def written_candidates(
    work: Path, providers: Sequence[str], *, on_gpu: bool, int8: bool
) -> dict[str, tuple[str, Path, tuple[object, ...]]]:
    """What is written to be measured on this machine: a method of the writer, the folder, and its other arguments."""
    if on_gpu:
        from hf_triton.runner.graph_model import GPU_PROVIDERS

        found: dict[str, tuple[str, Path, tuple[object, ...]]] = {"pytorch, float16": ("save", work / "float16", ())}
        for runtime, provider in GPU_PROVIDERS.items():
            if provider in providers:
                found[runtime.replace("onnx-", "onnxruntime, ")] = ("write", work / runtime, (runtime,))
        return found
    found = {"onnxruntime": ("write", work / "onnx", ("onnx",))}
    if int8:
        found["onnxruntime, int8"] = ("quantize", work / "int8", (work / "onnx",))
    if find_spec("openvino"):
        found["openvino"] = ("write", work / "openvino", ("openvino",))
    return found


def machine_of(base: Row) -> dict[str, Any]:
    """Describe the machine of a candidate: processor, threads, versions, date."""
    from hf_triton.runner.graph_model import processor

    versions = {}
    for name in VERSIONS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "processor": processor(),
        "threads": base.facts["num_threads"],
        "python": platform.python_version(),
        "versions": versions,
        "date": date.today().isoformat(),
    }
