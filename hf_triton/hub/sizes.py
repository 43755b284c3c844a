# SPDX-License-Identifier: Apache-2.0
"""Compares what a config makes of a model with what its files hold, before memory is allocated for either.

A model is built by the sizes of its config before its weights are read, so a config of a few bytes could take the
memory of the host. Here it is built on torch's device `meta`, which has none, and no further than its files can fill.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError
from hf_triton.files import open_regular
from hf_triton.hub.gguf import find_gguf
from hf_triton.hub.gguf_header import check_gguf
from hf_triton.hub.snapshot import weight_files
from hf_triton.settings import ModelSettings

FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number; other types may be packed."""
PACKED_PER_BYTE: Final = 4
"""Weights that a byte of a packed tensor holds at most: of 2 bits."""
MAX_RATIO: Final = 2
"""Numbers of a model for one of its files: an embedding that is not tied yet counts twice."""
SPARE_NUMBERS: Final = 1 << 24
SPARE_BUFFERS: Final = 1 << 28
SPARE_PARAMETERS: Final = 10_000


@dataclass(frozen=True)
class Stored:
    """What a checkpoint's files of weights hold."""

    num_tensors: int
    num_elements: int

    def max_parameters(self) -> int:
        return MAX_RATIO * self.num_tensors + SPARE_PARAMETERS


class _TooManyParametersError(Exception):
    """Raised out of the construction of a model."""


def read_stored(folder: Path, settings: ModelSettings) -> Stored | None:
    """What the files of a checkpoint hold, by their headers; None: there are none."""
    if gguf := find_gguf(folder, settings.gguf_file, allow_pickle=settings.allow_pickle):
        header = check_gguf(folder / gguf, settings.huggingface_model)
        return Stored(len(header.tensors), header.num_elements)
    num_tensors = num_elements = 0
    for name in weight_files(folder, os.listdir(folder), settings.allow_pickle):
        file = folder / name
        if file.suffix != ".safetensors":
            num_tensors, num_elements = num_tensors + SPARE_PARAMETERS, num_elements + file.stat().st_size
            continue
        tensors = read_safetensors_header(file)
        num_tensors += len(tensors)
        for tensor in tensors.values():
            start, end = tensor["data_offsets"]
            size = FLOATS.get(tensor["dtype"])
            num_elements += (end - start) // size if size else (end - start) * PACKED_PER_BYTE
    return Stored(num_tensors, num_elements) if num_tensors else None


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: its length in 8 bytes, then JSON.

    Raises:
        CheckpointError: It is not such a file, or half of one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(file) as stream:
            with safe_open(file, "np"):  # checks that the whole file is there, and reads no weights
                pass
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, SafetensorError):
        raise CheckpointError(
            "checkpoint_invalid", f"{file.name} is no safetensors file, or half of one: fetch the checkpoint again"
        ) from None
    header.pop("__metadata__", None)
    return header


def build_on_meta(auto_class: Any, config: Any, stored: Stored | None, name: str, **arguments: Any) -> Any:
    """A model of a copy of its config on torch's device `meta`, with no more tensors than its files could fill."""
    import torch

    limit = (stored or Stored(100_000, 0)).max_parameters()
    with _at_most(limit), torch.device("meta"):
        try:
            return auto_class.from_config(copy.deepcopy(config), **arguments)
        except _TooManyParametersError:
            held = f"{stored.num_tensors} tensors in its files" if stored else "what is served"
            raise CheckpointError(
                "weights_mismatch",
                f"{name} has more than {limit} tensors by its config, against {held}: correct the number of layers "
                "or experts in config.json, or use a complete checkpoint of this architecture",
            ) from None


@contextlib.contextmanager
def _at_most(limit: int) -> Iterator[None]:
    """Let this thread's modules have so many parameters together."""
    from torch.nn.modules.module import register_module_parameter_registration_hook

    own, count = threading.get_ident(), 0

    def count_one(*_: Any) -> None:
        nonlocal count
        if threading.get_ident() == own:
            count += 1
            if count > limit:
                raise _TooManyParametersError

    handle = register_module_parameter_registration_hook(count_one)
    try:
        yield
    finally:
        handle.remove()


def check_sizes(auto_class: Any, folder: Path, config: Any, settings: ModelSettings) -> None:
    """Refuse a config whose model is more than twice what its files hold."""
    try:
        stored = read_stored(folder, settings)
    except CheckpointError:  # of a damaged file, which the load reports
        return
    if stored is None:
        return
    try:
        model = build_on_meta(
            auto_class, config, stored, settings.huggingface_model, trust_remote_code=settings.trust_remote_code
        )
        model.tie_weights()
    except CheckpointError:
        raise
    except Exception:  # which the load meets too, and reports
        return
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.numel() for name, buffer in model.named_buffers()}
    held = stored.num_elements
    for sizes, most in (
        (numels, max(MAX_RATIO * held, held + SPARE_NUMBERS)),
        (buffers, max(MAX_RATIO * held, SPARE_BUFFERS)),
    ):
        if (total := sum(sizes.values())) > most:
            name = max(sizes, key=sizes.__getitem__)
            shape = list((model.get_parameter if sizes is numels else model.get_buffer)(name).shape)
            raise CheckpointError(
                "weights_mismatch",
                f"the tensors of {settings.huggingface_model} do not match its config: its files hold {held:,} "
                f"numbers, and a model of its sizes {total:,} ({name} alone is {shape}): correct its config, or use a "
                "complete checkpoint of this architecture",
            )
