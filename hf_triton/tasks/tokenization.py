# SPDX-License-Identifier: Apache-2.0
"""Tokenization: token ids of texts, for the model of another folder in an ensemble. Has no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hf_triton.errors import CheckpointError
from hf_triton.hub.sentence_modules import load_sentence_modules
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.task_declaration import PAIR, TEXT, TEXTS, TaskDeclaration, TaskOptions, TaskOutput, TextInput
from hf_triton.protocol.task_requests import Row, TaskRequest, TaskResult
from hf_triton.protocol.tensor_values import Array
from hf_triton.protocol.token_rows import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPE, TOKEN_TYPE_IDS
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings


class Tokenization(EncoderTask[TaskOptions]):
    """Texts are tokenized as `embeddings`, `text-classification` or `rerank` would tokenize them."""

    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="tokenization",
        texts=(
            TEXTS,
            TextInput(PAIR, "a second text for each, to stand behind it", is_optional=True),
        ),
        outputs={
            INPUT_IDS: TaskOutput(TOKEN_TYPE, "token ids, special tokens included", num_dims=1, is_padded=True),
            ATTENTION_MASK: TaskOutput(TOKEN_TYPE, "1 for tokens, 0 for padding", num_dims=1, is_padded=True),
            TOKEN_TYPE_IDS: TaskOutput(TOKEN_TYPE, "1 for a second text's tokens", num_dims=1, is_padded=True),
        },
        has_json=False,
    )

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        super().__init__(checkpoint, settings)
        self._prompt = ""
        modules = load_sentence_modules(checkpoint.folder)
        if modules is None:
            return
        if modules.default_prompt is not None and not modules.includes_prompt:
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} leaves the tokens of its prompt out of a vector, and token ids do not "
                "say which those are: serve it by one folder",
            )
        self._prompt = modules.prompts.get(modules.default_prompt or "", "")
        self.follow(modules)

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, object], limits: Limits
    ) -> TaskRequest[TaskOptions]:
        """Triton gives an ensemble's parameters to all of its models: the next one checks them."""
        known = {*self.declaration.input_types} - {"lora_name"}
        return super().read(inputs, {name: value for name, value in parameters.items() if name in known}, limits)

    def encode(self, row: Row, options: TaskOptions) -> EncodedRow:
        encoding = self.tokenize(self._prompt + row[TEXT], row.get(PAIR), options)
        return EncodedRow([self.to_input(encoding)])

    def decode(self, encoded: EncodedRow, options: TaskOptions, outputs: list[npt.NDArray[Any]]) -> TaskResult:
        (tokens,) = encoded.inputs
        ids = np.array(tokens.ids, np.int64)
        types = np.zeros_like(ids) if tokens.type_ids is None else np.array(tokens.type_ids, np.int64)
        return TaskResult(json=ids, tensors={INPUT_IDS: ids, ATTENTION_MASK: np.ones_like(ids), TOKEN_TYPE_IDS: types})
