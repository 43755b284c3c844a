# SPDX-License-Identifier: Apache-2.0
"""The endpoints of Hugging Face's Text Embeddings Inference, whose requests name no model: `/embed`, `/predict`, ..."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

import annotated_types
import numpy as np
from fastapi import APIRouter, Request, Response

from hf_triton import __version__
from hf_triton.protocol.names import JSON_OUTPUT
from hf_triton_gateway.app_state import gateway_of
from hf_triton_gateway.chat.conversation import parse_at
from hf_triton_gateway.chat.fields import MAX_TEXTS, Fields, Texts, TokenIds, TokenLists
from hf_triton_gateway.encoders.encoders import EncoderFields, encode, rows_of, text_list, texts_or_tokens
from hf_triton_gateway.encoders.reranking import SCORE, Documents, RerankRequest, ScoringFields, rerank
from hf_triton_gateway.http.api_errors import TEI_PATHS, TEI_RESPONSES, ApiError
from hf_triton_gateway.http.bodies import JsonRoute, beside, beside_loop, json_response
from hf_triton_gateway.triton.triton_messages import (
    CLASSIFICATION,
    EMBEDDING,
    EMBEDDINGS,
    FEATURES,
    RERANK,
    SPARSE,
    Outputs,
    size_of,
)
from hf_triton_gateway.triton.triton_models import Model

router = APIRouter(route_class=JsonRoute)
ALL: Final = ("all_labels", "all_scores")
KINDS: Final[Mapping[str, str]] = {
    EMBEDDINGS: "embedding",
    SPARSE: "embedding",
    RERANK: "reranker",
    CLASSIFICATION: "classifier",
}
"""What `/info` calls a task; another has its own name."""
MAX_EMBED_ALL: Final = 32
"""Texts of one request for the vectors of tokens, which take a hundred times the bytes of others."""


class EmbedRequest(EncoderFields):
    """Texts for vectors."""

    task_of_model: ClassVar[str | None] = EMBEDDINGS

    inputs: str | Texts | TokenIds | TokenLists
    """A text, token ids, or a list of them."""

    normalize: bool = True
    """Whether a vector has length 1."""

    prompt_name: str | None = None
    """Name of the prompt that the model puts before each text, such as `query`."""

    dimensions: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """Vectors are cut to this many dimensions; for models that were trained so."""


class EmbedAllRequest(EncoderFields):
    """Texts for the vectors of their tokens."""

    task_of_model: ClassVar[str | None] = FEATURES

    inputs: str | Annotated[list[str], annotated_types.MaxLen(MAX_EMBED_ALL)]
    """A text, or a list of them."""


class EmbedSparseRequest(EncoderFields):
    """Texts for sparse vectors."""

    task_of_model: ClassVar[str | None] = SPARSE

    inputs: str | Texts
    """A text, or a list of them."""

    prompt_name: str | None = None
    """Name of the prompt that the model puts before each text, such as `query`."""


class PredictRequest(EncoderFields):
    """Texts, or pairs of texts, for labels."""

    task_of_model: ClassVar[str | None] = CLASSIFICATION

    inputs: str | Annotated[list[str | list[str]], annotated_types.MaxLen(MAX_TEXTS)]
    """A text, a pair of texts, or a list of lists that hold one or two texts."""

    raw_scores: bool = False
    """Whether scores are the model's logits."""


class RankRequest(ScoringFields):
    """A query, and texts to be ranked."""

    query: Annotated[str, annotated_types.MinLen(1)]
    """What the texts are to answer."""

    texts: Texts | None = None
    """The texts."""

    raw_scores: bool = False
    """Whether scores are the model's logits."""

    return_text: bool = False
    """Whether the ranks hold the texts."""

    documents: Documents | None = None
    """Stands in place of `texts`: the request has the form of `/v1/rerank`."""

    top_n: int | None = None
    return_documents: bool | None = None


class _Sentences(Fields):
    source_sentence: str
    sentences: Texts


class SimilarityRequest(EncoderFields):
    """A sentence, and others to compare with it."""

    task_of_model: ClassVar[str | None] = EMBEDDINGS

    inputs: dict[str, Any]
    """`source_sentence`, and the list `sentences`."""


