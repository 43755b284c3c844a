# SPDX-License-Identifier: Apache-2.0
"""Rerank: how well documents answer a query, by a cross-encoder, as sentence-transformers' CrossEncoder scores them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from hf_triton.errors import CheckpointError
from hf_triton.protocol.task_declaration import TaskDeclaration, TaskOptions, TaskOutput, TextInput
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.scores import Floats, sigmoid

QUERY = "query"
DOCUMENTS = "documents"
ACTIVATIONS = ("sigmoid", "identity")
"""The last part of the class that sentence-transformers' config names, in lower case."""


class RerankOptions(TaskOptions):
    """Request parameters of rerank."""

    raw_scores: bool = False
    """Whether scores are the model's logits. By default they are what the checkpoint's config says for
    sentence-transformers, else their sigmoid, from 0 to 1."""


class Rerank(EncoderTask[RerankOptions]):
    """See `EncoderTask`."""

    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="rerank",
        texts=(
            TextInput(QUERY, "the query, one for all documents or one for each"),
            TextInput(DOCUMENTS, "the documents", ("document", "texts", "passages")),
        ),
        outputs={"score": TaskOutput("TYPE_FP32", "the score of each document, the higher the better")},
        options=RerankOptions,
        has_json=False,
        takes_tokens=True,
    )
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"

    @classmethod
    def check_config(cls, config: Any, settings: Any) -> None:
        """See `EncoderTask`."""
        if config.num_labels != 1:
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} has {config.num_labels} labels, and rerank needs a model with one "
                "score: set task to text-classification, or choose another model",
            )

    def __init__(self, checkpoint: Any, settings: Any) -> None:
        super().__init__(checkpoint, settings)
        own = getattr(self.config, "sentence_transformers", None) or {}
        named = str(own.get("activation_fn") or getattr(self.config, "sbert_ce_default_activation_function", "sigmoid"))
        self._activation = named.rpartition(".")[2].lower()
        if self._activation not in ACTIVATIONS:
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} makes scores by {named}, and Sigmoid and Identity are known",
            )

    def encode(self, row: Row, options: RerankOptions) -> EncodedRow:
        """See `EncoderTask`."""
        return EncodedRow([self.to_input(self.tokenize(row[QUERY], row[DOCUMENTS], truncate=options.truncate))])

    def decode(self, encoded: EncodedRow, options: RerankOptions, outputs: list[Floats]) -> TaskResult:
        """See `EncoderTask`."""
        logit = outputs[0].reshape(())
        is_raw = options.raw_scores or self._activation == "identity"
        score = np.float32(logit if is_raw else sigmoid(logit))
        return TaskResult(json={"score": float(score)}, tensors={"score": score})
