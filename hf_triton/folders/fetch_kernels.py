# SPDX-License-Identifier: Apache-2.0
"""Fetches the kernels of the Hub that compute a checkpoint's quantisation, before a server starts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from hf_triton.errors import HubError
from hf_triton.files import read_json
from hf_triton.folders.fetch import in_typed_words
from hf_triton.hub.kernels import LOCK, find_kernels, find_pulled, kernel_cache, quantization_of, read_lock, write_lock
from hf_triton.hub.locate import Hub
from hf_triton.hub.snapshot import purge_damaged
from hf_triton.settings import ModelSettings


def fetch_kernels(model: str, settings: ModelSettings) -> Iterator[str]:
    """Fetch the kernels that a model needs at the commits of the lock file, which gets those that it lacks.

    Yields:
        One line for each kernel, and for each line that the lock file gets.

    Raises:
        HubError: The model or a kernel is not to be had, or the lock file is damaged.
    """
    hub = Hub(Path.cwd(), settings, os.environ)
    try:
        hub.fetch_config()
    except HubError as error:
        raise in_typed_words(error) from None
    folder = hub.find_config_folder()
    method = settings.quantization_config.get("quant_method")
    if folder is not None and method is None and (folder / "config.json").exists():  # a GGUF file has none
        method = quantization_of(read_json(folder / "config.json")).get("quant_method")
    kernels = find_kernels(method)
    if not kernels:
        yield f"{model}: {method or 'no quantisation'}, for which no kernels of the Hub are needed"
    cache = kernel_cache(os.environ)
    for kernel in kernels:
        lock = read_lock(cache)
        pulled = find_pulled(kernel.name, cache)
        if pulled is None:
            commit = lock.get(kernel.name, kernel.revision)
            purge_damaged(cache / kernel.cache_name / "snapshots" / commit)
            pulled = hub.fetch_kernel(dataclasses.replace(kernel, revision=commit), cache)
        if kernel.name not in lock:
            write_lock(cache, read_lock(cache) | {kernel.name: pulled.name})  # another pull may have written
            yield f"{cache / LOCK}: {kernel.name} is locked at {pulled.name} from now on"
        yield f"{model}: {pulled}"