@router.post("/embed", responses=TEI_RESPONSES, response_model=list[list[float]])
async def embed(body: EmbedRequest, request: Request) -> Response:
    """Vectors of texts."""
    name, texts = texts_or_tokens("inputs", body.inputs)
    parameters = {"normalize": body.normalize, "prompt_name": body.prompt_name, "dimensions": body.dimensions}
    outputs = await encode(
        request, body, EMBEDDINGS, {name: texts}, [EMBEDDING], parameters=parameters, names={name: "inputs"}
    )
    return await json_response(size_of(outputs), rows_of, outputs[EMBEDDING], len(texts))


@router.post("/embed_all", responses=TEI_RESPONSES, response_model=list[list[list[float]]])
async def embed_all(body: EmbedAllRequest, request: Request) -> Response:
    """The vectors of each text's tokens, before pooling; by a folder of the task feature-extraction."""
    texts = {"text": text_list("inputs", body.inputs)}
    outputs = await encode(request, body, FEATURES, texts, [JSON_OUTPUT], names={"text": "inputs"})
    return Response(await beside(size_of(outputs), _vectors, outputs), media_type="application/json")


def _vectors(outputs: Outputs) -> str:
    """The vectors of all texts: each text has one row, which is not read, for its size."""
    return f"[{','.join(text[1:-1] for text in outputs[JSON_OUTPUT])}]"


@router.post("/embed_sparse", responses=TEI_RESPONSES, response_model=list[list[dict[str, int | float]]])
async def embed_sparse(body: EmbedSparseRequest, request: Request) -> Response:
    """Sparse vectors of texts: weights of tokens of the vocabulary."""
    texts, parameters = {"text": text_list("inputs", body.inputs)}, {"prompt_name": body.prompt_name}
    names = {"text": "inputs"}
    outputs = await encode(request, body, SPARSE, texts, [JSON_OUTPUT], parameters=parameters, names=names)
    return await json_response(size_of(outputs), _sparse, outputs)


def _sparse(outputs: Outputs) -> list[list[dict[str, Any]]]:
    return [
        [{"index": index, "value": value} for index, value in zip(each["indices"], each["values"], strict=True)]
        for each in map(json.loads, outputs[JSON_OUTPUT])
    ]


@router.post("/similarity", responses=TEI_RESPONSES, response_model=list[float])
async def similarity(body: SimilarityRequest, request: Request) -> Response:
    """The cosine of a sentence's vector and those of others."""
    inputs = await beside_loop(request, parse_at, _Sentences, "inputs", body.inputs)
    sentences, source = text_list("inputs.sentences", inputs.sentences), inputs.source_sentence
    texts = [*sentences, *text_list("inputs.source_sentence", source)]
    places = [*(f"sentences[{index}]" for index in range(len(sentences))), "source_sentence"]
    parameters, names = {"normalize": True}, {"text": "inputs"}
    outputs = await encode(
        request, body, EMBEDDINGS, {"text": texts}, [EMBEDDING], parameters=parameters, names=names, places=places
    )
    return await json_response(size_of(outputs), _cosines, outputs, len(texts))


def _cosines(outputs: Outputs, num_texts: int) -> list[float]:
    *vectors, source = map(np.array, rows_of(outputs[EMBEDDING], num_texts))
    return [float(vector @ source) for vector in vectors]


@router.post("/predict", responses=TEI_RESPONSES, response_model=list[Any])
async def predict(body: PredictRequest, request: Request) -> Response:
    """Labels with their scores, the best first; of a list, a list for each of its entries."""
    entries, is_batch = await beside_loop(request, _pairs, body.inputs)
    parameters = {"function_to_apply": "none" if body.raw_scores else None}
    answers: list[Any] = [None] * len(entries)
    for size in (1, 2):
        rows = [row for row, entry in enumerate(entries) if len(entry) == size]
        if not rows:
            continue
        texts = {name: [entries[row][side] for row in rows] for side, name in enumerate(("text", "text_pair")[:size])}
        names = dict.fromkeys(texts, "inputs")
        outputs = await encode(
            request,
            body,
            CLASSIFICATION,
            texts,
            ALL,
            parameters=parameters,
            names=names,
            places=rows if is_batch else (),
        )
        found = await beside(size_of(outputs), predictions, outputs, len(rows))
        for row, labels in zip(rows, found, strict=True):
            answers[row] = labels
    num_bytes = 64 * sum(map(len, answers))  # a label with its score
    return await json_response(num_bytes, list, answers if is_batch else answers[0])


