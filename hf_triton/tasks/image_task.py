# SPDX-License-Identifier: Apache-2.0
"""ImageTask: what tasks share whose models read images. The engine computes arrays of equal shapes together."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hf_triton.encoder.jobs import ArrayInput
from hf_triton.hub.pretrained import loading
from hf_triton.protocol.task_declaration import IMAGE
from hf_triton.sentence import param
from hf_triton.tasks.encoder_task import EncoderTask, Options
from hf_triton.tasks.images import read_image

if TYPE_CHECKING:
    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings

PATCH: Final = 16
"""The least side of the patches by which images are counted: models with smaller ones, or none, soon join them."""


class ImageTask(EncoderTask[Options]):
    """See `EncoderTask`; a row's image is an `ArrayInput`.

    Raises:
        LoadError: Pillow is missing, or the checkpoint's image processor does not fit its model.
    """

    needs_fast_tokenizer: ClassVar[bool] = False

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        super().__init__(checkpoint, settings)
        self.model = checkpoint.model
        self._processor = checkpoint.image_processor
        sizes = (
            getattr(part, "patch_size", None) for part in (self.config, getattr(self.config, "vision_config", None))
        )
        self._patch = max([PATCH, *(size for size in sizes if isinstance(size, int))])

    @abstractmethod
    def compute(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's outputs `[batch, ...]` for arrays `[batch, ...]`, all of one shape."""

    def examples(self) -> list[ArrayInput]:
        from PIL import Image

        return [self.process(Image.new("RGB", (64, 48), (90, 120, 150)))]

    def trial(self) -> list[torch.Tensor]:
        """The outputs for the examples; raises CheckpointError if the image processor does not fit the model."""
        from hf_triton.encoder.stacked import StackedForward

        with loading("the image processor", self.settings):
            return StackedForward(self.model, self.compute)(self.examples())

    def image(self, data: bytes) -> ArrayInput:
        """What the model computes of a file; raises RequestError if it cannot be read, or is too large."""
        return self.process(read_image(data, self.settings.max_image_pixels, param(IMAGE)))

    def process(self, image: Any) -> ArrayInput:
        """What the model computes of an image in mode RGB."""
        arrays = {name: array[0] for name, array in self._processor(images=image, return_tensors="np").items()}
        pixels = arrays["pixel_values"]  # [channels, height, width], or [patches, numbers of a patch]
        num_patches = len(pixels) if pixels.ndim == 2 else -(-pixels[0].size // self._patch**2)
        return ArrayInput(arrays, num_patches)
