# SPDX-License-Identifier: Apache-2.0
"""The errors that hf_triton raises, and their codes.

* HfTritonError              INTERNAL     500
  + LoadError                             a model folder cannot be served; the message is one sentence with the remedy
    - SettingsError                       config.pbtxt or the environment holds an unusable value
    - HubError                            the checkpoint cannot be obtained
    - CheckpointError                     the checkpoint is on disk, but not usable
  + RequestError             INVALID_ARG  400; the request is malformed; other requests are not affected
  + UnavailableError         UNAVAILABLE  503; the request is valid, but the model cannot take it now
    - ShuttingDownError                   the model is being unloaded
    - DeadlineExceededError               the request's time was up before there was output
  + CancelledError           CANCELLED    499 in spirit; the client cancelled the request
  + GenerationError          INTERNAL     500; the model failed on this request
  + ServerError                           tritonserver or the gateway cannot be found or started
* PanicError                              a library's Rust code panicked

A message reads `code: sentence`. The code is stable, for programs: Triton's `/generate` endpoint answers 400 to every
error. CODES lists the codes.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Literal

from hf_triton.sentence import first_field, plain, text

logger = logging.getLogger(__name__)

ERROR_FORM: Final = "error_form"
"""The request parameter that asks for errors as data, `code: {"sentence": ...}`, with the version below."""
ERROR_FORM_VERSION: Final = 1

TritonCode = Literal["INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"]

MAX_FRAMES: Final = 16
"""Innermost frames of a traceback that a log line shows, and as many outermost ones."""

CODES: dict[str, str] = {
    "invalid_input": "`text_input` or `messages` is missing, not UTF-8, too large or without a prompt; or the prompt "
    "is empty, and the model has no token to start with; or audio cannot be read",
    "invalid_parameter": "a parameter has a wrong type or an impossible value, or contradicts another one",
    "unknown_parameter": "no parameter has this name",
    "context_exceeded": "the prompt, by its bytes or with `max_new_tokens`, does not fit the model's context; or audio "
    "is longer than `max_audio_seconds`",
    "memory_exceeded": "prompt and `max_new_tokens` need more KV cache than the model may use",
    "out_of_memory": "the device has not enough memory for this request at the moment; or, at load, for the KV cache",
    "queue_full": "the queue has reached `max_waiting_prompts`; send the request again later",
    "deadline_exceeded": "the time limit (`max_time`, or the client's timeout) passed before there was output",
    "shutting_down": "the model is being unloaded, or the server is stopping",
    "not_loaded": "the model behind a stream door is not loaded, or not yet",
    "engine_failed": "the engine stopped after a fatal error; the server restarts or must be restarted",
    "cancelled": "the client cancelled the request, or another request with its id did (`cancel` true)",
    "generation_failed": "the model failed on this request; the server's log has the error",
    "not_finite": "the model's outputs for this text are NaN or infinite: broken weights, or numbers too large for 16 "
    "bits",
    "hook_failed": "a hook of the folder's `1/model.py` failed or returned a wrong value",
    "internal": "a bug in hf_triton; the server's log has the error",
    "invalid_setting": "a setting in config.pbtxt or the environment is unknown, impossible or contradicts another one",
    "hub_auth": "the Hub rejects the access token, or requires one",
    "hub_gated": "the model is gated, and the access token has no access to it",
    "hub_not_found": "the repository does not exist, or it is private and there is no access token",
    "hub_revision_not_found": "the repository has no such revision",
    "hub_rate_limited": "the Hub answers 429",
    "hub_unavailable": "the Hub answers 5xx or cannot be reached",
    "hub_timeout": "the download stalled or did not finish in time",
    "hub_incomplete": "the download broke off, or its checksum was wrong twice in a row",
    "offline_and_not_cached": "HF_HUB_OFFLINE is set, and no cache has the whole model",
    "disk_full": "the cache folder has not enough space",
    "cache_not_writable": "the model must be downloaded, and no cache folder is writable",
    "path_not_found": "`huggingface_model` is a local path that does not exist",
    "weights_not_safe": "the weights are pickled, and `allow_pickle` is off; or an index or config names other files",
    "needs_trust_remote_code": "the repository contains Python code of its own, and `trust_remote_code` is off",
    "unsupported_model": "the installed transformers does not support this architecture",
    "checkpoint_incomplete": "the checkpoint lacks files",
    "weights_mismatch": "the checkpoint's tensors do not match its config",
    "checkpoint_invalid": "the checkpoint cannot be loaded",
    "optimized_elsewhere": "`hf-triton optimize` wrote the folder for another processor, or another version of its "
    "runtime",
    "adapter_not_found": "the folder has no LoRA adapter of this name",
    "adapter_invalid": "the LoRA adapter that the request names cannot be used with the model",
    "device_unavailable": "the device that Triton or the folder asks for does not exist",
    "server_not_found": "no tritonserver is installed",
    "server_failed": "tritonserver did not start, or exited",
    "server_unreachable": "no Triton answers at the address that a command was given",
    "model_not_found": "Triton has no model of this name",
    "wrong_task": "the model is loaded, and does not do what the command or the endpoint is for",
    "restricted": "Triton restricts the API, and the command did not send the key",
    "wrong_usage": "a command was called with arguments that it does not take",
    "client_missing": "packages that a command needs are not installed",
    "gateway_failed": "the OpenAI gateway did not start, or exited",
}
"""Every code and its meaning; the documents' table is generated from it."""


