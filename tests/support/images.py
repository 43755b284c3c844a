# SPDX-License-Identifier: Apache-2.0
"""Models that read images: tiny checkpoints, made images, and what transformers makes of them."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.support.sentence_checkpoints import quietly
from tests.support.tasks import build_tokenizer

SIZE = 32
LABELS = dict(enumerate(("cat", "dog", "boat", "gull")))
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": SIZE,
    "patch_size": 8,
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "vit": ("ViTConfig", VIT, "ViTImageProcessorPil", {"size": {"height": SIZE, "width": SIZE}}),
    "convnext": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        "ConvNextImageProcessorPil",
        {"size": {"shortest_edge": SIZE}},
    ),
    "resnet": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        "ConvNextImageProcessorPil",
        {"size": {"shortest_edge": SIZE}},
    ),
    "swin": (
        "SwinConfig",
        {"image_size": SIZE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
        "ViTImageProcessorPil",
        {"size": {"height": SIZE, "width": SIZE}},
    ),
    "deit": (
        "DeiTConfig",
        {**VIT, "architectures": ["DeiTForImageClassificationWithTeacher"]},
        "DeiTImageProcessorPil",
        {"size": {"height": 36, "width": 36}, "crop_size": {"height": SIZE, "width": SIZE}},
    ),
    "siglip": (
        "SiglipConfig",
        {"vision_config": VIT},
        "SiglipImageProcessorPil",
        {"size": {"height": SIZE, "width": SIZE}},
    ),
}
"""By family: config and its settings, image processor and its settings."""
TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
BOTH: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "clip": (
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": VIT, "projection_dim": 24},
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}},
    ),
    "siglip": (
        "SiglipConfig",
        {"text_config": {**TEXT, "projection_size": 32}, "vision_config": VIT},
        "SiglipImageProcessorPil",
        {"size": {"height": SIZE, "width": SIZE}},
    ),
    "siglip2": (
        "Siglip2Config",
        {"text_config": {**TEXT, "projection_size": 32}, "vision_config": {**VIT, "num_patches": 16}},
        "Siglip2ImageProcessorPil",
        {"patch_size": 8, "max_num_patches": 16},
    ),
    "chinese_clip": (
        "ChineseCLIPConfig",
        {"text_config": TEXT, "vision_config": VIT, "projection_dim": 24},
        "ChineseCLIPImageProcessorPil",
        {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}},
    ),
}


def save_image_checkpoint(folder: Path, family: str, *, has_texts: bool = False, **config: Any) -> Path:
    """A checkpoint with random weights."""
    import torch
    import transformers

    kind, settings, processor, sizes = (BOTH if has_texts else CLASSIFIERS)[family]
    labels = {} if has_texts else {"id2label": LABELS, "label2id": {name: index for index, name in LABELS.items()}}
    auto_class = transformers.AutoModel if has_texts else transformers.AutoModelForImageClassification
    with quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(getattr(transformers, kind)(**labels, **{**settings, **config}))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)  # by default images hardly differ
        model.eval().save_pretrained(folder)
        getattr(transformers, processor)(**sizes).save_pretrained(folder)
        if has_texts:
            build_tokenizer("bytes").save_pretrained(folder)
    return folder


def made_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth image, in mode RGB, that depends on all arguments."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bytes_tensor(files: Sequence[bytes | str]) -> npt.NDArray[np.object_]:
    return np.array([each.encode() if isinstance(each, str) else each for each in files], np.object_)


IMAGES = [made_image(61, 40, 1), made_image(40, 90, 2), made_image(32, 32, 3)]
