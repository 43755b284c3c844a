# SPDX-License-Identifier: Apache-2.0
"""Sparse embeddings: a weight for few tokens of the vocabulary, of each text; SPLADE, as SparseEncoder makes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import annotated_types
import numpy as np
import numpy.typing as npt

from hf_triton.hub.sentence_modules import load_sparse_modules
from hf_triton.protocol.task_declaration import TEXT, TEXTS, TaskDeclaration, TaskOutput
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.sentence_prompts import PromptOptions, SentencePrompts

if TYPE_CHECKING:
    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings


class SparseOptions(PromptOptions):
    """Request parameters of sparse-embeddings."""

    max_active_dims: Annotated[int, annotated_types.Ge(1)] | None = None
    """How many weights a text keeps at most, the largest. By default as config_sentence_transformers.json says, else
    all that are not zero."""


class SparseEmbeddings(EncoderTask[SparseOptions]):
    """The logits of a masked language model, pooled over a text's tokens."""

    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="sparse-embeddings",
        texts=(TEXTS,),
        outputs={
            "indices": TaskOutput(
                "TYPE_INT64",
                "ids of the tokens with a weight, ascending, those of all texts one behind the other: `num_values` "
                "says how many each text has",
                by_default=False,
                is_ragged=True,
            ),
            "values": TaskOutput("TYPE_FP32", "their weights, in the same order", by_default=False, is_ragged=True),
            "num_values": TaskOutput("TYPE_UINT32", "how many weights the text has", by_default=False),
        },
        options=SparseOptions,
    )
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    per_token: ClassVar[bool] = True

    @classmethod
    def check_files(cls, folder: Path, settings: ModelSettings) -> None:
        load_sparse_modules(folder)

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        import torch

        super().__init__(checkpoint, settings)
        self._modules = load_sparse_modules(checkpoint.folder)
        self.follow(self._modules.transformer)
        self._prompts = SentencePrompts(self._modules.general.prompts, self._modules.general.default_prompt)
        self.merge = torch.maximum if self._modules.pooling == "max" else torch.add

    def check_options(self, options: SparseOptions) -> None:
        self._prompts.check(options.prompt_name)

    def encode(self, row: Row, options: SparseOptions) -> EncodedRow:
        text = self._prompts.text(options.prompt_name) + row[TEXT]
        return EncodedRow([self.to_input(self.tokenize(text, options=options))])

    def reduce(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weight of each token of the vocabulary, of float32 `[tokens, vocabulary]`; see `EncoderTask`."""
        if self._modules.pooling == "max":  # what follows keeps the order of numbers
            return self._activate(outputs.amax(0))
        return self._activate(outputs).sum(0)

    def _activate(self, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.relu().log1p_()
        return weights.log1p_() if self._modules.activation == "log1p_relu" else weights

    def decode(self, encoded: EncodedRow, options: SparseOptions, outputs: list[npt.NDArray[Any]]) -> TaskResult:
        """JSON is an object with `indices` and `values`."""
        weights = self.weights(encoded, outputs[0])
        indices = np.flatnonzero(weights)
        limit = options.max_active_dims or self._modules.general.max_active_dims
        if limit is not None and limit < len(indices):
            indices = np.sort(indices[np.argsort(-weights[indices], kind="stable")[:limit]])
        values = weights[indices]
        return TaskResult(
            json={"indices": indices.tolist(), "values": values.tolist()},
            tensors={"indices": indices, "values": values, "num_values": len(indices)},
        )

    def weights(self, encoded: EncodedRow, output: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The weight of each token of the vocabulary, none below 0, of what `reduce` returned."""
        return output
