# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's and Anthropic's clients read them; Triton's sentences become such errors here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel
from starlette.exceptions import HTTPException

from hf_triton.errors import CODES, clip, read_error_data
from hf_triton.protocol.load_reasons import first_sentence
from hf_triton.protocol.prompts import BYTES_PER_TOKEN
from hf_triton.protocol.validation import suggest
from hf_triton.sentence import names_row, row, text
from hf_triton_gateway.http.client_names import ClientNames
from hf_triton_gateway.triton.triton_words import first_line, says

if TYPE_CHECKING:  # the commands read errors too, and need no FastAPI
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

INVALID: Final = "invalid_request_error"
STATUS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("invalid_input", "invalid_parameter", "unknown_parameter"), 400),
    **dict.fromkeys(("context_exceeded", "memory_exceeded"), 400),
    "adapter_not_found": 404,
    "adapter_invalid": 400,
    "queue_full": 429,
    **dict.fromkeys(("out_of_memory", "shutting_down", "not_loaded", "engine_failed"), 503),
    "deadline_exceeded": 504,
    "cancelled": 499,
}
"""HTTP status by our code; others are 500."""
OPENAI_CODES: Final[Mapping[str, str]] = {"context_exceeded": "context_length_exceeded"}
"""Codes that OpenAI's clients know by another name."""
TEXT_CODES: Final = ("invalid_input", "context_exceeded")
"""Codes of errors about a text."""
TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's type of error by status; INVALID below 500, otherwise `server_error`."""
ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's type of error by status; INVALID below 500, otherwise `api_error`."""
ANTHROPIC_PATH: Final = "/v1/messages"
COHERE_PATH: Final = "/v2/"
TEI_PATHS: Final = ("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/info", "/")
TEI_TYPES: Final[Mapping[int, str]] = {424: "Backend", 429: "Overloaded", 503: "Unhealthy"}
"""Text Embeddings Inference's type of error by status; `Validation` below 500, otherwise `Backend`."""
DEFAULT_CODES: Final[Mapping[int, str]] = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}
"""Codes of errors that have none of their own, by status; below 500, otherwise `internal`."""
RETRY_AFTER_S: Final = 1
UNREADABLE: Final = "There was an error parsing the body"
"""FastAPI's own words for a body whose JSON it fails to read for another reason than its syntax."""


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetails


class AnthropicErrorDetails(BaseModel):
    """What went wrong, as Anthropic's clients read it."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class TeiErrorBody(BaseModel):
    """Text Embeddings Inference's error object."""

    error: str
    error_type: str


class CohereErrorBody(BaseModel):
    """Cohere's error object."""

    message: str


