# SPDX-License-Identifier: Apache-2.0
"""`/v1/token-classification` and `/v1/fill-mask`: entities of texts and tokens for masks, as transformers' pipelines.

OpenAI's and vLLM's APIs have no form for them; these have that of `/v1/classify`, but no usage: a client that names
both outputs of such a folder is taken as one that names none, and gets no count of tokens.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Final, Literal

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton.protocol.names import JSON_OUTPUT
from hf_triton.protocol.task_declaration import MAX_FILLS
from hf_triton_gateway.chat.fields import Texts
from hf_triton_gateway.encoders.encoders import EncoderFields, encode, response_head, text_list
from hf_triton_gateway.http.api_errors import RESPONSES
from hf_triton_gateway.http.bodies import JsonRoute, json_response
from hf_triton_gateway.triton.triton_messages import FILL_MASK, TOKEN_CLASSIFICATION, size_of

router = APIRouter(route_class=JsonRoute)
TEXT: Final = "text"
"""The models' input."""


class _TextRequest(EncoderFields):
    input: str | Texts
    """A text, or a list of them."""


class TokenClassificationRequest(_TextRequest):
    """The texts, and how tokens become entities."""

    task_of_model: ClassVar[str | None] = TOKEN_CLASSIFICATION

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = None
    """The strategy of transformers' pipeline. `none` gives each token, and is the default."""


class FillMaskRequest(_TextRequest):
    """The texts with mask tokens."""

    task_of_model: ClassVar[str | None] = FILL_MASK

    top_k: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_FILLS)] | None = None
    """How many tokens to list for each mask, the likeliest first. By default 5."""


@router.post("/v1/token-classification", responses=RESPONSES, response_model=dict[str, Any])
async def classify_tokens(body: TokenClassificationRequest, request: Request) -> Response:
    """The entities of each text, with their places in code points."""
    return await _answer(
        body, request, TOKEN_CLASSIFICATION, "entities", aggregation_strategy=body.aggregation_strategy
    )


@router.post("/v1/fill-mask", responses=RESPONSES, response_model=dict[str, Any])
async def fill_mask(body: FillMaskRequest, request: Request) -> Response:
    """The likeliest tokens for the mask of each text; of several masks, a list for each."""
    return await _answer(body, request, FILL_MASK, "fills", top_k=body.top_k)


async def _answer(body: _TextRequest, request: Request, task: str, name: str, **parameters: Any) -> Response:
    texts = {TEXT: text_list("input", body.input)}
    outputs = await encode(request, body, task, texts, [JSON_OUTPUT], parameters=parameters, names={TEXT: "input"})
    head = response_head(body, request, task)

    def build() -> dict[str, Any]:
        results = map(json.loads, outputs[JSON_OUTPUT])
        return {**head, "data": [{"index": index, name: result} for index, result in enumerate(results)]}

    return await json_response(size_of(outputs), build)
