# SPDX-License-Identifier: Apache-2.0
"""Image classification: the labels of an image, with scores as transformers' pipeline has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hf_triton.hub.pretrained import IMAGE_CLASSIFIER
from hf_triton.protocol.task_declaration import IMAGE, IMAGES, TaskDeclaration
from hf_triton.protocol.task_requests import Row
from hf_triton.tasks.classification import OUTPUTS, Classification, ClassificationOptions
from hf_triton.tasks.encoder_task import EncodedRow
from hf_triton.tasks.image_task import ImageTask

if TYPE_CHECKING:
    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings


class ImageClassification(Classification, ImageTask[ClassificationOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="image-classification", texts=(IMAGES,), outputs=OUTPUTS, options=ClassificationOptions, has_json=False
    )
    auto_class: ClassVar[str] = IMAGE_CLASSIFIER

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        super().__init__(checkpoint, settings)
        self.trial()

    def encode(self, row: Row, options: ClassificationOptions) -> EncodedRow:
        return EncodedRow([self.image(row[IMAGE])])

    def compute(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.model(**arrays).logits
        return logits
