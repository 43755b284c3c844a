# SPDX-License-Identifier: Apache-2.0
"""Every error hf_triton raises on purpose.

* HfTritonError              INTERNAL     500
  + LoadError                             a model folder cannot be served; the message is one sentence with the remedy
    - SettingsError                       config.pbtxt or the environment holds an unusable value
    - HubError                            the checkpoint cannot be had
    - CheckpointError                     the checkpoint is there, and is not usable
  + RequestError             INVALID_ARG  400; one request is malformed, nobody else is touched
  + UnavailableError         UNAVAILABLE  503; the request is fine, the model cannot take it now
    - ShuttingDownError                   it is being unloaded
  + CancelledError           CANCELLED    499 in spirit; the client gave the request up
  + GenerationError          INTERNAL     500; the model failed on this request
  + ServerError                           tritonserver cannot be found or started
* PanicError                              a library's Rust code panicked; what it says may quote a prompt

A message reads `code: sentence`. The code is a stable word to program against, because Triton's `/generate` endpoint
answers 400 whatever the error is. CODES lists them all.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final, Literal

TritonCode = Literal["INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"]

MAX_PLACES: Final = 16
"""Places of an exception that a log line has, from the innermost on, and as many of the outermost."""

CODES: dict[str, str] = {
    "invalid_input": "`text_input` or `messages` is missing, is not UTF-8, holds too much or no prompt; or an empty "
    "prompt, and the model has no token to begin with",
    "invalid_parameter": "a parameter has the wrong type or an impossible value, or contradicts another one",
    "unknown_parameter": "no parameter has this name",
    "context_exceeded": "the prompt, by its bytes or with the tokens asked for, does not fit the model's context",
    "memory_exceeded": "the prompt and the tokens asked for need more key/value memory than the model may have",
    "out_of_memory": "the device has too little memory for this request just now",
    "queue_full": "as many prompts are waiting as may wait",
    "deadline_exceeded": "the request's time (`max_time`, or the client's timeout) was up before its first token",
    "shutting_down": "the model is being unloaded, or the server is stopping",
    "not_loaded": "the model that a stream door streams from is not loaded, or not yet",
    "engine_failed": "the engine has stopped after a fatal error; the server is restarting or needs to be",
    "cancelled": "the client cancelled the request, or another one of its id gave it up (stop true)",
    "generation_failed": "the model raised an error on this request; the server's log has it",
    "hook_failed": "a method of the folder's own `1/model.py` failed, or returned something else than it must",
    "internal": "a fault in hf_triton itself; the server's log has it",
    "invalid_setting": "a setting in config.pbtxt or the environment is unknown, unusable or contradicts another one",
    "hub_auth": "the Hub refuses the access token, or wants one",
    "hub_gated": "the model is gated and this access token has no access to it",
    "hub_not_found": "no such repository, or it is private and there is no access token",
    "hub_revision_not_found": "the repository has no such revision",
    "hub_rate_limited": "the Hub answers 429",
    "hub_unavailable": "the Hub answers 5xx or cannot be reached",
    "hub_timeout": "the download did not finish before its deadline, or stalled",
    "hub_incomplete": "a download broke off, or its checksum is wrong, twice in a row",
    "offline_and_not_cached": "HF_HUB_OFFLINE is set and no cache has the whole model",
    "disk_full": "the cache folder has too little room",
    "cache_not_writable": "the model must be downloaded and no cache folder is writable",
    "path_not_found": "`huggingface_model` looks like a local path, and there is no such folder",
    "weights_not_safe": "the repository has pickle weights only, and `allow_pickle` is off",
    "needs_trust_remote_code": "the repository brings its own Python code, and `trust_remote_code` is off",
    "unsupported_model": "the installed transformers does not know this architecture",
    "checkpoint_incomplete": "files are missing from the checkpoint",
    "weights_mismatch": "the checkpoint's tensors do not match its config",
    "checkpoint_invalid": "the checkpoint cannot be loaded",
    "device_unavailable": "the device that Triton or the folder asks for is not there",
    "server_not_found": "no tritonserver is installed",
    "server_failed": "tritonserver did not start, or ended",
}
"""Every code and what it means; the README's table is made from this."""


class HfTritonError(Exception):
    """Base of every error of ours; `str()` is the whole message, code included."""

    triton_code: ClassVar[TritonCode] = "INTERNAL"

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code
        self.sentence = sentence


class LoadError(HfTritonError):
    """The model folder cannot be served; other folders are not touched."""


class SettingsError(LoadError, ValueError):
    """config.pbtxt or the environment holds an unusable value."""

    def __init__(self, sentence: str) -> None:
        super().__init__("invalid_setting", sentence)


class HubError(LoadError):
    """The checkpoint cannot be had."""


class CheckpointError(LoadError):
    """The checkpoint is there, and is not usable."""


class RequestError(HfTritonError, ValueError):
    """The request is malformed; the client must change it."""

    triton_code = "INVALID_ARG"


class UnavailableError(HfTritonError):
    """The request is fine; the model cannot take it now."""

    triton_code = "UNAVAILABLE"


class ShuttingDownError(UnavailableError):
    """The model is being unloaded."""

    def __init__(self) -> None:
        super().__init__("shutting_down", "the model is being unloaded: send the request again later")


class CancelledError(HfTritonError):
    """The client gave the request up."""

    triton_code = "CANCELLED"

    def __init__(self) -> None:
        super().__init__("cancelled", CODES["cancelled"])


class GenerationError(HfTritonError):
    """The model failed on this request, and nothing of the failure may be shown."""


class ServerError(HfTritonError):
    """The server binary cannot be found or started."""


class PanicError(RuntimeError):
    """Rust code of a library (tokenizers, llguidance) panicked."""

    def __init__(self) -> None:
        super().__init__("a library's Rust code panicked")


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a Rust panic as `PanicError`, with its traceback and without its message, which may quote a prompt.

    pyo3's PanicException derives from BaseException, so `except Exception` does not catch it. Each extension module has
    a class of its own, known by its name alone.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise PanicError().with_traceback(error.__traceback__) from None


def where(error: BaseException) -> str:
    """An exception's type and the places it came through, without its message, which may quote what a client sent."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in reversed(frames)]
    if len(places) > 2 * MAX_PLACES:  # a recursion without end
        places[MAX_PLACES:-MAX_PLACES] = [f"{len(places) - 2 * MAX_PLACES} more"]
    return f"{type(error).__name__} in {' < '.join(places)}"


def clip(value: object, limit: int = 60) -> str:
    """Show a client's value in a message, cut to `limit` characters; true, false, null and [] as JSON has them."""
    spelled = json.dumps(value) if value is None or isinstance(value, bool) else None
    text = spelled or repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
