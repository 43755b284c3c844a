# SPDX-License-Identifier: Apache-2.0
"""`/v1/classify`: labels of texts or images, in the form of vLLM's clients."""

from __future__ import annotations

from typing import Annotated, Any, Final

import annotated_types
from fastapi import APIRouter, Request

from hf_triton.openai.encoders import EncoderFields
from hf_triton.openai.errors import RESPONSES, ApiError
from hf_triton.openai.fields import Texts, TokenIds, TokenLists
from hf_triton.openai.images import ImageRoute, Parts, encode_items, read_items
from hf_triton.openai.scores import SCORE, response_head
from hf_triton.openai.triton_messages import CLASSIFICATION, IMAGE_CLASSIFICATION
from hf_triton.protocol.task_declaration import IMAGE

router = APIRouter(route_class=ImageRoute)
ALL_SCORES: Final = "all_scores"


class ClassifyRequest(EncoderFields):
    """vLLM's fields."""

    input: str | Texts | TokenIds | TokenLists | Parts
    """A text, token ids, an image, or a list of them. An image is a data URI, or OpenAI's part `image_url` with one."""

    top_k: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """How many labels to list with their scores in `labels`, beside the best one."""


@router.post("/v1/classify", responses=RESPONSES)
@router.post("/classify", include_in_schema=False)
async def classify(body: ClassifyRequest, request: Request) -> dict[str, Any]:
    """The best label of each text or image, and the scores of all."""
    items = read_items("input", body.input, strings_too=True)
    if len(items) > 1:
        raise ApiError(400, "input holds texts and images: send them in two requests", param="input")
    task = IMAGE_CLASSIFICATION if IMAGE in items else CLASSIFICATION
    rows, usage = await encode_items(request, body, task, items, ["label", SCORE, ALL_SCORES], {"top_k": body.top_k})
    data = []
    for index, row in enumerate(rows):
        labels, scores, probs = row["label"], row[SCORE], row[ALL_SCORES]
        entry = {"index": index, "label": labels[0], "score": scores[0], "probs": probs, "num_classes": len(probs)}
        if body.top_k is not None:
            entry["labels"] = [{"label": label, "score": each} for label, each in zip(labels, scores, strict=True)]
        data.append(entry)
    return {**response_head(body, request, "classify"), "data": data, "usage": usage}
