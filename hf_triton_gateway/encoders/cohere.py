# SPDX-License-Identifier: Apache-2.0
"""Cohere's second API: `/v2/embed` and `/v2/rerank`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import annotated_types
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton_gateway.app_state import request_id_of
from hf_triton_gateway.chat.conversation import parse_at
from hf_triton_gateway.chat.fields import MAX_TEXTS, Fields, Texts
from hf_triton_gateway.encoders.encoders import EncoderFields, as_base64, encode, rows_of, text_list, usage_of
from hf_triton_gateway.encoders.reranking import RerankRequest, ranked
from hf_triton_gateway.http.api_errors import COHERE_RESPONSES, ApiError
from hf_triton_gateway.http.bodies import JsonRoute, beside_loop, json_response
from hf_triton_gateway.triton.triton_messages import EMBEDDING, EMBEDDINGS, Outputs, size_of

router = APIRouter(route_class=JsonRoute)
PROMPTS: Final[Mapping[str, tuple[str | None, ...]]] = {
    "search_query": ("query", None),
    "search_document": ("document", "passage", None),
    "classification": ("classification", None),
    "clustering": ("clustering", None),
}
"""The names of the model's prompts for each type of input; the first that the model has stands before the texts."""
Vectors = Sequence[Sequence[float]]


class _Text(Fields):
    type: Literal["text"]
    text: Annotated[str, annotated_types.MinLen(1)]


class _Input(Fields):
    content: list[dict[str, Any]]


class EmbedRequest(EncoderFields):
    """Cohere's fields."""

    task_of_model: ClassVar[str | None] = EMBEDDINGS

    texts: Texts | None = None
    """The texts."""

    inputs: Annotated[list[dict[str, Any]], annotated_types.MaxLen(MAX_TEXTS)] | None = None
    """The same as objects: `{"content": [{"type": "text", "text": "..."}]}`."""

    input_type: Literal["search_query", "search_document", "classification", "clustering"] | None = None
    """What the texts are. The model's prompt of this name stands before them, if it has one: `query`; `document` or
    `passage`; `classification`; `clustering`."""

    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    """`float`, the default; `base64`, the bytes of the float32 numbers; `binary` and `ubinary`, a bit for each number
    above 0, as int8 and as uint8."""

    output_dimension: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """Vectors are cut to this many dimensions; for models that were trained so."""

    truncate: bool | Literal["NONE", "START", "END"] | None = "END"
    """Whether a text that is longer than the model's context is cut at its START or its END, or refused (NONE)."""


@router.post("/v2/embed", responses=COHERE_RESPONSES, response_model=dict[str, Any])
async def embed(body: EmbedRequest, request: Request) -> Response:
    """Vectors of texts."""
    texts = await beside_loop(request, _texts, body)
    outputs = await _encode(request, body, texts)
    return await json_response(size_of(outputs), _answer, body, request_id_of(request), texts, outputs)


def _answer(body: EmbedRequest, request_id: str, texts: list[str], outputs: Outputs) -> dict[str, Any]:
    vectors = rows_of(outputs[EMBEDDING], len(texts))
    kinds = body.embedding_types or ["float"]
    return {
        "id": f"embd-{request_id}",
        "response_type": "embeddings_by_type",
        "texts": texts,
        "embeddings": {kind: FORMS[kind](vectors) for kind in kinds},
        "meta": _meta(input_tokens=usage_of(outputs)["prompt_tokens"]),
    }


def _texts(body: EmbedRequest) -> list[str]:
    if (body.texts is None) == (body.inputs is None):
        raise ApiError(400, "give the texts as texts or as inputs, one of them", param="texts")
    if body.texts is not None:
        return text_list("texts", body.texts)
    return text_list("inputs", [_text_of(f"inputs[{index}]", entry) for index, entry in enumerate(body.inputs or ())])


def _text_of(place: str, entry: dict[str, Any]) -> str:
    parts = enumerate(parse_at(_Input, place, entry).content)
    return "".join(parse_at(_Text, f"{place}.content[{index}]", part).text for index, part in parts)


async def _encode(request: Request, body: EmbedRequest, texts: list[str]) -> Outputs:
    """The vectors, with the first of the type's prompts that the model has."""
    prompts = PROMPTS[body.input_type] if body.input_type else (None,)
    for prompt in prompts:
        parameters = {"prompt_name": prompt, "dimensions": body.output_dimension, "normalize": True}
        names: dict[str, str | None] = {"text": "texts" if body.inputs is None else "inputs"}
        names |= {"dimensions": "output_dimension", "truncate": None}  # which is not true or false here
        try:
            return await encode(
                request, body, EMBEDDINGS, {"text": texts}, [EMBEDDING], parameters=parameters, names=names
            )
        except ApiError as error:
            if prompt is None or error.field != "prompt_name":
                raise
    raise AssertionError("the last try has no prompt")


def _bits(vectors: Vectors) -> Any:
    return np.stack([np.packbits(np.array(vector) > 0) for vector in vectors])


FORMS: Final[Mapping[str, Callable[[Vectors], Any]]] = {
    "float": lambda vectors: vectors,
    "base64": lambda vectors: [*map(as_base64, vectors)],
    "binary": lambda vectors: (_bits(vectors).astype(np.int16) - 128).tolist(),
    "ubinary": lambda vectors: _bits(vectors).tolist(),
}
"""What writes vectors as a type; bits are packed as in sentence-transformers."""


@router.post("/v2/rerank", responses=COHERE_RESPONSES, response_model=dict[str, Any])
async def rerank_v2(body: RerankRequest, request: Request) -> Response:
    """Documents by their score for a query; those that are too long are cut, unless `truncate` is false."""
    answer = await ranked(body if body.truncate is not None else body.model_copy(update={"truncate": True}), request)
    return await json_response(len(await request.body()), dict, answer, meta=_meta(search_units=1))


def _meta(**units: int) -> dict[str, Any]:
    return {"api_version": {"version": "2"}, "billed_units": units}
