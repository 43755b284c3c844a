# SPDX-License-Identifier: Apache-2.0
"""Feature extraction: the last hidden state of each token of a text."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy.typing as npt

from hf_triton.protocol.task_declaration import TEXT, TEXTS, TaskDeclaration, TaskOptions, TaskOutput
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask

STATES = "last_hidden_state"


class FeatureExtraction(EncoderTask[TaskOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="feature-extraction",
        texts=(TEXTS,),
        outputs={
            STATES: TaskOutput(
                "TYPE_FP32",
                "a vector for each token, those of all texts one below the other: `num_input_tokens` says where each "
                "text begins",
                num_dims=1,
                by_default=False,
                is_ragged=True,
            )
        },
        takes_tokens=True,
    )
    model_outputs: ClassVar[tuple[str, ...]] = (STATES,)
    per_token: ClassVar[bool] = True

    def encode(self, row: Row, options: TaskOptions) -> EncodedRow:
        return EncodedRow([self.to_input(self.tokenize(row[TEXT], options=options))])

    def decode(self, encoded: EncodedRow, options: TaskOptions, outputs: list[npt.NDArray[Any]]) -> TaskResult:
        """JSON is nested as transformers' pipeline nests it: texts, tokens, values."""
        return TaskResult(json=outputs[0][None], tensors={STATES: outputs[0]})
