# SPDX-License-Identifier: Apache-2.0
"""Zero-shot classification: which of the request's own labels a text entails, by a model of natural language inference.

Each label is a hypothesis, and a pair with the text: Yin et al., "Benchmarking Zero-shot Text Classification", 2019.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import annotated_types
import numpy as np
from pydantic import BeforeValidator

from hf_triton.errors import CheckpointError, RequestError, clip
from hf_triton.protocol.names import TEXT_ALIASES
from hf_triton.protocol.task_declaration import TEXT, TaskDeclaration, TaskOptions, TaskOutput, TextInput
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.protocol.validation import read_strings
from hf_triton.sentence import param
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.scores import Floats, best_first, softmax

MAX_LABELS = 100
ENTAILMENT = "entail"
"""How the label of models that entail begins."""


def _read_labels(value: object) -> object:
    """Read strings; commas part the labels of a single one that is no JSON array, as in transformers' pipeline."""
    labels = read_strings(value)
    if isinstance(value, str) and labels == (value,):
        return tuple(label for part in value.split(",") if (label := part.strip()))
    return labels


class ZeroShotOptions(TaskOptions):
    """Request parameters of zero-shot-classification."""

    candidate_labels: (
        Annotated[
            tuple[Annotated[str, annotated_types.MinLen(1)], ...],
            annotated_types.MinLen(1),
            annotated_types.MaxLen(MAX_LABELS),
            BeforeValidator(_read_labels),
        ]
        | None
    ) = None
    """The labels to choose from. Required. Commas part those of a single string, as in transformers' pipeline; one
    label that has a comma is a JSON array in a string."""

    hypothesis_template: Annotated[str, annotated_types.MaxLen(1000)] = "This example is {}."
    """The sentence that a label becomes, at `{}`."""

    multi_label: bool = False
    """Whether several labels may hold: each then has a probability of its own, else they add up to 1."""


class ZeroShotClassification(EncoderTask[ZeroShotOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="zero-shot-classification",
        texts=(TextInput(TEXT, "the texts", (*TEXT_ALIASES, "sequences")),),
        outputs={
            "label": TaskOutput("TYPE_STRING", "the candidate labels, the likeliest first", num_dims=1),
            "score": TaskOutput("TYPE_FP32", "their probabilities", num_dims=1),
        },
        options=ZeroShotOptions,
    )
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"

    @classmethod
    def check_config(cls, config: Any, settings: Any) -> None:
        labels = _labels(config)
        if len(labels) < 2 or not any(label.lower().startswith(ENTAILMENT) for label in labels.values()):
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} has no label that begins with '{ENTAILMENT}', as models of natural "
                f"language inference have; its labels are {', '.join(map(clip, labels.values()))}: choose a model that "
                "has one",
            )

    def __init__(self, checkpoint: Any, settings: Any) -> None:
        super().__init__(checkpoint, settings)
        labels = _labels(self.config)
        self._entailment = next(i for i, label in labels.items() if label.lower().startswith(ENTAILMENT))
        self._contradiction = len(labels) - 1 if self._entailment == 0 else 0

    def check_options(self, options: ZeroShotOptions) -> None:
        if options.candidate_labels is None:
            raise RequestError(
                "invalid_parameter", f"{param('candidate_labels')} is missing: give the labels to choose from"
            )
        if len(set(options.candidate_labels)) < len(options.candidate_labels):
            raise RequestError("invalid_parameter", f"{param('candidate_labels')} names a label twice: name each once")
        if options.hypothesis_template.count("{}") != 1:
            raise RequestError(
                "invalid_parameter",
                f"{param('hypothesis_template')} must have one {{}} for the label, got "
                f"{clip(options.hypothesis_template)}",
            )

    def encode(self, row: Row, options: ZeroShotOptions) -> EncodedRow:
        pairs = [options.hypothesis_template.replace("{}", label) for label in options.candidate_labels or ()]
        return EncodedRow([self.to_input(self.tokenize(row[TEXT], pair, options)) for pair in pairs], row[TEXT])

    def decode(self, encoded: EncodedRow, options: ZeroShotOptions, outputs: list[Floats]) -> TaskResult:
        """JSON has `sequence`, `labels` and `scores`, as transformers' pipeline has them."""
        labels, logits = options.candidate_labels or (), np.stack(outputs)
        if options.multi_label or len(labels) == 1:
            scores = softmax(logits[:, [self._contradiction, self._entailment]])[:, 1]
        else:
            scores = softmax(logits[:, self._entailment])
        best = best_first(scores)
        names = [labels[index] for index in best]
        return TaskResult(
            json={"sequence": encoded.context, "labels": names, "scores": scores[best].tolist()},
            tensors={"label": names, "score": scores[best]},
        )


def _labels(config: Any) -> dict[int, str]:
    return {int(index): str(label) for index, label in (config.id2label or {}).items()}
