# SPDX-License-Identifier: Apache-2.0
"""Rerank by a model that generates: whether its next token would be `yes` or `no`, as Qwen3-Reranker is asked."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import numpy as np

from hf_triton.encoder.types import EncoderInput
from hf_triton.errors import CheckpointError, RequestError
from hf_triton.protocol.task_declaration import TaskDeclaration
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.rerank import DOCUMENTS, QUERY, Rerank, RerankOptions
from hf_triton.tasks.scores import Floats, sigmoid

HEAD: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
TAIL: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Before and behind the pair, in the words of the model's card, with which it was trained."""
ANSWERS: Final = ("no", "yes")


class GenerativeOptions(RerankOptions):
    """Request parameters of rerank, by a model that generates."""

    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"
    """What makes a document relevant."""


class GenerativeRerank(EncoderTask[GenerativeOptions]):
    """See `EncoderTask`."""

    declaration: ClassVar[TaskDeclaration] = dataclasses.replace(
        Rerank.declaration, options=GenerativeOptions, takes_tokens=False
    )
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    per_token: ClassVar[bool] = True

    def __init__(self, checkpoint: Any, settings: Any) -> None:
        super().__init__(checkpoint, settings)
        ids = [self._plain_ids(answer) for answer in ANSWERS]
        if any(len(each) != 1 for each in ids):
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} has no tokens yes and no, by which a reranker that generates answers: "
                "choose another model",
            )
        self._answers = [token_id for (token_id,) in ids]
        self._head, self._tail = (self._plain_ids(text) for text in (HEAD, TAIL))

    def _plain_ids(self, text: str) -> list[int]:
        ids: list[int] = self._whole.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, row: Row, options: GenerativeOptions) -> EncodedRow:
        """See `EncoderTask`."""
        text = f"<Instruct>: {options.instruction}\n<Query>: {row[QUERY]}\n<Document>: {row[DOCUMENTS]}"
        ids, room = self._plain_ids(text), self.max_length - len(self._head) - len(self._tail)
        if len(ids) > room and not self.may_cut(options.truncate):
            raise RequestError(
                "context_exceeded",
                f"query and document have {len(ids)} tokens with the instruction, more than the {room} that the "
                "model's own words leave: shorten them, or set truncate to true",
            )
        whole = [*self._head, *ids[:room], *self._tail]
        return EncodedRow([EncoderInput(whole, output_positions=[len(whole) - 1])])

    def decode(self, encoded: EncodedRow, options: GenerativeOptions, outputs: list[Floats]) -> TaskResult:
        """See `EncoderTask`. The score is the probability of `yes` among both, or the difference of their logits."""
        no, yes = outputs[0][-1][self._answers]
        score = np.float32(yes - no if options.raw_scores else sigmoid(yes - no))
        return TaskResult(json={"score": float(score)}, tensors={"score": score})
