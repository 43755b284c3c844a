# SPDX-License-Identifier: Apache-2.0
"""`/v1/rerank`, `/v1/score` and `/v1/classify`: scores of documents, of pairs of texts, and labels.

Rerank has the form of Cohere's and Jina's clients, score and classify that of vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

import annotated_types
from fastapi import APIRouter, Request

from hf_triton.openai.answers import now_s
from hf_triton.openai.bodies import JsonRoute, beside_loop
from hf_triton.openai.conversation import parse_at
from hf_triton.openai.encoders import EncoderFields, encode, text_list, usage_of
from hf_triton.openai.errors import RESPONSES, ApiError
from hf_triton.openai.fields import MAX_TEXTS, Fields, Ignored, Texts
from hf_triton.openai.gateway import request_id_of
from hf_triton.openai.triton_messages import CLASSIFICATION, RERANK

router = APIRouter(route_class=JsonRoute)
SCORE: Final = "score"
ALL_SCORES: Final = "all_scores"


class _Document(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {}
    text: str


class RerankRequest(EncoderFields):
    """Cohere's and Jina's fields."""

    query: Annotated[str, annotated_types.MinLen(1)]
    """What the documents are to answer."""

    documents: Annotated[list[str | dict[str, Any]], annotated_types.MaxLen(MAX_TEXTS)]
    """Texts, or objects with `text`."""

    top_n: Annotated[int, annotated_types.Ge(1)] | None = None
    """How many documents to return, the best first. By default all."""

    return_documents: bool | None = None
    """Whether results hold the documents. By default they do."""


class ScoreRequest(EncoderFields):
    """vLLM's fields."""

    text_1: str | Texts
    """One text, or as many as `text_2` has."""

    text_2: str | Texts
    """The texts that are scored with it."""


class ClassifyRequest(EncoderFields):
    """vLLM's fields."""

    input: str | Texts
    """A text, or several."""

    top_k: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """How many labels to list with their scores in `labels`, beside the best one."""


@router.post("/v1/rerank", responses=RESPONSES)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
    """Documents by their score for a query."""
    documents = await beside_loop(request, _read_documents, body.documents)
    texts = {"query": [body.query], "documents": text_list("documents", documents)}
    outputs = await encode(request, body, RERANK, texts, [SCORE])
    results = []
    for index, score in sorted(enumerate(outputs[SCORE]), key=lambda pair: -pair[1])[: body.top_n]:
        document = {} if body.return_documents is False else {"document": {"text": documents[index]}}
        results.append({"index": index, "relevance_score": score, **document})
    return {
        "id": f"rerank-{request_id_of(request)}",
        "model": body.model,
        "usage": usage_of(outputs),
        "results": results,
    }


def _read_documents(documents: Sequence[str | dict[str, Any]]) -> list[str]:
    return [
        each if isinstance(each, str) else parse_at(_Document, f"documents[{index}]", each).text
        for index, each in enumerate(documents)
    ]


@router.post("/v1/score", responses=RESPONSES)
@router.post("/score", include_in_schema=False)
async def score(body: ScoreRequest, request: Request) -> dict[str, Any]:
    """Scores of pairs of texts."""
    first, second = text_list("text_1", body.text_1), text_list("text_2", body.text_2)
    if len(first) not in (1, len(second)):
        raise ApiError(
            400, f"text_1 has {len(first)} texts and text_2 {len(second)}: give one, or as many", param="text_1"
        )
    names = {"query": "text_1", "documents": "text_2"}
    outputs = await encode(request, body, RERANK, {"query": first, "documents": second}, [SCORE], names=names)
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(outputs[SCORE])]
    return {**_head(body, request, "score"), "data": data, "usage": usage_of(outputs)}


@router.post("/v1/classify", responses=RESPONSES)
@router.post("/classify", include_in_schema=False)
async def classify(body: ClassifyRequest, request: Request) -> dict[str, Any]:
    """The best label of each text, and the scores of all."""
    texts = text_list("input", body.input)
    outputs = await encode(
        request,
        body,
        CLASSIFICATION,
        {"text": texts},
        ["label", SCORE, ALL_SCORES],
        parameters={"top_k": body.top_k},
        names={"text": "input"},
    )
    data = []
    for index in range(len(texts)):
        labels, scores, probs = (_row(outputs[name], index, len(texts)) for name in ("label", SCORE, ALL_SCORES))
        entry = {"index": index, "label": labels[0], "score": scores[0], "probs": probs, "num_classes": len(probs)}
        if body.top_k is not None:
            entry["labels"] = [{"label": label, "score": each} for label, each in zip(labels, scores, strict=True)]
        data.append(entry)
    return {**_head(body, request, "classify"), "data": data, "usage": usage_of(outputs)}


def _row(values: list[Any], index: int, num_rows: int) -> list[Any]:
    """The values of one row, of as many for each."""
    width = len(values) // num_rows
    return values[index * width : (index + 1) * width]


def _head(body: EncoderFields, request: Request, kind: str) -> dict[str, Any]:
    return {"id": f"{kind}-{request_id_of(request)}", "object": "list", "created": now_s(), "model": body.model}
