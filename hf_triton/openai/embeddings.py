# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/embeddings`: vectors of texts or of token ids, from model folders of the task embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import annotated_types
from fastapi import APIRouter, Request

from hf_triton.openai.bodies import JsonRoute
from hf_triton.openai.encoders import EncoderFields, encode, texts_or_tokens, usage_of
from hf_triton.openai.errors import RESPONSES
from hf_triton.openai.fields import Texts, TokenIds, TokenLists
from hf_triton.openai.gateway import request_id_of
from hf_triton.openai.triton_messages import EMBEDDING, EMBEDDINGS

router = APIRouter(route_class=JsonRoute)


class EmbeddingRequest(EncoderFields):
    """OpenAI's fields, and some of the model's own."""

    input: str | Texts | TokenIds | TokenLists
    """A text, token ids, or a list of them."""

    encoding_format: Literal["float", "base64"] = "float"
    """`base64` gives each vector as the bytes of its float32 numbers, little-endian."""

    dimensions: Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)] | None = None
    """To how many dimensions a vector is cut; for models that were trained so."""

    prompt_name: str | None = None
    """Name of the prompt that the model puts before each text, such as `query`."""

    normalize: bool | None = None
    """Whether a vector has length 1. By default as the model says."""


@router.post("/v1/embeddings", responses=RESPONSES)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
    """Vectors of texts."""
    name, texts = texts_or_tokens("input", body.input)
    parameters = {"dimensions": body.dimensions, "prompt_name": body.prompt_name, "normalize": body.normalize}
    outputs = await encode(
        request, body, EMBEDDINGS, {name: texts}, [EMBEDDING], parameters=parameters, names={name: "input"}
    )
    values = outputs[EMBEDDING]
    size = len(values) // len(texts)
    vectors = (values[start : start + size] for start in range(0, len(values), size))
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return {
        "object": "list",
        "id": f"embd-{request_id_of(request)}",
        "model": body.model,
        "data": data,
        "usage": usage_of(outputs),
    }


def _encoded(vector: Sequence[float], encoding: str) -> Sequence[float] | str:
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
