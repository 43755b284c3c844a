# SPDX-License-Identifier: Apache-2.0
"""`POST /`: what the model does, in the form of Hugging Face's inference endpoints, which `InferenceClient(URL)` asks.

The body is `{"inputs": ..., "parameters": {...}}`, or the bytes of an image or of audio; the answer is that of
transformers' pipeline. Vectors and ranks are those of Text Embeddings Inference, which answers at this path too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from hf_triton.errors import ERROR_FORM, clip
from hf_triton.protocol.names import JSON_OUTPUT
from hf_triton.protocol.request_options import BEFORE_INPUTS
from hf_triton.protocol.task_declaration import AUDIO, IMAGE, TEXT
from hf_triton.sentence import param
from hf_triton_gateway.app_state import gateway_of
from hf_triton_gateway.encoders import tei
from hf_triton_gateway.encoders.encoders import EncoderFields, encode, text_list
from hf_triton_gateway.encoders.image_items import ImageRoute
from hf_triton_gateway.http.api_errors import ApiError, unknown_field
from hf_triton_gateway.http.bodies import ANY_TASK, beside_loop, json_response, named_model
from hf_triton_gateway.triton.triton_messages import (
    CLASSIFICATION,
    EMBEDDINGS,
    ENDPOINTS,
    IMAGE_CLASSIFICATION,
    KINDS,
    QUESTION_ANSWERING,
    RERANK,
    SPEECH,
    TEXT_GENERATION,
    ZERO_SHOT,
    Outputs,
    size_of,
)

router = APIRouter(route_class=ImageRoute)
TASK_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    SPEECH: (AUDIO,),
    IMAGE_CLASSIFICATION: (IMAGE,),
    QUESTION_ANSWERING: ("question", "context"),
}
"""The inputs of models by task; others have texts."""
REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {ZERO_SHOT: ("candidate_labels",)}
"""Parameters without which a task refuses a request, by name."""
TOP_K: Final[Mapping[str, int | None]] = {CLASSIFICATION: None, IMAGE_CLASSIFICATION: 5}
"""How many labels are listed by default, as pipelines do; None: all."""
FILES: Final = (SPEECH, IMAGE_CLASSIFICATION)
"""Tasks whose input is a file, in JSON as base64."""
RESERVED: Final = (*BEFORE_INPUTS, ERROR_FORM, "priority", "timeout", "sequence_id", "sequence_start", "sequence_end")
"""Parameters of requests that are no task's."""
KINDS_OF_FILES: Final = {"image": IMAGE_CLASSIFICATION, "audio": SPEECH}
"""Tasks by the first part of a media type."""
IMAGES: Final = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8")
SOUNDS: Final = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"FORM")
"""How files begin."""


class PipelineRequest(EncoderFields):
    """The fields of inference endpoints."""

    inputs: Any
    """A text or a file in base64, or a list of them; for question answering an object."""

    parameters: dict[str, Any] | None = None
    """The task's parameters."""


@dataclass(frozen=True)
class _Asked:
    body: PipelineRequest
    task: str
    texts: Mapping[str, Sequence[Any]]
    is_list: bool


@router.post("/", include_in_schema=False)
async def run(request: Request) -> Response:
    """What the model does with the inputs."""
    data = await request.body()
    is_json = "json" in request.headers.get("content-type", "") or data.lstrip()[:1] == b"{"
    values: dict[str, Any] = await _read_json(request) if is_json else {"inputs": data}
    model = values["model"] = await _model_of(request, values)
    task = (await gateway_of(request).models.folder(model, task=None)).task
    if is_json and task in (EMBEDDINGS, RERANK):
        return await _as_tei(request, task, values)
    asked = await beside_loop(request, _read, values, task)
    if asked.task in TOP_K:
        return await _labels(request, asked)
    outputs = await _encode(request, asked, [JSON_OUTPUT], asked.body.parameters or {})
    return await json_response(size_of(outputs), _answer, asked, outputs)


async def _read_json(request: Request) -> dict[str, Any]:
    try:
        values = await request.json()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return values


async def _model_of(request: Request, values: Mapping[str, Any]) -> str:
    """The model that is named; else the only one for such inputs: vectors of texts are what TEI's clients ask for."""
    named, inputs = values.get("model"), values.get("inputs")
    is_file, task = isinstance(inputs, bytes), _task_of_file(inputs)
    if is_file and (kind := request.headers.get("content-type", "").partition("/")[0]) in KINDS_OF_FILES:
        task = KINDS_OF_FILES[kind]
    try:
        return str(await named_model(request, named, task or (SPEECH if is_file else EMBEDDINGS)))
    except ApiError as error:
        if is_file or error.status_code != 404:
            raise
        return str(await named_model(request, named, ANY_TASK))


