# SPDX-License-Identifier: Apache-2.0
"""OpenAI's batch files: the requests of one, checked before any is sent, and the results that a stopped run has left.

Results stand in the order of their requests, so those of a stopped run are the first ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import click

from hf_triton.errors import clip

ENDPOINTS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *("/v1/rerank", "/v1/score", "/v1/classify", "/v1/token-classification", "/v1/fill-mask"),
)
"""The gateway's endpoints that a line may ask."""
FORM: Final = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
BOM: Final = "\ufeff"


@dataclass(frozen=True)
class BatchRequest:
    """A line of a batch file."""

    number: int
    """Its line, from 1."""
    id: str
    """Its result's id: a hash of the line, so that a changed request is noticed."""
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def names(self) -> dict[str, str]:
        """What its result begins with."""
        return {"id": self.id, "custom_id": self.custom_id}


def read_requests(file: BinaryIO) -> Iterator[BatchRequest]:
    """The requests of a batch file, from its start, without empty lines; a line that is no request is an error."""
    file.seek(0)
    for number, line in enumerate(file, 1):
        if line.strip():
            yield _read_line(number, line)


def count_requests(file: BinaryIO) -> int:
    """How many requests a batch file has, all of them checked.

    Raises:
        click.UsageError: There is none, a line is no request, or two have one `custom_id`.
    """
    seen: dict[int, int] = {}  # the lines by a hash of the id, which takes less memory than the id
    for request in read_requests(file):
        first = seen.setdefault(hash(request.custom_id), request.number)
        if first != request.number:
            raise _wrong(
                request.number, f"has the custom_id {clip(request.custom_id)} of line {first}: each has its own"
            )
    if not seen:
        raise click.UsageError(f"there is no request: each line is one, {FORM}")
    return len(seen)


def _read_line(number: int, line: bytes) -> BatchRequest:
    try:
        text = line.decode("utf-8").removeprefix(BOM).strip()
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(number, f"is not JSON in UTF-8 ({error})") from None
    if not isinstance(entry, dict):
        raise _wrong(number, f"must be an object, {FORM}")
    custom_id, method, url, body = (entry.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise _wrong(number, f"must have a custom_id, a string that is not empty, got {clip(custom_id)}")
    if method != "POST":
        raise _wrong(number, f"must have the method POST, got {clip(method)}")
    if url not in ENDPOINTS:
        raise _wrong(number, f"must have a url of {', '.join(ENDPOINTS)}, got {clip(url)}")
    if not isinstance(body, dict):
        raise _wrong(number, f"must have a body, an object, got {clip(body)}")
    if body.get("stream"):
        raise _wrong(number, "has stream true, and a batch has whole answers: leave it out")
    return BatchRequest(number, f"batch_req_{hashlib.sha256(text.encode()).hexdigest()[:32]}", custom_id, url, body)


def _wrong(number: int, sentence: str) -> click.UsageError:
    return click.UsageError(f"line {number} {sentence}")


def has_failed(result: Mapping[str, Any]) -> bool:
    """Whether a result is no answer."""
    response = result["response"]
    return response is None or response["status_code"] != 200


def count_results(results: BinaryIO, file: BinaryIO) -> tuple[int, int]:
    """How many results an earlier run has left, and how many of them failed.

    A last line that it could not finish is cut off.

    Raises:
        click.UsageError: The results are not of these requests; nothing is cut off then.
    """
    num_results = num_failed = num_bytes = 0
    results.seek(0)
    requests = read_requests(file)
    for line in results:
        request = next(requests, None)
        if request is None or not _is_of(request, line):
            raise click.UsageError(
                f"line {num_results + 1} of {results.name} is not the result of this batch's request of that place: "
                "name another file for the results"
            )
        if not line.endswith(b"\n"):
            break
        num_results += 1
        num_failed += has_failed(json.loads(line))
        num_bytes += len(line)
    results.truncate(num_bytes)
    return num_results, num_failed


def _is_of(request: BatchRequest, line: bytes) -> bool:
    """Whether a line is the result of a request, or the beginning of it."""
    begin = json.dumps(request.names).encode().removesuffix(b"}")
    if not line.endswith(b"\n"):
        return line.startswith(begin) or begin.startswith(line)
    try:
        result = json.loads(line)
        return line.startswith(begin) and has_failed(result) in (True, False)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
