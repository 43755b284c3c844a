# SPDX-License-Identifier: Apache-2.0
"""`/v1/rerank` and `/v1/score`: scores of documents and of pairs of texts.

Rerank has the form of Cohere's and Jina's clients, score that of vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton_gateway.app_state import request_id_of
from hf_triton_gateway.chat.conversation import parse_at
from hf_triton_gateway.chat.fields import MAX_TEXTS, Fields, Ignored, Texts
from hf_triton_gateway.encoders.encoders import EncoderFields, encode, response_head, text_list, usage_of
from hf_triton_gateway.http.api_errors import RESPONSES, ApiError
from hf_triton_gateway.http.bodies import JsonRoute, beside_loop, json_response
from hf_triton_gateway.triton.triton_messages import RERANK

router = APIRouter(route_class=JsonRoute)
SCORE: Final = "score"
PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two sides of `/v1/score`."""
Documents = Annotated[list[str | dict[str, Any]], annotated_types.MaxLen(MAX_TEXTS)]


class _Document(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {}
    text: str


class ScoringFields(EncoderFields):
    """The fields that both share."""

    task_of_model: ClassVar[str | None] = RERANK

    max_tokens_per_doc: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """A longer document is cut to this many of its own tokens, the first ones. By default none is."""

    def parameters(self) -> dict[str, int | None]:
        """The parameters of the model's task."""
        return {"max_tokens_per_doc": self.max_tokens_per_doc}


class RerankRequest(ScoringFields):
    """Cohere's and Jina's fields."""

    query: Annotated[str, annotated_types.MinLen(1)]
    """What the documents are to answer."""

    documents: Documents
    """Texts, or objects with `text`."""

    top_n: Annotated[int, annotated_types.Ge(1)] | None = None
    """How many documents to return, the best first. By default all."""

    return_documents: bool | None = None
    """Whether results hold the documents. By default they do."""


class ScoreRequest(ScoringFields):
    """vLLM's fields: one of `PAIRS`."""

    text_1: str | Texts | None = None
    """One text, or as many as `text_2` has."""

    text_2: str | Texts | None = None
    """The texts that are scored with it."""

    queries: str | Texts | None = None
    """Another name of `text_1`."""

    documents: str | Texts | None = None
    """Another name of `text_2`, beside `queries`."""

    items: str | Texts | None = None
    """Another name of `documents`."""

    data_1: str | Texts | None = None
    """Another name of `text_1`."""

    data_2: str | Texts | None = None
    """Another name of `text_2`, beside `data_1`."""

    def pair(self) -> tuple[str, str]:
        """The names by which the texts are given."""
        given = self.model_fields_set - ScoringFields.model_fields.keys()
        pair = next((pair for pair in PAIRS if {*pair} == given), None)
        if pair is None:
            pairs = ", or ".join(f"{one} and {other}" for one, other in PAIRS)
            found = " and ".join(sorted(given)) or "none"
            raise ApiError(400, f"give {pairs}; got {found}", param=min(given, default="text_1"))
        return pair


@router.post("/v1/rerank", responses=RESPONSES, response_model=dict[str, Any])
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Documents by their score for a query."""
    return await json_response(len(await request.body()), dict, await ranked(body, request))


async def ranked(body: RerankRequest, request: Request) -> dict[str, Any]:
    """The answer of `/v1/rerank`."""
    documents = await beside_loop(request, _read_documents, body.documents)
    texts = {"query": [body.query], "documents": text_list("documents", documents)}
    outputs = await encode(request, body, RERANK, texts, [SCORE], parameters=body.parameters())
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


@router.post("/v1/score", responses=RESPONSES, response_model=dict[str, Any])
@router.post("/score", include_in_schema=False)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Scores of pairs of texts."""
    one, other = body.pair()
    first, second = text_list(one, getattr(body, one)), text_list(other, getattr(body, other))
    if len(first) not in (1, len(second)):
        raise ApiError(400, f"{one} has {len(first)} texts and {other} {len(second)}: give one, or as many", param=one)
    names = {"query": one, "documents": other}
    texts, parameters = {"query": first, "documents": second}, body.parameters()
    outputs = await encode(request, body, RERANK, texts, [SCORE], parameters=parameters, names=names)
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(outputs[SCORE])]
    answer = {**response_head(body, request, "score"), "data": data, "usage": usage_of(outputs)}
    return await json_response(64 * len(data), dict, answer)
