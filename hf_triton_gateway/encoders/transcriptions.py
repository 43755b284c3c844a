# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the text of an audio file, from folders of Whisper."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import annotated_types
from fastapi import APIRouter, Request
from starlette.datastructures import FormData, ImmutableMultiDict, QueryParams, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import JSONResponse, PlainTextResponse, Response

from hf_triton.errors import clip
from hf_triton.protocol.names import JSON_OUTPUT
from hf_triton.protocol.task_declaration import AUDIO
from hf_triton.protocol.validation import parse_boolean
from hf_triton_gateway.app_state import gateway_of, request_id_of
from hf_triton_gateway.chat.fields import IGNORED, Fields, Ignored
from hf_triton_gateway.http.api_errors import RESPONSES, ApiError
from hf_triton_gateway.http.bodies import named_model, read_body
from hf_triton_gateway.http.disconnect import run_while_connected
from hf_triton_gateway.http.sse import EventStream, event
from hf_triton_gateway.triton.triton_messages import SPEECH, TextRequest, adapter_name

router = APIRouter()

FILE: Final = "file"
TASK: Final = "task"
GRANULARITIES: Final = "timestamp_granularities"
FILE_TYPES: Final = ("audio/", "video/", "application/octet-stream")
"""The types of a body that is the file itself."""
MAX_FIELDS: Final = 32
MAX_FIELD_LENGTH: Final = 64 << 10
FORMATS: Final = {
    200: {"description": "The text, in the form of `response_format`.", "content": {"text/plain": {}}},
    **RESPONSES,
}


class SpeechFields(Fields):
    """OpenAI's fields beside the file, of which both endpoints take these."""

    ignored: ClassVar[Mapping[str, Ignored]] = {name: own for name, own in IGNORED.items() if own.is_hint}
    """A form's values are texts: those of other fields that ask for nothing are not."""

    @classmethod
    def known(cls) -> Collection[str]:
        """The file's field, and the others."""
        return {FILE, *cls.model_fields}

    model: Annotated[str, annotated_types.MinLen(1)]
    """One of `/v1/models`; by default the only one for speech, or `--default-model`."""

    prompt: str | None = None
    """Text as it may stand before the audio's: names and words to expect, and a style."""

    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    """`srt` and `vtt` are subtitles; `verbose_json` has the times of segments, or of words."""

    temperature: Annotated[float, annotated_types.Ge(0), annotated_types.Le(2)] | None = None
    """0, the default, takes the most likely tokens."""


class TranslationFields(SpeechFields):
    """The fields of `/v1/audio/translations`."""


class TranscriptionFields(SpeechFields):
    """The fields of `/v1/audio/transcriptions`."""

    ignored: ClassVar[Mapping[str, Ignored]] = {
        **SpeechFields.ignored,
        "chunking_strategy": Ignored(("auto",), is_hint=True),
        "include": Ignored(is_hint=True),
    }

    language: str | None = None
    """Language of the audio, by its code or its English name; by default the model detects it."""

    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    """What `verbose_json` has the times of. By default segments."""

    stream: bool | None = None
    """Whether to send the text as server-sent events, when it is whole."""


AnyFields = TypeVar("AnyFields", bound=SpeechFields)