def predictions(outputs: Outputs, num_rows: int) -> list[list[dict[str, Any]]]:
    """The labels of each row with their scores, the best first."""
    labels, scores = (rows_of(outputs[name], num_rows) for name in ALL)
    pairs = (zip(*row, strict=True) for row in zip(scores, labels, strict=True))
    ranked = (sorted(row, key=lambda pair: -pair[0]) for row in pairs)
    return [[{"score": score, "label": label} for score, label in row] for row in ranked]


def _pairs(inputs: str | Sequence[str | list[str]]) -> tuple[list[list[str]], bool]:
    """The texts or pairs of a request, and whether they are a batch."""
    if isinstance(inputs, str):
        inputs = [inputs]
    is_batch = bool(inputs) and not any(isinstance(entry, str) for entry in inputs)
    entries: list[Any] = list(inputs) if is_batch else [list(inputs)]
    if not all(len(entry) in (1, 2) and all(isinstance(text, str) and text for text in entry) for entry in entries):
        message = "inputs must be a text, a pair of texts, or a list of [text] and [text, text], none of them empty"
        raise ApiError(400, message, param="inputs")
    return entries, is_batch


@router.post("/rerank", include_in_schema=False)
async def rank(body: RankRequest, request: Request) -> Any:
    """Texts by their score for a query, in the form of the request: TEI's with `texts`, or that of `/v1/rerank`."""
    if body.texts is None:
        given = body.model_dump(include=body.model_fields_set)
        return await rerank(await beside_loop(request, RerankRequest.model_validate, given), request)
    try:
        ranks = await _ranks(request, body, body.texts)
        return await json_response(len(await request.body()), list, ranks)
    except ApiError as error:
        return error.response(TEI_PATHS[0])  # the path has both forms


async def _ranks(request: Request, body: RankRequest, given: Sequence[str]) -> list[dict[str, Any]]:
    for name in ("documents", "top_n", "return_documents"):
        if name in body.model_fields_set:
            raise ApiError(400, f"{name} is of another form of this request than texts: leave one out", param=name)
    texts = {"query": [body.query], "documents": text_list("texts", given)}
    parameters, names = {"raw_scores": body.raw_scores, **body.parameters()}, {"documents": "texts"}
    outputs = await encode(request, body, RERANK, texts, [SCORE], parameters=parameters, names=names)
    ranks = sorted(enumerate(outputs[SCORE]), key=lambda pair: -pair[1])
    return [
        {"index": index, "score": score, **({"text": given[index]} if body.return_text else {})}
        for index, score in ranks
    ]


@router.get("/info", responses=TEI_RESPONSES)
async def info(request: Request, model: str | None = None) -> dict[str, Any]:
    """What the only model is, or the one that the query parameter `model` names."""
    gateway = gateway_of(request)
    served = await _model(request, model) if model else await gateway.models.only(None, way="by ?model=NAME")
    about: dict[str, Any] = {"model_id": served.name, "version": __version__}
    about["max_concurrent_requests"] = gateway.config.max_concurrent_requests
    about["max_client_batch_size"] = MAX_TEXTS
    if served.folder.info is not None:
        kind = KINDS.get(served.folder.info.task, served.folder.info.task)
        about |= {
            "model_id": served.folder.info.model,
            "model_dtype": served.folder.info.dtype,
            "model_type": {kind: {}},
            "max_input_length": served.folder.info.context_length,
        }
    return about


async def _model(request: Request, name: str) -> Model:
    models = gateway_of(request).models
    for served in await models.models():
        if served.name == name:
            return served
    raise await models.missing(name)
