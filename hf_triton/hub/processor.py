# SPDX-License-Identifier: Apache-2.0
"""Loads the processor that prepares a checkpoint's images, or tells why the model is served for its text alone."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError, LoadError
from hf_triton.hub.gguf import find_gguf
from hf_triton.hub.imports import torchvision_fault
from hf_triton.hub.load_failures import explain_load
from hf_triton.hub.snapshot import PROCESSOR_FILES
from hf_triton.settings import ModelSettings

logger = logging.getLogger(__name__)

MAX_SIDE: Final = 8192
"""The most pixels of a side that a model is given."""
INSTALL: Final = "pip install 'hf-triton[image]', from the index that torch is from"


def reads_images(config: Any) -> bool:
    """Whether transformers has a decoder that reads images for this config."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping and not config.is_encoder_decoder


def image_obstacle(folder: Path, settings: ModelSettings) -> str:
    """Why a model that could read images is served for its text alone, as far as files and settings tell; or empty."""
    if settings.tensor_parallel_size > 1:
        return "a model in ranks (tensor_parallel_size) reads text alone"
    if settings.max_images == 0:
        return "the setting max_images is 0"
    if settings.tokenizer is not None:
        return "the setting tokenizer names another repository than its processor's"
    if find_gguf(folder, settings.gguf_file, allow_pickle=settings.allow_pickle):
        return "a GGUF file has no processor"
    if not any((folder / name).exists() for name in PROCESSOR_FILES):
        return f"its repository has no processor ({', '.join(PROCESSOR_FILES)})"
    if importlib.util.find_spec("PIL") is None:
        return f"pillow is not installed: {INSTALL}"
    return ""


def load_processor(folder: Path, config: Any, settings: ModelSettings) -> tuple[Any, str]:
    """The processor of a model that reads images, or why there is none; neither, for a model of texts."""
    if not reads_images(config):
        return None, ""
    processor, obstacle = None, image_obstacle(folder, settings)
    if not obstacle:
        try:
            processor = _load(folder, settings)
        except Exception as error:  # a repository may hold anything
            named = error if isinstance(error, LoadError) else None
            named = named or explain_load(error, "the processor", settings.huggingface_model, False, folder)
            fault = torchvision_fault() if "torchvision" in str(error).lower() else ""
            obstacle = f"its processor needs torchvision, and {fault}: {INSTALL}" if fault else named.sentence
    if obstacle:
        logger.warning("%s is served for its text alone: %s", settings.huggingface_model, obstacle)
        return None, obstacle
    return processor, ""


def _load(folder: Path, settings: ModelSettings) -> Any:
    from transformers import AutoProcessor

    load: Any = AutoProcessor.from_pretrained
    processor = load(folder, trust_remote_code=settings.trust_remote_code, local_files_only=True)
    if not (hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")):
        raise TypeError("it prepares no images beside text")
    check_sides(processor.image_processor, settings, ("height", "width"))  # others may be numbers of pixels
    return processor


def check_sides(processor: Any, settings: ModelSettings, names: Collection[str] = ()) -> None:
    """Refuse an image processor that makes images huge; `names` are those of its sides, or all are."""
    for name in ("size", "crop_size"):  # each image is brought to it
        given = getattr(processor, name, None) or {}
        sides = (given if isinstance(given, Mapping) else vars(given)).items()
        counted = [side for key, side in sides if isinstance(side, int) and (key in names or not names)]
        if longest := max((side for side in counted if side > MAX_SIDE), default=0):
            raise CheckpointError(
                "checkpoint_invalid",
                f"preprocessor_config.json of {settings.huggingface_model} has a {name} of {longest} pixels, more than "
                f"{MAX_SIDE}: correct it, or choose another revision",
            )