def _task_of_file(inputs: Any) -> str | None:
    """The task for a file, or for base64 of one, by how it begins; None: it is not known."""
    if isinstance(inputs, str):
        try:
            inputs = base64.b64decode(inputs[:16], validate=True)
        except ValueError:
            return None
    if not isinstance(inputs, bytes):
        return None
    if inputs.startswith(IMAGES) or inputs[8:12] == b"WEBP":
        return IMAGE_CLASSIFICATION
    return SPEECH if inputs.startswith(SOUNDS) else None


async def _as_tei(request: Request, task: str, values: dict[str, Any]) -> Response:
    if task == RERANK:
        answer: Response = await tei.rank(await beside_loop(request, tei.RankRequest.model_validate, values), request)
        return answer
    if isinstance(values.get("inputs"), dict):
        return await tei.similarity(await beside_loop(request, tei.SimilarityRequest.model_validate, values), request)
    return await tei.embed(await beside_loop(request, tei.EmbedRequest.model_validate, values), request)


def _read(values: dict[str, Any], task: str | None) -> _Asked:
    body = PipelineRequest.model_validate(values)
    if task is None or task in (EMBEDDINGS, RERANK, TEXT_GENERATION):
        message = f"the model {clip(body.model)} is for {task}: POST {ENDPOINTS.get(task or '', 'to Triton')}"
        raise ApiError(400, message, param="model", code="wrong_task")
    names, given = TASK_INPUTS.get(task, (TEXT,)), body.inputs
    is_list = isinstance(given, list)
    if isinstance(given, bytes):
        if task not in FILES:
            raise ApiError(415, f"a model for {task} reads no file: send JSON with inputs")
        return _Asked(body, task, {names[0]: [given]}, is_list)
    rows = given if is_list else [given]
    if len(names) == 1:
        if not all(isinstance(row, str) for row in rows):
            raise ApiError(400, f"inputs must be a string or a list of strings, got {clip(given)}", param="inputs")
        return _Asked(body, task, {names[0]: text_list("inputs", given)}, is_list)
    if not rows or not all(isinstance(row, dict) and {*row} == {*names} for row in rows):
        wanted = " and ".join(names)
        raise ApiError(400, f"inputs must be an object with {wanted}, or a list of them", param="inputs")
    texts = {
        name: [
            _text(f"inputs[{row}].{name}" if is_list else f"inputs.{name}", each[name]) for row, each in enumerate(rows)
        ]
        for name in names
    }
    return _Asked(body, task, texts, is_list)


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{place} must be a text that is not empty, got {clip(value)}", param=place)
    return value


async def _encode(request: Request, asked: _Asked, outputs: Sequence[str], given: Mapping[str, Any]) -> Outputs:
    parameters = {name: _value(name, value) for name, value in given.items() if value is not None}
    names = {name: f"parameters.{name}" for name in (*parameters, *REQUIRED.get(asked.task, ()))}
    names |= dict.fromkeys(asked.texts, "inputs")
    return await encode(request, asked.body, asked.task, asked.texts, outputs, parameters=parameters, names=names)


def _value(name: str, value: Any) -> bool | int | float | str:
    """A parameter as Triton's requests have it; lists and objects are JSON text."""
    place = f"parameters.{name}"
    if name in RESERVED:
        raise unknown_field(place, ())
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        text = ""
    if not text or (type(value) is int and not -(2**63) <= value < 2**63):
        raise ApiError(400, f"{param(place)} is no number that is taken, or nested too deeply", param=place)
    plain: bool | int | float | str = value if type(value) in KINDS else text
    return plain


async def _labels(request: Request, asked: _Asked) -> Response:
    """Labels with their scores, the best first; of one text as a list of one, which the Hub's client reads."""
    given = dict(asked.body.parameters or {})
    top_k = TOP_K[asked.task] if given.get("top_k") is None else given["top_k"]
    given.pop("top_k", None)
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        place = "parameters.top_k"
        raise ApiError(400, f"{param(place)} must be an integer >= 1, got {clip(top_k)}", param=place)
    outputs = await _encode(request, asked, tei.ALL, given)
    num_rows = len(next(iter(asked.texts.values())))
    rows = [labels[:top_k] for labels in tei.predictions(outputs, num_rows)]
    is_flat = asked.task == IMAGE_CLASSIFICATION and not asked.is_list
    return await json_response(size_of(outputs), list, rows[0] if is_flat else rows)


def _answer(asked: _Asked, outputs: Outputs) -> Any:
    results = [json.loads(each) for each in outputs[JSON_OUTPUT]]
    if asked.task == ZERO_SHOT:  # the Hub's form, which is no pipeline's
        results = [
            [{"label": label, "score": score} for label, score in zip(each["labels"], each["scores"], strict=True)]
            for each in results
        ]
    return results if asked.is_list else results[0]
