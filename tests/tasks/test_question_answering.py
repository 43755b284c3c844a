# SPDX-License-Identifier: Apache-2.0
"""Answers equal those that transformers 4.57's pipeline gives for the same logits, and the best span by brute force."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering

from hf_triton.errors import RequestError
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.tasks.question_answering import AnswerOptions, QuestionAnswering, find_spans
from tests.support.tasks import SOME, Served

QUESTION = "Where does Anna live?"
CONTEXT = (
    "Anna lives in Berlin, near the old harbour, and works for the Post. Bob went to München-Ost in 1990; it was very "
    "good. "
)
RECORDED = json.loads(Path(__file__).with_name("answers_of_transformers_4.json").read_text())
"""What `QuestionAnsweringPipeline.postprocess` of transformers 4.57.1 makes of logits that numpy draws."""
FAMILY_OF = {"wordpiece": "bert", "bytes": "modernbert"}


@pytest.fixture(scope="module")
def serve(serve_task: Callable[..., tuple[Served, Path]]) -> Callable[..., tuple[Served, Path]]:
    def serve(family: str = "bert") -> tuple[Served, Path]:
        served, folder = serve_task(QuestionAnswering, family, "answers")
        served.task.tokenizer.cls_token = "<s>"
        return served, folder

    return serve


def ask(served: Served, question: str, context: str, **parameters: Any) -> dict[str, Array]:
    return served.ask(
        {"question": encode_strings([question], (1,)), "context": encode_strings([context], (1,))}, **parameters
    )


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_answers_equal_those_of_transformers_4(number: int, serve: Callable[..., tuple[Served, Path]]) -> None:
    case = RECORDED[number]
    served, _ = serve(FAMILY_OF[case["tokenizer"]])
    served.task.max_length = 130
    options = AnswerOptions(**case["options"])
    context = CONTEXT * case["repeats"]
    encoded = served.task.encode({"question": QUESTION, "context": context}, options)
    assert len(encoded.inputs) == case["num_windows"]
    draw = np.random.RandomState(7)
    outputs = [draw.normal(size=(2, len(each.ids))).astype(np.float32) * 3 for each in encoded.inputs]
    found = served.task.decode(encoded, options, outputs).json
    answers = found if isinstance(found, list) else [found]
    assert [[answer["start"], answer["end"]] for answer in answers] == [row[1:] for row in case["answers"]]
    np.testing.assert_allclose([answer["score"] for answer in answers], [row[0] for row in case["answers"]], atol=2e-6)
    assert all(answer["answer"] == context[answer["start"] : answer["end"]] for answer in answers)


def best_span(served: Served, folder: Path, question: str, context: str, max_answer_len: int) -> tuple[float, int, int]:
    """The best span of one window by looking at all of them: score, first and last token's characters."""
    tokenizer = served.task.tokenizer
    encoding = tokenizer.backend_tokenizer.encode(question, context)
    model = AutoModelForQuestionAnswering.from_pretrained(folder)
    arguments = {"input_ids": torch.tensor([encoding.ids])}
    if "token_type_ids" in tokenizer.model_input_names:
        arguments["token_type_ids"] = torch.tensor([encoding.type_ids])
    with torch.no_grad():
        output = model(**arguments)
    allowed = [part == 1 or token_id == 0 for part, token_id in zip(encoding.sequence_ids, encoding.ids, strict=True)]
    probabilities = []
    for logits in (output.start_logits[0], output.end_logits[0]):
        masked = [float(logit) if is_allowed else -10000.0 for logit, is_allowed in zip(logits, allowed, strict=True)]
        weights = [np.exp(logit - max(masked)) for logit in masked]
        probabilities.append([weight / sum(weights) for weight in weights])
    best = (0.0, 0, 0)
    for first, part in enumerate(encoding.sequence_ids):
        for last in range(first, min(first + max_answer_len, len(encoding.ids))):
            if part == 1 and encoding.sequence_ids[last] == 1:
                score = float(probabilities[0][first] * probabilities[1][last])
                if score > best[0]:
                    best = score, encoding.offsets[first][0], encoding.offsets[last][1]
    return best


@pytest.mark.parametrize("family", SOME)
def test_answer_is_the_best_of_all_spans(family: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve(family)
    for context in (CONTEXT, "Berlin", "the old harbour"):
        encoded = served.task.encode({"question": QUESTION, "context": context}, AnswerOptions())
        [(starts, ends)] = (each.numpy() for each in served.forward(list(encoded.inputs)))
        (span, *_), _ = find_spans(encoded.context[1][0], starts, ends, AnswerOptions(), 0)
        score, start, end = best_span(served, folder, QUESTION, context, 15)
        assert span.score == pytest.approx(score, abs=1e-5)
        assert span.start <= start < end <= span.end  # it has whole words
        outputs = ask(served, QUESTION, context)
        found = json.loads(outputs["output"][0])
        assert found["answer"] == context[found["start"] : found["end"]]
        assert outputs["answer"][0].decode() == found["answer"]
        assert {name: (outputs[name].shape, outputs[name].dtype) for name in ("score", "start", "end")} == {
            "score": ((1,), np.float32),
            "start": ((1,), np.int64),
            "end": ((1,), np.int64),
        }


def test_one_context_serves_several_questions(serve: Callable[..., tuple[Served, Path]]) -> None:
    served, _ = serve()
    questions = ["Where?", "Who works?", "When did Bob go?"]
    outputs = served.ask({"question": encode_strings(questions, (3,)), "context": encode_strings([CONTEXT], (1,))})
    alone = [ask(served, question, CONTEXT)["answer"][0] for question in questions]
    assert list(outputs["answer"]) == alone


ONE: dict[str, Array] = {"question": encode_strings([QUESTION], (1,)), "context": encode_strings([CONTEXT], (1,))}
REFUSED: dict[str, tuple[dict[str, Array], dict[str, object], str]] = {
    "no context": ({"question": ONE["question"]}, {}, "context is missing: question-answering needs context"),
    "no question": ({"context": ONE["context"]}, {}, "question is missing"),
    "an empty context": ({**ONE, "context": encode_strings([" "], (1,))}, {}, "context is empty"),
    "an empty question": ({**ONE, "question": encode_strings([""], (1,))}, {}, "question is empty"),
    "a long question": (
        {**ONE, "question": encode_strings(["bad " * 200], (1,))},
        {},
        "more than the 130 of the model",
    ),
    "a question that fills a window": (ONE, {"max_seq_len": 10}, "leaves no token of the 10 of a window"),
    "too much overlap": (ONE, {"max_seq_len": 60, "doc_stride": 59}, "doc_stride must be an integer >= 0 and <= "),
    "no answer": (ONE, {"max_answer_len": 0}, "max_answer_len must be an integer >= 1, got 0"),
    "too many answers": (ONE, {"top_k": 1000}, "top_k must be an integer >= 1 and <= 100"),
    "two and three": (
        {"question": encode_strings(["a", "b"], (2,)), "context": encode_strings(["a", "b", "c"], (3,))},
        {},
        "got 2 of question and 3 of context",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_in_a_sentence(case: str, serve: Callable[..., tuple[Served, Path]]) -> None:
    inputs, parameters, sentence = REFUSED[case]
    with pytest.raises(RequestError, match=sentence):
        serve()[0].ask(inputs, **parameters)
