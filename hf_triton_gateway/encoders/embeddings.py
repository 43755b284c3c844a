# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/embeddings`: vectors of texts, token ids or images, from model folders of the task embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton_gateway.app_state import request_id_of
from hf_triton_gateway.chat.fields import Texts, TokenIds, TokenLists
from hf_triton_gateway.encoders.encoders import EncoderFields, as_base64
from hf_triton_gateway.encoders.image_items import (
    ImageRoute,
    ItemOutputs,
    Parts,
    encode_items,
    item_rows,
    read_items,
    size_of_items,
)
from hf_triton_gateway.http.api_errors import RESPONSES, ApiError
from hf_triton_gateway.http.bodies import beside_loop, json_response
from hf_triton_gateway.triton.triton_messages import EMBEDDING, EMBEDDINGS

router = APIRouter(route_class=ImageRoute)


class EmbeddingRequest(EncoderFields):
    """OpenAI's fields, and some of the model's own."""

    task_of_model: ClassVar[str | None] = EMBEDDINGS

    input: str | Texts | TokenIds | TokenLists | Parts | None = None
    """A text, token ids, or a list of them. Of models with vectors of images, the list may hold OpenAI's parts
    `image_url` with data URIs."""

    encoding_format: Literal["float", "base64"] = "float"
    """`base64` gives each vector as the bytes of its float32 numbers, little-endian."""

    dimensions: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """Vectors are cut to this many dimensions; for models that were trained so."""

    prompt_name: str | None = None
    """Name of the prompt that the model puts before each text, such as `query`."""

    normalize: bool | None = None
    """Whether a vector has length 1. By default as the model says."""

    messages: Annotated[list[dict[str, Any]], annotated_types.MaxLen(1)] | None = None
    """vLLM's form of `input`: one message whose content is one text or one part."""

    def given_input(self) -> tuple[str, Any]:
        """The input, or what stands in its place, behind the name of its field."""
        if self.input is not None and self.messages is None:
            return "input", self.input
        match self.messages if self.input is None else ():
            case [{"content": str() as text}] | [{"content": [str() as text]}]:
                return "messages", text
            case [{"content": [dict() as part]}]:
                return "messages[0].content", [part]
            case None:
                raise ApiError(400, "input is required", param="input", code="missing_required_parameter")
        message = "messages stands in place of input, and is one message whose content is one text or one part"
        raise ApiError(400, message, param="messages", code="invalid_parameter")


@router.post("/v1/embeddings", responses=RESPONSES, response_model=dict[str, Any])
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Vectors of texts or images."""
    parameters = {"dimensions": body.dimensions, "prompt_name": body.prompt_name, "normalize": body.normalize}
    field, given = body.given_input()
    items = await beside_loop(request, read_items, field, given)
    found = await encode_items(request, body, EMBEDDINGS, items, [EMBEDDING], parameters, field)
    return await json_response(size_of_items(found), _answer, body, request_id_of(request), found)


def _answer(body: EmbeddingRequest, request_id: str, found: ItemOutputs) -> dict[str, Any]:
    rows, usage = item_rows(found, [EMBEDDING])
    encoded = list if body.encoding_format == "float" else as_base64
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(row[EMBEDDING])} for index, row in enumerate(rows)
    ]
    return {"object": "list", "id": f"embd-{request_id}", "model": body.model, "data": data, "usage": usage}
