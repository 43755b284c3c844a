# SPDX-License-Identifier: Apache-2.0
"""Every exception of the Hub's client has a code and a sentence with the remedy."""

import ast
import errno
import json
from collections.abc import Iterator
from types import SimpleNamespace

import huggingface_hub.errors
import pytest

import hf_triton
from hf_triton.errors import CODES, CheckpointError, HfTritonError, HubError
from hf_triton.hub.failures import MEANINGS, explain_download
from hf_triton.hub.spec import CheckpointSpec
from tests.support.hub import CANARY, MODEL
from tests.support.paths import sources

SPEC = CheckpointSpec(MODEL, "v9")


def explain(error: BaseException, **environment: str) -> HfTritonError:
    return explain_download(error, SPEC, "/cache", environment)


def client_error(kind: type[Exception], status: int | None = None) -> Exception:
    """An exception of the client, made without its constructor, which differs by class and version."""
    error = kind.__new__(kind, "the client's words")
    error.args = ("the client's words",)
    if status is not None:
        vars(error)["response"] = SimpleNamespace(status_code=status)
    return error


HTTP_CODES = {
    "HfHubHTTPError": (500, "hub_unavailable"),
    "BadRequestError": (400, "hub_unavailable"),
    "BucketBatchError": (400, "hub_unavailable"),
    "BucketNotFoundError": (404, "hub_not_found"),
    "DisabledRepoError": (403, "hub_not_found"),
    "GatedRepoError": (403, "hub_gated"),
    "InferenceTimeoutError": (503, "hub_unavailable"),
    "JobNotFoundError": (404, "hub_not_found"),
    "RemoteEntryNotFoundError": (404, "hub_not_found"),
    "RepositoryNotFoundError": (401, "hub_not_found"),
    "RevisionNotFoundError": (404, "hub_revision_not_found"),
}
"""All exception classes of the client for a response of the Hub; a new one must be added here."""
OTHER_CODES = {"HFValidationError": "hub_not_found", "OfflineModeIsEnabled": "offline_and_not_cached"}


def client_classes() -> dict[str, type[Exception]]:
    members = vars(huggingface_hub.errors).items()
    return {name: kind for name, kind in members if isinstance(kind, type) and issubclass(kind, Exception)}


def test_each_exception_of_the_client_has_a_code() -> None:
    http = {
        name
        for name, kind in client_classes().items()
        if issubclass(kind, huggingface_hub.errors.HfHubHTTPError | huggingface_hub.errors.InferenceTimeoutError)
    }
    assert http == set(HTTP_CODES)
    for name, kind in client_classes().items():
        status, code = HTTP_CODES.get(name, (None, OTHER_CODES.get(name, "hub_unavailable")))
        reason = explain(client_error(kind, status))
        assert (type(reason), reason.code) == (HubError, code), name
        assert MODEL in reason.sentence
        assert code in CODES


@pytest.mark.parametrize(
    ("status", "token", "code", "words"),
    [
        (401, "", "hub_not_found", "set HF_TOKEN to an access token"),
        (401, CANARY, "hub_auth", "make a new one"),
        (403, "", "hub_auth", "set HF_TOKEN"),
        (403, CANARY, "hub_auth", "make a new one"),
        (404, "", "hub_not_found", "correct huggingface_model"),
        (429, "", "hub_rate_limited", "wait some minutes"),
        (502, "", "hub_unavailable", "answers 502: try again later"),
    ],
)
def test_code_by_http_status(status: int, token: str, code: str, words: str) -> None:
    reason = explain(client_error(huggingface_hub.errors.HfHubHTTPError, status), HF_TOKEN=token)
    assert reason.code == code
    assert words in reason.sentence
    assert CANARY not in str(reason)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full", "/cache has no space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full", "make room"),
        (OSError(errno.EROFS, "Read-only file system"), "cache_not_writable", "cannot be written to /cache"),
        (PermissionError(errno.EACCES, "Permission denied"), "cache_not_writable", "set TRANSFORMERS_CACHE"),
        (OSError("Consistency check failed: file should be of size 9"), "hub_incomplete", "broke off"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "hub_unavailable", "is not the Hub"),
        (KeyError("surprise"), "hub_unavailable", "KeyError: 'surprise'"),
        (CheckpointError("checkpoint_incomplete", "ours"), "checkpoint_incomplete", "ours"),
    ],
)
def test_code_by_cause_of_the_exception(error: Exception, code: str, words: str) -> None:
    wrapped = RuntimeError("the client's own")
    wrapped.__cause__ = error
    for raised in (error, wrapped) if not isinstance(error, KeyError) else (error,):
        reason = explain(raised)
        assert reason.code == code
        assert words in reason.sentence


def test_sentence_shows_no_password_and_no_signature() -> None:
    error = ValueError("cannot read https://cdn.example/x?Signature=secret now")
    sentence = explain(error, HF_ENDPOINT="https://user:secret@mirror.example/").sentence
    assert "https://mirror.example " in sentence
    assert "cannot read https://cdn.example/x now" in sentence
    assert "secret" not in sentence


def test_each_sentence_names_the_model_and_a_remedy() -> None:
    fields = dict.fromkeys(
        ("model", "revision", "cache_dir", "setting", "revision_setting", "endpoint", "page", "status", "cause"), "X"
    )
    for meaning in MEANINGS:
        assert meaning.code in CODES
        assert "{model}" in meaning.sentence
        assert ":" in meaning.sentence.format(**fields)  # cause: remedy


def test_codes_in_use_are_the_listed_codes() -> None:
    used: set[str] = set()
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= {code for node in ast.walk(tree) if isinstance(node, ast.Call) for code in _codes_of(node)}
    assert used == set(CODES)


def _codes_of(call: ast.Call) -> Iterator[str]:
    """The code that an error class is constructed with, directly, by a subclass or in a row of the table."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    arguments = {"Meaning": call.args[1:2], "__init__": call.args[:1]}.get(name)
    kind = getattr(hf_triton.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HfTritonError):
        arguments = call.args[:1]
    for argument in arguments or ():
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.isidentifier():
            yield argument.value