class HfTritonError(Exception):
    """Base of all errors here; `str()` is the whole message, code included.

    Args:
        code: One of CODES.
        sentence: What is wrong and what would do; fields, rows and remedies are open, see `hf_triton.sentence`.
        field: The field at fault; by default the first one of the sentence.
        sizes: Numbers that clients read: of what does not fit a context, `tokens` or `bytes`, `new_tokens`, `limit`.
    """

    triton_code: ClassVar[TritonCode] = "INTERNAL"

    def __init__(
        self, code: str, sentence: str, *, field: str | None = None, sizes: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(f"{code}: {text(sentence)}")
        self.code = code
        self.open_sentence = sentence
        self.field = first_field(sentence) if field is None else field
        self.sizes = dict(sizes or {})

    @property
    def sentence(self) -> str:
        """The sentence in our own names."""
        return text(self.open_sentence)

    def to_json(self) -> str:
        """The error as data, without its code; see `error_data`."""
        return json.dumps({"sentence": self.open_sentence, "field": self.field, "sizes": self.sizes})


def read_error_data(sentence: str) -> tuple[str, str | None, dict[str, int]]:
    """What follows the code of an error: the open sentence, the field at fault and the sizes.

    Args:
        sentence: As `HfTritonError.to_json` writes it; or a sentence, of a process that does not know the form.
    """
    try:
        match json.loads(sentence):
            case {"sentence": str() as open_sentence, "field": str() | None as field, "sizes": dict() as sizes}:
                return open_sentence, field, sizes
    except (ValueError, RecursionError):
        pass
    return plain(sentence), None, {}


class LoadError(HfTritonError):
    """The model folder cannot be served; other folders are not affected."""


class SettingsError(LoadError, ValueError):
    """config.pbtxt or the environment holds an unusable value."""

    def __init__(self, sentence: str) -> None:
        super().__init__("invalid_setting", sentence)


class HubError(LoadError):
    """The checkpoint cannot be obtained."""


class CheckpointError(LoadError):
    """The checkpoint is on disk, but not usable."""


class RequestError(HfTritonError, ValueError):
    """The request is malformed; the client must change it."""

    triton_code = "INVALID_ARG"


class UnavailableError(HfTritonError):
    """The request is valid, but the model cannot take it now."""

    triton_code = "UNAVAILABLE"


class ShuttingDownError(UnavailableError):
    """The model is being unloaded."""

    def __init__(self) -> None:
        super().__init__("shutting_down", "the model is being unloaded: send the request again later")


class DeadlineExceededError(UnavailableError):
    """The request's time was up before its first token, or its last forward of an encoder."""

    def __init__(self) -> None:
        super().__init__(
            "deadline_exceeded",
            "the time was up before there was output: give more (the client's timeout, or max_time where text is "
            "generated), or send it again later",
        )


class CancelledError(HfTritonError):
    """The client cancelled the request."""

    triton_code = "CANCELLED"

    def __init__(self) -> None:
        super().__init__("cancelled", CODES["cancelled"])


class GenerationError(HfTritonError):
    """The model failed on this request; the response must not show how."""


class ServerError(HfTritonError):
    """tritonserver or the gateway cannot be found or started."""


class PanicError(RuntimeError):
    """Foreign code raised what is no `Exception`: Rust code panicked, or Python code asked the process to exit."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"foreign code raised {type(cause).__name__}")


class _PanicsAsErrors:
    """The context manager of `panics_as_errors`; a generator would cost a stream's every token some microseconds."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt):
            raise PanicError(error).with_traceback(trace) from None


_PANICS_AS_ERRORS: Final = _PanicsAsErrors()


def panics_as_errors() -> _PanicsAsErrors:
    """Raise what is no `Exception` as `PanicError`, with its traceback, without its message, which may quote a prompt.

    pyo3's PanicException, SystemExit and asyncio's CancelledError pass `except Exception`: one request's tokenizer
    would end a thread that serves all requests.
    """
    return _PANICS_AS_ERRORS


def where(error: BaseException) -> str:
    """An exception's type and traceback on one line, without its message, which may quote a prompt."""
    summary = traceback.extract_tb(error.__traceback__)
    frames = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in reversed(summary)]
    if len(frames) > 2 * MAX_FRAMES:  # endless recursion
        frames[MAX_FRAMES:-MAX_FRAMES] = [f"{len(frames) - 2 * MAX_FRAMES} more"]
    return f"{type(error).__name__} in {' < '.join(frames)}"


