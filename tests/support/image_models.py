# SPDX-License-Identifier: Apache-2.0
"""Tiny models that see, with random weights, made in process from their configs; prompts with images of noise."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers

from hf_triton.runner.image_inputs import ImageInput, ImageSample, PromptImages
from hf_triton.runner.images import as_tensors
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.reference import logits_after
from hf_triton.runner.step import Step, TokenRange
from tests.support.architectures import BASE, HEADS, LINEAR, SECTIONS, WINDOWS
from tests.support.image_checkpoints import EYE, QWEN_EYE

IMAGE: int = 299
"""The placeholder token."""
PADDED: dict[str, Any] = BASE | {"pad_token_id": 2}
LLAMA: dict[str, Any] = PADDED | {"model_type": "llama"}
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaConfig", {"text_config": LLAMA, "vision_config": EYE | {"model_type": "clip_vision_model"}}),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": PADDED | SECTIONS,
            "vision_config": QWEN_EYE | {"window_size": 32, "fullatt_block_indexes": [1]},
        },
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {
            "text_config": PADDED | HEADS | SECTIONS,
            "vision_config": QWEN_EYE | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        },
    ),
    "qwen3.5": (
        "Qwen3_5Config",
        {
            "text_config": PADDED | HEADS | SECTIONS | LINEAR,
            "vision_config": QWEN_EYE | {"num_position_embeddings": 16},
        },
    ),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": PADDED | HEADS | WINDOWS,
            "vision_config": EYE | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": PADDED
            | HEADS
            | WINDOWS
            | {
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 300,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": EYE
            | {
                "num_key_value_heads": 4,
                "head_dim": 8,
                "global_head_dim": 8,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": None,
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": PADDED | {"model_type": "mistral"},
            "vision_config": EYE | {"model_type": "pixtral", "image_size": 56, "head_dim": 8},
            "vision_feature_layer": -1,
        },
    ),
    "idefics3": (
        "Idefics3Config",
        {"text_config": LLAMA, "vision_config": EYE | {"model_type": "idefics3_vision"}, "scale_factor": 2},
    ),
}
JOINING = ("gemma3", "gemma4")
"""Models whose image tokens attend to each other."""
AFTER = [20, 30, 40]
"""The tokens that are decoded behind each prompt."""
SIZE = 8
"""Tokens of a block."""
GRIDS = ([1, 4, 4], [1, 6, 4])
"""Patches of an image in time, height and width."""


def build_seeing(name: str) -> Any:
    """A model that generates different tokens for different images; no image token among them."""
    config_name, arguments = SEEING[name]
    config = getattr(transformers, config_name)(**arguments | {"image_token_id": IMAGE, "image_token_index": IMAGE})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)  # by default images hardly differ
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 2
    return model


def image_arguments(name: str, model: Any, seed: int = 0) -> dict[str, Any]:
    """What the tower of a model is given for an image of noise, as its processor would make it."""
    source = np.random.default_rng(seed)

    def noise(*shape: int) -> Any:
        return source.standard_normal(shape).astype(np.float32)

    if name.startswith("qwen"):
        grid = GRIDS[seed % 2]
        visual = model.config.vision_config
        size = 3 * visual.temporal_patch_size * visual.patch_size**2
        return {"pixel_values": noise(grid[1] * grid[2], size), "image_grid_thw": np.array([grid])}
    if name == "mistral3":
        return {"pixel_values": noise(1, 3, 28, 28), "image_sizes": np.array([[28, 28]])}
    if name == "idefics3":
        return {"pixel_values": noise(1, 3, 3, 28, 28), "pixel_attention_mask": np.ones((1, 3, 28, 28), np.int64)}
    if name == "gemma4":
        places = np.stack(np.meshgrid(np.arange(4), np.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
        return {"pixel_values": source.random((1, 16, 3 * 7 * 7)).astype(np.float32), "image_position_ids": places}
    return {"pixel_values": noise(1, 3, 28, 28)}


def make_sample(name: str, model: Any, seeds: tuple[int, ...] = (0,), text: int = 6) -> ImageSample:
    """A prompt with these images, so many tokens of text before each and behind the last."""
    prompt: list[int] = []
    images: list[ImageInput] = []
    for seed in seeds:
        arguments = image_arguments(name, model, seed)
        prompt += [5 + (31 * seed + 7 * at) % 280 for at in range(text)]
        with torch.inference_mode():
            output = model.base_model.get_image_features(**as_tensors(model, arguments), return_dict=True)
        count = sum(rows.reshape(-1, rows.shape[-1]).shape[0] for rows in output.pooler_output)
        places = np.arange(len(prompt), len(prompt) + count)
        images.append(ImageInput(places, arguments, bytes([seed]) * 32))
        prompt += [IMAGE] * count
    prompt += [11 + 5 * at for at in range(text)]
    names = images[0].arguments
    axis = {"idefics3": 1}.get(name, 0)
    whole = {key: np.concatenate([image.arguments[key] for image in images], axis) for key in names}
    types = (np.array([prompt]) == IMAGE).astype(np.int64)
    positions = None
    if name.startswith("qwen"):
        ids, grid = torch.tensor([prompt]), torch.from_numpy(whole["image_grid_thw"])
        axes, _ = model.base_model.get_rope_index(ids, mm_token_type_ids=torch.from_numpy(types), image_grid_thw=grid)
        positions = axes[:, 0].numpy()
    told = {"gemma3": "token_type_ids"}.get(name, "mm_token_type_ids")
    if name.startswith(("qwen", "gemma")):
        whole[told] = types
    return ImageSample(prompt, PromptImages(tuple(images), whole, positions))


def way_of(name: str) -> Way:
    return Way(joins_images=name in JOINING, num_axes=3 if name.startswith("qwen") else 0)


def expected(model: Any, sample: ImageSample) -> torch.Tensor:
    return logits_after(model, [sample.prompt_ids], [AFTER], as_tensors(model, sample.images.arguments))[:, 0]


class Prompt:
    """A prompt with images, run range by range.

    Args:
        number: Of the sequence, whose blocks lie between those of others.
    """

    def __init__(self, runner: ModelRunner, sample: ImageSample, number: int = 0) -> None:
        self._sample, self._number = sample, number
        self.ids = sample.prompt_ids + AFTER
        positions = sample.images.positions
        if positions is not None:
            more = np.arange(len(sample.prompt_ids), len(self.ids)) + sample.images.offset
            positions = np.concatenate([positions, np.tile(more, (len(positions), 1))], 1)
        self._positions = positions
        runner.see(Step(images=sample.images.images))

    def range(self, start: int, end: int) -> TokenRange:
        return TokenRange(
            self._number,
            start,
            end,
            self.ids[start:end],
            [4 * block + self._number for block in range(-(-end // SIZE))],
            end,
            samples=(self._number,) if end >= len(self._sample.prompt_ids) else (),
            slot=self._number,
            images=tuple(
                image.number
                for image in self._sample.images.images
                if ((image.places >= start) & (image.places < end)).any()
            ),
            positions=None if self._positions is None else self._positions[:, start:end],
        )

    def decodes(self) -> Iterator[TokenRange]:
        end = len(self._sample.prompt_ids)
        return (self.range(end + at, end + at + 1) for at in range(len(AFTER)))


def make_runner(model: Any, way: Way) -> ModelRunner:
    runner = ModelRunner(model, way, block_size=SIZE)
    runner.allocate(4 * 12, 4)
    return runner