def _responses(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {
        "4XX": {"model": body, "description": "The request is refused."},
        "5XX": {"model": body, "description": "The server failed, or cannot be reached."},
    }


RESPONSES: Final = _responses(ErrorBody)
"""Errors of every endpoint, for the OpenAPI document."""
ANTHROPIC_RESPONSES: Final = _responses(AnthropicErrorBody)
"""Errors of Anthropic's endpoints."""
TEI_RESPONSES: Final = _responses(TeiErrorBody)
"""Errors of TEI's endpoints."""
COHERE_RESPONSES: Final = _responses(CohereErrorBody)
"""Errors of Cohere's endpoints."""

_CODED: Final = re.compile(rf"(?:^|[\s\]])({'|'.join(CODES)}): (.*)", re.DOTALL)
_REASON: Final = re.compile(r"(?:TritonModelException: )(?:[a-z_]+: )?([^\n]*)")
_PATH: Final = re.compile(r"""'[.~]{0,2}/[^']+'|(?<![\w:/.~-])[.~]{0,2}/(?!v\d/)[^\s'",;:)`]+""")
"""A path with a name in it; `/`, `./` and an endpoint's `/v2/...` are words of a remedy."""


class ApiError(HTTPException):
    """A request's failure, as the client sees it; what serves a request may raise it anywhere.

    Args:
        status: HTTP status.
        message: One sentence, whose fields may be open, see `hf_triton.sentence`.
        type: OpenAI's type of error; by default that of the status.
        param: The field of the request that is wrong, as the client sent it, or that it lacks.
        code: For programs.
        logged: What the log says in place of the message, if it may name the host's paths.
        field: The field that is wrong, by our name.
        sizes: Of what does not fit a context, see `HfTritonError`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        logged: str | None = None,
        field: str | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
        self.open_message = message
        self.message = text(message)
        super().__init__(status, self.message, headers)
        self.logged = logged or self.message
        self.sizes = sizes or {}
        self.type = type or TYPES.get(status) or (INVALID if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.field = field

    def in_names(self, names: ClientNames) -> ApiError:
        """The error as a client with other names reads it."""
        param, message = names.param(self.param), text(self.open_message, names)
        return ApiError(self.status_code, message, type=self.type, param=param, code=self.code, sizes=self.sizes)

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON object that the endpoint at `path` answers."""
        if path.startswith(ANTHROPIC_PATH):
            kind = ANTHROPIC_TYPES.get(self.status_code) or (INVALID if self.status_code < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self._in_anthropics_words()}}
        if path in TEI_PATHS:
            kind = TEI_TYPES.get(self.status_code) or ("Validation" if self.status_code < 500 else "Backend")
            return {"error": self.message, "error_type": kind}
        if path.startswith(COHERE_PATH):
            return {"message": self.message}
        code = self.code or DEFAULT_CODES.get(self.status_code)
        if code is None:
            code = "internal" if self.status_code >= 500 else "invalid_parameter" if self.param else "invalid_request"
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": code}}

    def _in_anthropics_words(self) -> str:
        """The message; of what does not fit, the words by which Claude Code knows to compact, or to ask for less."""
        limit, new_tokens = self.sizes.get("limit"), self.sizes.get("new_tokens", 0)
        if limit is None:
            return self.message
        num_tokens, more = self.sizes.get("tokens", 0), ""
        if "bytes" in self.sizes:
            num_bytes = self.sizes["bytes"]
            num_tokens, limit = -(-num_bytes // BYTES_PER_TOKEN), limit // BYTES_PER_TOKEN
            more = f" ({num_bytes} bytes, of which a token has {BYTES_PER_TOKEN} at most on average)"
        if num_tokens > limit:
            return f"prompt is too long: {num_tokens} tokens > {limit} maximum{more}"
        if num_tokens + new_tokens <= limit:
            return self.message
        exceeds = f"input length and `max_tokens` exceed context limit: {num_tokens} + {new_tokens} > {limit}"
        return f"{self.message}: {exceeds}"

    def response(self, path: str = "") -> JSONResponse:
        """The HTTP response of the endpoint at `path`."""
        from starlette.responses import JSONResponse

        is_too_long = path in TEI_PATHS and self.code == "context_length_exceeded"  # there as too large a body
        return JSONResponse(self.body(path), 413 if is_too_long else self.status_code, self.headers)


def model_not_found(name: str, known: Collection[str] = ()) -> ApiError:
    hint = suggest(name, known, "GET /v1/models") if known else ""
    return ApiError(404, f"the model {clip(name)} does not exist{hint}", param="model", code="model_not_found")


def too_large(max_bytes: int, option: str = "") -> ApiError:
    """The refusal of a body; `option` is the command's that sets the limit."""
    setting = f" ({option})" if option else ""
    message = f"the body has more bytes than the {max_bytes} that are accepted{setting}: send less"
    return ApiError(413, message, code="request_too_large")


def gateway_stops() -> ApiError:
    """The answer to a request that is still in flight when the gateway's time for that is over."""
    return ApiError(503, "the gateway stops: send the request again later", code="shutting_down")


def load_reason(details: str) -> str:
    """Why Triton has not loaded a model: our sentence in its message, or the first line; without the host's paths."""
    return _PATH.sub("[path]", logged_reason(details))


def logged_reason(details: str) -> str:
    """The same with the host's paths."""
    found = _REASON.search(details)
    return found[1] if found else first_sentence(details)


def triton_error(message: str, names: ClientNames, status: int = 500) -> ApiError:
    """Triton's message as an error.

    Args:
        message: `code: sentence`, or `code: {"sentence": ...}`, possibly behind words of Triton's own; or another one.
        names: What the client calls our fields.
        status: HTTP status of a message without a code.
    """
    coded = _CODED.search(message)
    if coded is None:
        if says(message, "not_healthy"):
            return ApiError(503, "the model's process has ended: send the request again later", code="engine_failed")
        if says(message, "shared_memory_full"):
            return out_of_shared_memory()
        return ApiError(status, first_line(message) if status < 500 else "the server failed on this request")
    code, (sentence, field, sizes) = coded[1], read_error_data(coded[2])
    param = names.param(field) or (names.subject if code in TEXT_CODES else None)
    if code in TEXT_CODES and len(names.rows) == 1 and not names_row(sentence):
        sentence += row(0, " (row {})")  # to the model it was the only one
    code, message = OPENAI_CODES.get(code, code), text(sentence, names)
    return ApiError(STATUS.get(coded[1], 500), message, param=param, code=code, field=field, sizes=sizes)


def out_of_shared_memory() -> ApiError:
    """Neither a request nor its answer fits Triton's shared memory."""
    return ApiError(
        503,
        "the server's shared memory is full: ask for less, send the request again later, or raise --shm-size",
        code="out_of_memory",
    )


def unknown_field(name: str, fields: Collection[str], meant: str | None = None) -> ApiError:
    message = f"there is no field {clip(name)}{suggest(meant or name, fields, 'docs/openai-fields.md')}"
    is_short = clip(name) == f"'{name}'"
    return ApiError(400, message, param=name if is_short else None, code="unknown_parameter")


async def _answer_http_exception(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, ApiError):
        status = error.status_code if isinstance(error, HTTPException) else 500
        if getattr(error, "detail", "") == UNREADABLE:
            message = "the body is not JSON that can be read: it must be UTF-8, not compressed and not nested deeply"
            return ApiError(400, message, code="invalid_json").response(request.url.path)
        methods = (error.headers or {}).get("Allow") if isinstance(error, HTTPException) else None
        error = ApiError(status, _plain_sentence(request, status, error))
        if methods:  # RFC 9110, 15.5.6; HEAD is answered as GET
            error.headers = {"Allow": methods.replace("GET", "GET, HEAD") if "HEAD" not in methods else methods}
    return error.response(request.url.path)


def _plain_sentence(request: Request, status: int, error: Exception) -> str:
    place = f"{request.method} {clip(request.url.path).strip(chr(39))}"
    if status == 404:
        return f"there is no endpoint {place}"
    if status == 405:
        methods = (getattr(error, "headers", None) or {}).get("Allow", "another method")
        return f"there is no endpoint {place}: use {methods}"
    return str(getattr(error, "detail", ""))


async def _answer_validation_error(request: Request, error: Any) -> JSONResponse:
    """An error of FastAPI's own checks: no body, no JSON, a query; a body's fields are checked by `fields.py`."""
    details = error.errors()[0]
    if details["type"] == "json_invalid":
        reason = details.get("ctx", {}).get("error", "")
        answer = ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    elif details["loc"][0] == "query":
        name, problem = details["loc"][-1], details["msg"].removeprefix("Input ")
        message = f"{name} {problem}, got {clip(details['input'])}"
        answer = ApiError(400, message, param=name, code="invalid_parameter")
    elif isinstance(error.body, bytes):
        answer = ApiError(415, "the body must be JSON: send the header `Content-Type: application/json`")
    else:
        answer = ApiError(400, "the body must be a JSON object", code="invalid_json")
    return answer.response(request.url.path)


def install_handlers(app: FastAPI) -> None:
    """Make every error of `app` an error object."""
    from fastapi.exceptions import RequestValidationError

    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
