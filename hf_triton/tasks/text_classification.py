# SPDX-License-Identifier: Apache-2.0
"""Text classification: the labels of a text, or of a pair of texts, with scores as transformers' pipeline has them."""

from __future__ import annotations

from typing import ClassVar

from hf_triton.protocol.task_declaration import PAIR, TEXT, TEXTS, TOKEN_TEXTS, TaskDeclaration, TextInput
from hf_triton.protocol.task_requests import Row
from hf_triton.tasks.classification import OUTPUTS, Classification, ClassificationOptions
from hf_triton.tasks.encoder_task import EncodedRow


class TextClassification(Classification):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="text-classification",
        texts=(
            TEXTS,
            TextInput(PAIR, "a second text for each, of models that compare two", is_optional=True),
            TOKEN_TEXTS,
        ),
        outputs=OUTPUTS,
        options=ClassificationOptions,
        has_json=False,
        takes_tokens=True,
    )
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"

    def encode(self, row: Row, options: ClassificationOptions) -> EncodedRow:
        return EncodedRow([self.to_input(self.tokenize(row[TEXT], row.get(PAIR), options))])
