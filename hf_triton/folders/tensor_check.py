# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint has the tensors of the model that serves it. Reads no weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

from hf_triton.errors import CheckpointError
from hf_triton.hub.pretrained import gguf_of, is_quantized, load_model, silence_transformers
from hf_triton.hub.snapshot import weight_files
from hf_triton.settings import ModelSettings

CERTAIN: Final = ("weights_mismatch", "weights_not_safe")
"""Codes that a load on `meta` gives as any other does; what else fails may be for want of values."""


def check_tensors(folder: Path, config: Any, settings: ModelSettings, auto_class_name: str | None) -> bool:
    """Check names and shapes as a load does: by transformers' own loader, which puts the tensors on torch's `meta`.

    Files are mapped into memory, and only their headers are read. False: they are not known, of what is quantised, GGUF
    files among it, and of pickle files in torch's old form, which would be read.
    """
    if gguf_of(folder, settings):  # whose reader dequantises
        return False
    files = [folder / name for name in weight_files(folder, os.listdir(folder), settings.allow_pickle)]
    are_mapped = all(file.suffix == ".safetensors" or is_zipfile(file) for file in files)
    if settings.quantization_config or is_quantized(config) or not are_mapped:
        return False
    silence_transformers()
    try:
        load_model(folder, config, settings, {"": "meta"}, auto_class_name)
    except CheckpointError as error:
        if error.code in CERTAIN:
            raise
        return False
    return True
