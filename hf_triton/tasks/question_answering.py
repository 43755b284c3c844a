# SPDX-License-Identifier: Apache-2.0
"""Question answering: the part of a context that answers a question.

The choice of the answer is that of transformers 4's pipeline, which transformers 5 has no more. The start and the end
of an answer each have a probability over the tokens of a window; an answer's score is their product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import annotated_types
import numpy as np

from hf_triton.errors import RequestError
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.task_declaration import JSON_OUTPUT, TaskDeclaration, TaskOptions, TaskOutput, TextInput
from hf_triton.protocol.task_requests import Row, TaskRequest, TaskResult
from hf_triton.protocol.tensor_values import Array
from hf_triton.sentence import param
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.scores import Floats, softmax

QUESTION = "question"
CONTEXT = "context"
SECOND = 1
"""The number of the context among the texts of a pair."""
IMPOSSIBLE = -10000.0
"""The logit of a token that is not of the context."""


class AnswerOptions(TaskOptions):
    """Request parameters of question-answering."""

    top_k: Annotated[int, annotated_types.Ge(1), annotated_types.Le(100)] = 1
    """How many answers `output` lists, the best first; fewer if there are not so many."""

    max_answer_len: Annotated[int, annotated_types.Ge(1)] = 15
    """Tokens of an answer at most."""

    max_seq_len: Annotated[int, annotated_types.Ge(1)] | None = None
    """Tokens of a window at most, the question included. By default 384, or the model's context if that is less."""

    doc_stride: Annotated[int, annotated_types.Ge(0)] | None = None
    """Tokens that two windows of a long context share. By default 128, or half of a window if that is less."""

    handle_impossible_answer: bool = False
    """Whether the answer may be empty: that there is none in the context."""


@dataclass(frozen=True)
class Span:
    """A possible answer, in characters of the context."""

    score: float
    start: int
    end: int


class QuestionAnswering(EncoderTask[AnswerOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="question-answering",
        texts=(
            TextInput(QUESTION, "the questions"),
            TextInput(CONTEXT, "the texts that hold the answers, one for all questions or one for each"),
        ),
        outputs={
            "answer": TaskOutput("TYPE_STRING", "the best answer, a part of the context; empty: there is none"),
            "score": TaskOutput("TYPE_FP32", "its score; that of equal answers at several places adds up"),
            "start": TaskOutput("TYPE_INT64", "the character of the context at which it begins"),
            "end": TaskOutput("TYPE_INT64", "the character behind its last"),
        },
        options=AnswerOptions,
    )
    auto_class: ClassVar[str] = "AutoModelForQuestionAnswering"
    model_outputs: ClassVar[tuple[str, ...]] = ("start_logits", "end_logits")
    per_token: ClassVar[bool] = True

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, object], limits: Limits
    ) -> TaskRequest[AnswerOptions]:
        """MLServer's clients, whose inputs have the same names, read `output` as the first one."""
        request = super().read(inputs, parameters, limits)
        return dataclasses.replace(request, default_outputs=(JSON_OUTPUT, *self.declaration.outputs))

    def encode(self, row: Row, options: AnswerOptions) -> EncodedRow:
        """A context that is longer than a window makes several."""
        self.refuse_limit(options)
        if not row[CONTEXT].strip():
            raise RequestError("invalid_input", f"{param(CONTEXT)} is empty: give the text that holds the answer")
        if not row[QUESTION].strip():
            raise RequestError("invalid_input", f"{param(QUESTION)} is empty")
        length = min(options.max_seq_len or 384, self.max_length)
        room = length - len(self.tokenize(row[QUESTION], "", truncate=False).ids)
        if room < 1:
            raise RequestError(
                "context_exceeded",
                f"the {param(QUESTION)} leaves no token of the {length} of a window for the {param(CONTEXT)}: "
                f"shorten it, or set {param('max_seq_len')} to more",
            )
        stride = min(128, length // 2, room - 1) if options.doc_stride is None else options.doc_stride
        if stride >= room:
            raise RequestError(
                "invalid_parameter",
                f"{param('doc_stride')} must be an integer >= 0 and <= {room - 1}, which the question leaves, got "
                f"{stride}",
            )
        encodings = self.windows(row[QUESTION], row[CONTEXT], length=length, stride=stride)
        return EncodedRow(list(map(self.to_input, encodings)), (row[CONTEXT], encodings))

    def decode(self, encoded: EncodedRow, options: AnswerOptions, outputs: list[Floats]) -> TaskResult:
        """JSON is the best answer, or an array of them if `top_k` is more than 1."""
        context, encodings = encoded.context
        answers: dict[str, dict[str, Any]] = {}
        nulls = []
        for encoding, (starts, ends) in zip(encodings, outputs, strict=True):
            spans, null = find_spans(encoding, starts, ends, options, self.tokenizer.cls_token_id)
            nulls.append(null)
            for span in spans:
                text = context[span.start : span.end]
                answer = {"score": 0.0, "start": span.start, "end": span.end, "answer": text}
                answers.setdefault(text.lower(), answer)["score"] += span.score
        found = [*answers.values()]
        if options.handle_impossible_answer or not found:
            found.append({"score": min(nulls), "start": 0, "end": 0, "answer": ""})
        best = sorted(found, key=lambda answer: -answer["score"])[: options.top_k]
        return TaskResult(json=best[0] if options.top_k == 1 else best, tensors=best[0])


def find_spans(
    encoding: Any, starts: Floats, ends: Floats, options: AnswerOptions, cls_token_id: int | None
) -> tuple[list[Span], float]:
    """The best spans of a window, by each token's logits as the first and the last one, and the score of no answer.

    The token `cls_token_id` stands for no answer and takes its part of the probability; None: there is none.
    """
    is_context = np.array([part == SECOND for part in encoding.sequence_ids])
    is_possible = is_context | (np.array(encoding.ids) == cls_token_id)
    start_scores, end_scores = (softmax(np.where(is_possible, logits, IMPOSSIBLE)) for logits in (starts, ends))
    null = float(start_scores[0] * end_scores[0])
    start_scores[0] = end_scores[0] = 0.0
    products = np.tril(np.triu(np.outer(start_scores, end_scores)), options.max_answer_len - 1)
    order = np.argsort(-products, axis=None, kind="stable")[: 2 * options.top_k + 10]
    spans = []
    for first, last in zip(*np.unravel_index(order, products.shape), strict=True):
        if is_context[first] and is_context[last] and products[first, last] > 0:
            spans.append(Span(float(products[first, last]), *_whole_words(encoding, int(first), int(last))))
    return spans, null


def _whole_words(encoding: Any, first: int, last: int) -> tuple[int, int]:
    """The characters of the words that two tokens are parts of; those of the tokens, if they are parts of none."""
    words = encoding.token_to_word(first), encoding.token_to_word(last)
    characters = [
        None if word is None else encoding.word_to_chars(word[1] if isinstance(word, tuple) else word, SECOND)
        for word in words
    ]
    begin, end = characters
    if begin is None or end is None:
        return encoding.offsets[first][0], encoding.offsets[last][1]
    return begin[0], end[1]
