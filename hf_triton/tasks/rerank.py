# SPDX-License-Identifier: Apache-2.0
"""Rerank: how well documents answer a query, by a cross-encoder, as sentence-transformers' CrossEncoder scores them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import annotated_types
import numpy as np

from hf_triton.errors import CheckpointError, RequestError
from hf_triton.hub.sentence_files import load_cross_encoder, load_general_config
from hf_triton.protocol.names import INPUT_ALIASES
from hf_triton.protocol.task_declaration import TaskDeclaration, TaskOptions, TaskOutput, TextInput
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.protocol.token_rows import TokenRow
from hf_triton.sentence import param
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.scores import Floats, sigmoid
from hf_triton.tasks.sentence_prompts import SentencePrompts

if TYPE_CHECKING:
    from pathlib import Path

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings

QUERY = "query"
DOCUMENTS = "documents"
ACTIVATIONS = ("sigmoid", "identity")
"""The last part of the class that sentence-transformers' config names, in lower case."""


class RerankOptions(TaskOptions):
    """Request parameters of rerank."""

    raw_scores: bool = False
    """Whether scores are the model's logits. By default they are what the checkpoint's config says for
    sentence-transformers, else their sigmoid, from 0 to 1."""

    prompt_name: str | None = None
    """Name of the prompt that stands before the query, of those in config_sentence_transformers.json. By default its
    `default_prompt_name`; an empty name stands for no prompt."""

    max_tokens_per_doc: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """Tokens of its own, the first ones, that each longer document is cut to. By default none is cut, and `truncate`
    cuts query and document together."""


class Rerank(EncoderTask[RerankOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="rerank",
        texts=(
            TextInput(QUERY, "the query, one for all documents or one for each"),
            TextInput(DOCUMENTS, "the documents", INPUT_ALIASES[DOCUMENTS]),
        ),
        outputs={"score": TaskOutput("TYPE_FP32", "the score of each document, the higher the better")},
        options=RerankOptions,
        has_json=False,
        takes_tokens=True,
    )
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"

    @classmethod
    def check_config(cls, config: Any, settings: Any) -> None:
        if config.num_labels != 1:
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} has {config.num_labels} labels, and rerank needs a model with one "
                "score: set task to text-classification, or choose another model",
            )

    @classmethod
    def check_files(cls, folder: Path, settings: Any) -> None:
        load_general_config(folder)
        load_cross_encoder(folder, "sequence-classification")

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        super().__init__(checkpoint, settings)
        general = load_general_config(checkpoint.folder)
        self._activation = activation_of(self.config, general.activation, settings)
        self._prompts = SentencePrompts(general.prompts, general.default_prompt)
        if transformer := load_cross_encoder(checkpoint.folder, "sequence-classification"):
            self.follow(transformer)

    def check_options(self, options: RerankOptions) -> None:
        self._prompts.check(options.prompt_name)

    def encode(self, row: Row, options: RerankOptions) -> EncodedRow:
        query = self._prompts.text(options.prompt_name) + row[QUERY]
        document = first_tokens(self, row[DOCUMENTS], options.max_tokens_per_doc)
        return EncodedRow([self.to_input(self.tokenize(query, document, options))])

    def encode_tokens(self, row: TokenRow, options: RerankOptions) -> EncodedRow:
        """What is a document's among token ids is not known."""
        if options.max_tokens_per_doc is not None:
            raise RequestError(
                "invalid_parameter", f"{param('max_tokens_per_doc')} is for texts, and not for token ids"
            )
        return super().encode_tokens(row, options)

    def decode(self, encoded: EncodedRow, options: RerankOptions, outputs: list[Floats]) -> TaskResult:
        return score_result(outputs[0].reshape(()), is_raw=options.raw_scores or self._activation == "identity")


def first_tokens(task: EncoderTask[Any], text: str, num_tokens: int | None) -> str:
    """The text of a text's first tokens, special tokens aside; None: all."""
    if num_tokens is None:
        return text
    offsets = task.offsets(text)
    if len(offsets) <= num_tokens:
        return text
    (_, end), (start, _) = offsets[num_tokens - 1 : num_tokens + 1]
    return text[: min(end, start)]  # tokens may share a character


def activation_of(config: Any, named: str | None, settings: ModelSettings) -> str:
    """What makes a score of a logit, one of ACTIVATIONS.

    Older versions of sentence-transformers name it in the model's config.

    Raises:
        CheckpointError: It is another one.
    """
    own = getattr(config, "sentence_transformers", None) or {}
    named = named or own.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    activation = str(named or "sigmoid").rpartition(".")[2].lower()
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            "unsupported_model",
            f"{settings.huggingface_model} makes scores by {named}, and Sigmoid and Identity are known",
        )
    return activation


def score_result(logit: Any, *, is_raw: bool) -> TaskResult:
    """The result of a row: its logit, or the sigmoid of it."""
    score = np.float32(logit if is_raw else sigmoid(logit))
    return TaskResult(json={"score": float(score)}, tensors={"score": score})
