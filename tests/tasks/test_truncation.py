# SPDX-License-Identifier: Apache-2.0
"""Where and to how many tokens the tasks of encoders cut texts: as transformers' tokenizers do."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hf_triton.errors import RequestError
from hf_triton.protocol.task_declaration import TaskOptions
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.tasks.embeddings import Embeddings
from hf_triton.tasks.question_answering import QuestionAnswering
from hf_triton.tasks.rerank import Rerank
from hf_triton.tasks.text_classification import TextClassification
from hf_triton.tasks.token_classification import TokenClassification
from tests.support.marks import full
from tests.support.sentence_checkpoints import save_sentence_model
from tests.support.tasks import LIMITS, Served

LONG = " ".join(f"{word} harbour" for word in ("old", "cold", "grey", "deep", "far") * 20)
QUERY = "Where does Anna live?"
TOKENS: dict[str, Array] = {"input_ids": np.arange(5, 15)[None], "attention_mask": np.ones((1, 10), np.int64)}


def strings(*texts: str) -> Array:
    return encode_strings(texts, (len(texts),))


@pytest.fixture(scope="module")
def classifier(serve_task: Callable[..., tuple[Served, Path]]) -> Callable[[str], tuple[Any, Path]]:
    def serve(family: str) -> tuple[Any, Path]:
        served, folder = serve_task(TextClassification, family, "sequence", num_labels=3)
        return served.task, folder

    return serve


@pytest.mark.parametrize("limit", [5, 17, -1])
@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("family", ["roberta", *full("bert")])
def test_texts_and_pairs_are_cut_as_the_tokenizer_cuts_them(
    classifier: Callable[[str], tuple[Any, Path]], family: str, side: Any, limit: int
) -> None:
    task, folder = classifier(family)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **({} if side is None else {"truncation_side": side}))
    options = TaskOptions(truncation_side=side, truncate_prompt_tokens=limit)
    size = task.max_length if limit == -1 else limit
    for texts in ((LONG,), (QUERY, LONG), (LONG, QUERY), ("short",)):
        expected = tokenizer(*texts, truncation=True, max_length=size).input_ids
        assert task.tokenize(*texts, options=options).ids == expected


def test_a_side_alone_cuts_nothing(classifier: Callable[[str], tuple[Any, Path]]) -> None:
    task, _ = classifier("bert")
    with pytest.raises(RequestError, match="shorten it, or set truncate to true"):
        task.tokenize(LONG, options=TaskOptions(truncation_side="left"))


def test_requests_with_other_limits_and_sides_leave_each_other_alone(
    classifier: Callable[[str], tuple[Any, Path]],
) -> None:
    task, _ = classifier("bert")
    wanted = [(side, limit) for side in ("left", "right") for limit in (4, 9)]

    def cut(choice: tuple[Any, int]) -> set[tuple[int, ...]]:
        options = TaskOptions(truncation_side=choice[0], truncate_prompt_tokens=choice[1])
        return {tuple(task.tokenize(LONG, options=options).ids) for _ in range(100)}

    alone = [cut(choice) for choice in wanted]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(cut, wanted)) == alone
    assert all(len(found) == 1 for found in alone)


@pytest.mark.parametrize("limit", [2, 131])
def test_a_limit_leaves_a_token_and_fits_the_model(classifier: Callable[[str], tuple[Any, Path]], limit: int) -> None:
    task, _ = classifier("bert")
    with pytest.raises(RequestError, match="must be -1, or an integer >= 3 and <= 130, of which 2 are special; got"):
        task.tokenize("a", options=TaskOptions(truncate_prompt_tokens=limit))


@pytest.mark.parametrize("limit", [-1, 20])
def test_a_number_of_tokens_and_no_cutting_contradict_each_other(
    classifier: Callable[[str], tuple[Any, Path]], limit: int
) -> None:
    task, _ = classifier("bert")
    given = {"truncate": False, "truncate_prompt_tokens": limit}
    of_ids = task.read(TOKENS, given, LIMITS)
    with pytest.raises(RequestError, match="truncate_prompt_tokens and truncate false contradict each other"):
        task.tokenize("a", options=TaskOptions(**given))
    with pytest.raises(RequestError, match="truncate_prompt_tokens and truncate false contradict each other"):
        task.encode_row(of_ids.rows[0], of_ids.options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_token_ids_are_cut_too(classifier: Callable[[str], tuple[Any, Path]], side: Any) -> None:
    task, _ = classifier("bert")
    request = task.read(TOKENS, {"truncation_side": side, "truncate_prompt_tokens": 4}, LIMITS)
    (encoded,) = task.encode_row(request.rows[0], request.options).inputs
    assert encoded.ids == (list(range(11, 15)) if side == "left" else list(range(5, 9)))


def test_a_prompt_that_is_cut_away_takes_no_token_out_of_the_vector(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Find: "}, "default_prompt": "query", "includes_prompt": False}
    task = Served(save_sentence_model(tmp_path / "model", **prompts), Embeddings).task

    def pooled(**options: Any) -> tuple[int, list[int]]:
        request = task.read({"text": strings(LONG)}, options, LIMITS)
        (encoded,) = task.encode_row(request.rows[0], request.options).inputs
        return len(encoded.ids), encoded.output_positions

    size, from_the_end = pooled(truncate_prompt_tokens=30, truncation_side="left")
    assert (size, from_the_end) == (30, list(range(1, 30)))
    size, from_the_start = pooled(truncate_prompt_tokens=30)
    assert size == 30
    assert from_the_start[0] > 1


@pytest.mark.parametrize(
    ("kind", "head", "inputs", "options"),
    [
        (QuestionAnswering, "answers", {"question": "who?", "context": LONG}, {}),
        (TokenClassification, "tokens", {"text": LONG}, {"stride": 3, "aggregation_strategy": "simple"}),
    ],
)
def test_windows_take_no_limit(
    serve_task: Callable[..., tuple[Served, Path]], kind: Any, head: str, inputs: dict[str, str], options: Any
) -> None:
    served, _ = serve_task(kind, "bert", head)
    with pytest.raises(RequestError, match="truncate_prompt_tokens is for texts that are not computed in windows"):
        served.ask({name: strings(text) for name, text in inputs.items()}, truncate_prompt_tokens=20, **options)


def test_documents_are_cut_to_their_first_tokens(serve_task: Callable[..., tuple[Served, Path]]) -> None:
    served, folder = serve_task(Rerank, "bert", "sequence", num_labels=1)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(LONG, add_special_tokens=False)
    end = ids.token_to_chars(6).end
    documents = ["short", LONG]
    cut = served.ask({"query": strings(QUERY), "documents": strings(*documents)}, max_tokens_per_doc=7)["score"]
    expected = served.ask({"query": strings(QUERY), "documents": strings("short", LONG[:end])})["score"]
    np.testing.assert_allclose(cut, expected, atol=1e-6)
    with pytest.raises(RequestError, match="max_tokens_per_doc is for texts"):
        served.ask(TOKENS, max_tokens_per_doc=7)
