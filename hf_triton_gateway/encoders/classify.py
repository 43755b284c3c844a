# SPDX-License-Identifier: Apache-2.0
"""`/v1/classify`: labels of texts or images, in the form of vLLM's clients."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton.protocol.task_declaration import IMAGE
from hf_triton_gateway.chat.fields import Texts, TokenIds, TokenLists
from hf_triton_gateway.encoders.encoders import EncoderFields, response_head
from hf_triton_gateway.encoders.image_items import (
    ImageRoute,
    ItemOutputs,
    Parts,
    encode_items,
    item_rows,
    read_items,
    size_of_items,
)
from hf_triton_gateway.encoders.reranking import SCORE
from hf_triton_gateway.http.api_errors import RESPONSES, ApiError
from hf_triton_gateway.http.bodies import beside_loop, json_response
from hf_triton_gateway.triton.triton_messages import CLASSIFICATION, IMAGE_CLASSIFICATION

router = APIRouter(route_class=ImageRoute)
ALL_SCORES: Final = "all_scores"
OUTPUTS: Final = ("label", SCORE, ALL_SCORES)


class ClassifyRequest(EncoderFields):
    """vLLM's fields."""

    task_of_model: ClassVar[str | None] = CLASSIFICATION

    input: str | Texts | TokenIds | TokenLists | Parts
    """A text, token ids, an image, or a list of them. An image is a data URI, or OpenAI's part `image_url` with one."""

    top_k: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """How many labels to list with their scores in `labels`, beside the best one."""


@router.post("/v1/classify", responses=RESPONSES, response_model=dict[str, Any])
@router.post("/classify", include_in_schema=False)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """The best label of each text or image, and the scores of all."""
    items = await beside_loop(request, read_items, "input", body.input, strings_too=True)
    if len(items) > 1:
        raise ApiError(400, "input holds texts and images: send them in two requests", param="input")
    task = IMAGE_CLASSIFICATION if IMAGE in items else CLASSIFICATION
    found = await encode_items(request, body, task, items, OUTPUTS, {"top_k": body.top_k})
    head = response_head(body, request, "classify")
    return await json_response(size_of_items(found), _answer, body, head, found)


def _answer(body: ClassifyRequest, head: dict[str, Any], found: ItemOutputs) -> dict[str, Any]:
    rows, usage = item_rows(found, OUTPUTS)
    data = []
    for index, row in enumerate(rows):
        labels, scores, probs = row["label"], row[SCORE], row[ALL_SCORES]
        entry = {"index": index, "label": labels[0], "score": scores[0], "probs": probs, "num_classes": len(probs)}
        if body.top_k is not None:
            entry["labels"] = [{"label": label, "score": each} for label, each in zip(labels, scores, strict=True)]
        data.append(entry)
    return {**head, "data": data, "usage": usage}