def as_own_error(doing: str, error: Exception) -> HfTritonError:
    """One of our own errors as it is; for any other, `internal`, and the log says where it came from."""
    if isinstance(error, HfTritonError):
        return error
    logger.error("%s failed: %s", doing, where(error))
    return HfTritonError("internal", f"{doing} failed; the server's log says where")


class OneLineFormatter(logging.Formatter):
    """Writes a record's message on one line: what files and clients name cannot pretend to be another line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's own name)
        """The line, with characters that are not printed escaped."""
        line = super().formatMessage(record)
        return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def clip(value: object, limit: int = 60) -> str:
    """A client's value for a message, cut to `limit` characters; true, false, null and [] as in JSON.

    It costs nothing more for a value of megabytes.
    """
    spelled = json.dumps(value) if value is None or isinstance(value, bool) else ""
    for piece in () if spelled else _repr_pieces(list(value) if isinstance(value, tuple) else value, limit):
        spelled += piece
        if len(spelled) > limit:
            break
    return spelled if len(spelled) <= limit else f"{spelled[: limit - 3]}..."


def _repr_pieces(value: object, limit: int) -> Iterator[str]:
    """`repr(value)` in pieces, of which a string's shows the beginning if it is long."""
    if type(value) is list:
        for number, each in enumerate(value):
            yield ", " if number else "["
            yield from _repr_pieces(each, limit)
        yield "]" if value else "[]"
    elif type(value) is dict:
        for number, (key, each) in enumerate(value.items()):
            yield ", " if number else "{"
            yield from _repr_pieces(key, limit)
            yield ": "
            yield from _repr_pieces(each, limit)
        yield "}" if value else "{}"
    elif isinstance(value, str) and (head := value[:100].partition(";base64,"))[1] and head[0].startswith("data:"):
        yield repr(f"{head[0]};base64,...")  # a file may hold anything
    else:
        yield repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