def _form(fields: type[SpeechFields]) -> dict[str, Any]:
    """The OpenAPI document's part for a form of fields and a file."""
    schema = fields.model_json_schema()
    properties = {f"{name}[]" if name == GRANULARITIES else name: own for name, own in schema["properties"].items()}
    file = {"type": "string", "format": "binary", "description": "The audio: WAV, FLAC, OGG, MP3 or AIFF."}
    schema |= {"properties": {FILE: file, **properties}, "required": [FILE, *schema["required"]]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@router.post("/v1/audio/transcriptions", responses=FORMATS, openapi_extra=_form(TranscriptionFields))
async def transcribe(request: Request) -> Response:
    """The text of an audio file, in its own language."""
    body, data = await _read_form(request, TranscriptionFields)
    wanted = body.timestamp_granularities or ["segment"]
    is_verbose = body.response_format == "verbose_json"
    if body.timestamp_granularities and not is_verbose:
        raise ApiError(400, f"{GRANULARITIES} is for response_format verbose_json", param=GRANULARITIES)
    if body.stream and body.response_format not in ("json", "text"):
        message = "stream true sends the text alone: leave it out, or set response_format to json"
        raise ApiError(400, message, param="stream", code="unsupported_parameter")
    words = {"return_timestamps": "word"} if is_verbose and "word" in wanted else {}
    found = await _transcript(request, body, data, "transcribe", language=body.language, **words)
    if body.stream:
        return EventStream(request, _events(found))
    if is_verbose:
        return JSONResponse(_verbose(found, "transcribe", wanted))
    return _written(found, body.response_format)


@router.post("/v1/audio/translations", responses=FORMATS, openapi_extra=_form(TranslationFields))
async def translate(request: Request) -> Response:
    """The text of an audio file, in English."""
    body, data = await _read_form(request, TranslationFields)
    try:
        found = await _transcript(request, body, data, "translate")
    except ApiError as error:
        if error.field != TASK:
            raise
        message = f"{error.message}: POST /v1/audio/transcriptions"
        raise ApiError(error.status_code, message, param="model", code=error.code) from None
    if body.response_format == "verbose_json":
        return JSONResponse(_verbose({**found, "language": "english"}, "translate", ["segment"]))
    return _written(found, body.response_format)


# --- the form --------------------------------------------------------------------------------------------------------


class _Parser(MultiPartParser):
    """Keeps the file in memory, where the limit of bodies bounds it: the gateway writes no audio to a disk."""

    spool_max_size = 1 << 62


async def _read_form(request: Request, fields: type[AnyFields]) -> tuple[AnyFields, bytes]:
    """The fields of a form, and its file; of a body that is the file itself, those of the query."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data" and not media_type.startswith(FILE_TYPES):
        message = "the body must be a form with a file: send it as multipart/form-data, or the file alone as audio/..."
        raise ApiError(415, message)
    body = await read_body(request)
    if media_type != "multipart/form-data":
        return await _checked(request, fields, dict(_values(request.query_params, fields.model_fields))), body
    async with AsyncExitStack() as stack:
        form = await _parse_form(request, body)
        stack.push_async_callback(form.close)
        values = dict(_values(form, fields.known()))
        file = values.pop(FILE, None)
        checked = await _checked(request, fields, values)
        if not isinstance(file, UploadFile):
            message = f"{FILE} is required: send the audio as a file with a name"
            raise ApiError(400, message, param=FILE, code="missing_required_parameter")
        return checked, await file.read()


async def _checked(request: Request, fields: type[AnyFields], values: dict[str, object]) -> AnyFields:
    return fields.model_validate({**values, "model": await named_model(request, values.get("model"), SPEECH)})


async def _parse_form(request: Request, body: bytes) -> FormData:
    async def whole() -> AsyncGenerator[bytes]:
        yield body

    parser = _Parser(request.headers, whole(), max_files=MAX_FIELDS, max_fields=MAX_FIELDS, max_part_size=len(body))
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"the body is no form that can be read: {error.message.rstrip('.')}") from None


def _values(
    form: ImmutableMultiDict[str, str | UploadFile] | QueryParams, known: Collection[str]
) -> Iterator[tuple[str, object]]:
    """The fields by name, those that are not empty; a name that ends in `[]` is a list."""
    for key in form:
        name, values = key.removesuffix("[]"), form.getlist(key)
        if values == [""]:
            continue
        if name not in known:  # is refused, or passed over
            yield name, values[0] if isinstance(values[0], str) else values[0].filename
        elif name == GRANULARITIES:
            yield name, [_text(name, value) for value in values]
        elif len(values) > 1:
            raise ApiError(400, f"{name} is given {len(values)} times: give it once", param=name)
        else:
            yield name, values[0] if name == FILE else _read(name, _text(name, values[0]))


def _text(name: str, value: str | UploadFile) -> str:
    if not isinstance(value, str):
        raise ApiError(400, f"{name} is sent as a file: send it as a text", param=name)
    if len(value) > MAX_FIELD_LENGTH:
        message = f"{name} has {len(value)} characters, more than the {MAX_FIELD_LENGTH} that are accepted"
        raise ApiError(400, message, param=name)
    return value


def _read(name: str, value: str) -> object:
    """A field's text as its type; one that cannot be read is left for validation to refuse."""
    if name == "temperature":
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(value)
    return parse_boolean(value) if name == "stream" else value


# --- the model -------------------------------------------------------------------------------------------------------


async def _transcript(
    request: Request, body: SpeechFields, data: bytes, task: str, **parameters: str | None
) -> dict[str, Any]:
    """The model's output `output` for an audio."""
    gateway = gateway_of(request)
    if adapter := adapter_name(body.model, None):
        message = f"there is no adapter {clip(adapter)}: models of speech take none"
        raise ApiError(404, message, param="model", code="model_not_found")
    is_timed = body.response_format not in ("json", "text")
    times = GRANULARITIES if "return_timestamps" in parameters else "response_format"
    given: dict[str, Any] = {
        TASK: task,
        "prompt": body.prompt,
        "temperature": body.temperature,
        "return_timestamps": "segment" if is_timed else None,
        **parameters,
    }
    asked = TextRequest(
        body.model,
        request_id_of(request),
        SPEECH,
        {AUDIO: [data]},
        [JSON_OUTPUT],
        {name: value for name, value in given.items() if value is not None},
        body.names_of({AUDIO: FILE, "return_timestamps": times, TASK: None}),
    )
    try:
        async with asyncio.timeout(gateway.config.timeout_s):
            outputs = await run_while_connected(request.receive, gateway.models.generate(asked))
    except TimeoutError:
        message = f"the audio was not done within {gateway.config.timeout_s:g} s: send a shorter one"
        raise ApiError(504, message, code="deadline_exceeded") from None
    found: dict[str, Any] = json.loads(outputs[JSON_OUTPUT][0])
    return found


# --- the answer ------------------------------------------------------------------------------------------------------


def _usage(found: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's usage of a model that is paid by the second."""
    return {"type": "duration", "seconds": math.ceil(found["duration"])}


async def _events(found: Mapping[str, Any]) -> AsyncGenerator[bytes]:
    yield event({"type": "transcript.text.delta", "delta": found["text"]})
    yield event({"type": "transcript.text.done", "text": found["text"], "usage": _usage(found)})


def _verbose(found: Mapping[str, Any], task: str, wanted: list[Literal["segment", "word"]]) -> dict[str, Any]:
    answer = {"task": task, **{name: found[name] for name in ("language", "duration", "text")}}
    if "segment" in wanted:
        answer["segments"] = [
            {"id": index, "start": start_s, "end": end_s, "text": text}
            for index, (start_s, end_s, text) in enumerate(_timed(found["chunks"]))
        ]
    if "word" in wanted:
        answer["words"] = [
            {"word": text, "start": start_s, "end": end_s} for start_s, end_s, text in _timed(found["words"])
        ]
    return {**answer, "usage": _usage(found)}


def _timed(chunks: list[dict[str, Any]]) -> Iterator[tuple[float, float, str]]:
    return ((*chunk["timestamp"], chunk["text"]) for chunk in chunks)


def _written(found: Mapping[str, Any], form: str) -> Response:
    """The text as JSON, as it is, or as subtitles."""
    if form == "json":
        return JSONResponse({"text": found["text"], "usage": _usage(found)})
    if form == "text":
        return PlainTextResponse(f"{found['text']}\n")
    point = "," if form == "srt" else "."
    cues = [
        f"{_clock(start_s, point)} --> {_clock(end_s, point)}\n{' '.join(text.split()).replace('-->', '->')}\n"
        for start_s, end_s, text in _timed(found["chunks"])
    ]
    if form == "vtt":
        return PlainTextResponse("\n".join(["WEBVTT\n", *cues]))
    return PlainTextResponse("\n".join(f"{number}\n{cue}" for number, cue in enumerate(cues, 1)))


def _clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
