# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts and images in one space, as CLIP, SigLIP and their like make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from hf_triton.encoder.jobs import ArrayInput
from hf_triton.errors import CheckpointError, RequestError, SettingsError
from hf_triton.hub.pretrained import IMAGES_AND_TEXTS, architecture_names
from hf_triton.protocol.names import TEXT_ALIASES
from hf_triton.protocol.prompts import Limits, check_size
from hf_triton.protocol.task_declaration import (
    IMAGE,
    IMAGES,
    TEXT,
    TOKEN_IDS,
    TOKEN_TEXTS,
    TaskDeclaration,
    TaskOutput,
    TextInput,
)
from hf_triton.protocol.task_requests import Row, TaskRequest, TaskResult
from hf_triton.protocol.tensor_values import Array
from hf_triton.protocol.token_rows import TokenRow
from hf_triton.sentence import param, param_list
from hf_triton.tasks.embeddings import VectorOptions, check_dimensions, cut_vector
from hf_triton.tasks.encoder_task import EncodedRow
from hf_triton.tasks.image_task import ImageTask
from hf_triton.tasks.serving.admission import MIN_ENCODER_BYTES, request_limits

if TYPE_CHECKING:
    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings

TEXT_MULTIPLE: Final = 16
"""Texts are padded to a multiple of as many tokens, so that several share a forward."""


class ImageEmbeddings(ImageTask[VectorOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="embeddings",
        texts=(
            TextInput(TEXT, "the texts", TEXT_ALIASES, is_optional=True),
            TOKEN_TEXTS,
            dataclasses.replace(IMAGES, meaning=f"instead of `text`, {IMAGES.meaning}", is_optional=True),
        ),
        outputs={"embedding": TaskOutput("TYPE_FP32", "the vector", num_dims=1)},
        options=VectorOptions,
        has_json=False,
    )
    auto_class: ClassVar[str] = IMAGES_AND_TEXTS

    @classmethod
    def check_config(cls, config: Any, settings: ModelSettings) -> None:
        if settings.pooling is not None:
            raise SettingsError(f"pooling has no effect on a {architecture_names(config)}: leave it out")

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        super().__init__(checkpoint, settings)
        if not all(hasattr(self.model, f"get_{kind}_features") for kind in ("text", "image")):
            raise CheckpointError(
                "unsupported_model",
                f"a {architecture_names(self.config)} has no vectors of texts and of images: choose a CLIP or SigLIP",
            )
        self._text_limits = request_limits(settings, self.max_length, MIN_ENCODER_BYTES)
        self._num_ids: int = self.config.get_text_config().vocab_size
        self._is_siglip = self.config.model_type.startswith("siglip")
        self._size: int = self.trial()[0].shape[-1]

    def examples(self) -> list[ArrayInput]:
        return [*super().examples(), self._padded(self._token_ids("a", VectorOptions(truncate=True)))]

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, object], limits: Limits
    ) -> TaskRequest[VectorOptions]:
        given = [text.name for text in self.declaration.texts if {text.name, *text.aliases} & {*inputs, *parameters}]
        if len(given) != 1:
            problem = f"{param_list(given, ' and ')} are given" if given else "there is no text and no image"
            raise RequestError("invalid_input", f"{problem}: give one of {param_list((TEXT, TOKEN_IDS, IMAGE))}")
        return super().read(inputs, parameters, limits)

    def check_options(self, options: VectorOptions) -> None:
        check_dimensions(options, self._size)

    def encode(self, row: Row, options: VectorOptions) -> EncodedRow:
        if IMAGE in row:
            return EncodedRow([self.image(row[IMAGE])])
        check_size(len(row[TEXT].encode()), self._text_limits, param(TEXT))
        return EncodedRow([self._padded(self._token_ids(row[TEXT], options))])

    def encode_tokens(self, row: TokenRow, options: VectorOptions) -> EncodedRow:
        inputs = super().encode_tokens(row, options).inputs
        return EncodedRow([self._padded(each.ids) for each in inputs])

    def compute(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        is_text = "input_ids" in arrays
        output = self.model.get_text_features(**arrays) if is_text else self.model.get_image_features(**arrays)
        vectors: torch.Tensor = output.pooler_output
        return vectors

    def decode(self, encoded: EncodedRow, options: VectorOptions, outputs: list[npt.NDArray[Any]]) -> TaskResult:
        """A vector is cut, then normalised."""
        normalizes = self.settings.normalize if options.normalize is None else options.normalize
        vector = cut_vector(outputs[0], options.dimensions, normalizes=bool(normalizes))
        return TaskResult(json=vector, tensors={"embedding": vector})

    def _padded(self, ids: list[int]) -> ArrayInput:
        """What the model computes of a text, padded so that the text alone decides by how much.

        SigLIP was trained on texts padded to its whole context, and reads the last token of it.
        """
        if not ids or max(ids) >= self._num_ids:
            raise RequestError("invalid_input", f"the text must have tokens, with ids in 0 to {self._num_ids - 1}")
        length = self.max_length if self._is_siglip else -(-len(ids) // TEXT_MULTIPLE) * TEXT_MULTIPLE
        num_padding = min(length, self.max_length) - len(ids)
        padding = (num_padding, 0) if self._is_siglip and self.tokenizer.padding_side == "left" else (0, num_padding)
        arrays = {"input_ids": np.pad(ids, padding, constant_values=self.tokenizer.pad_token_id or 0)}
        if "attention_mask" in self.tokenizer.model_input_names:
            arrays["attention_mask"] = np.pad(np.ones_like(ids), padding)
        return ArrayInput(arrays, len(ids))

    def _token_ids(self, text: str, options: VectorOptions) -> list[int]:
        if self.tokenizer.is_fast:
            return list(self.tokenize(text, options=options).ids)
        ids: list[int] = self.tokenizer(text)["input_ids"]  # SigLIP's own, in Python
        limit = self.limit(options, self.tokenizer.num_special_tokens_to_add())
        if len(ids) <= limit:
            return ids
        self.check_cut(len(ids), options)
        with self.cutting:
            self.tokenizer.truncation_side = self.side(options)
            cut: list[int] = self.tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        return cut
