# SPDX-License-Identifier: Apache-2.0
"""Translates exceptions of the Hub's client to an error code and a sentence with the remedy."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from hf_triton.errors import CheckpointError, HfTritonError, HubError
from hf_triton.hub.spec import CheckpointSpec

FOLDER_HINT: Final = "a folder on disk begins with `/`, `./` or `../`"
"""A hint to users who meant a folder and wrote it as a Hub name."""
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


def causes_of(error: BaseException) -> list[BaseException]:
    """An exception and the chain of its causes."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return causes


class Failure:
    """A failed download and the chain of its causes."""

    def __init__(self, error: BaseException, has_token: bool) -> None:
        self.causes = causes_of(error)
        self.has_token = has_token
        self.status = next((status for cause in self.causes if (status := status_of(cause))), None)
        self.errno = next((cause.errno for cause in self.causes if isinstance(cause, OSError) and cause.errno), None)

    def has_cause(self, *names: str) -> bool:
        """Whether a cause is an instance of a class with one of these names."""
        return any(_is_a(cause, *names) for cause in self.causes)

    def describe(self) -> str:
        """The cause in the client's words, on one line."""
        cause = next((cause for cause in self.causes if _is_a(cause, "TransportError")), self.causes[0])
        return f"{type(cause).__name__}: {one_line(str(cause))}".rstrip(".: ")


class Meaning(NamedTuple):
    applies: Callable[[Failure], bool]
    code: str
    sentence: str
    """A format string; `explain_download` fills in the fields of the spec, `page`, `endpoint`, `status`, `cause`."""


MEANINGS: Final = (
    Meaning(
        lambda failure: failure.has_cause("GatedRepoError") and failure.has_token,
        "hub_gated",
        "{model} is gated, and the access token in HF_TOKEN has no access to it: accept its terms at {page} with the "
        "account that the token belongs to",
    ),
    Meaning(
        lambda failure: failure.has_cause("GatedRepoError"),
        "hub_gated",
        "{model} is gated, and there is no access token: accept its terms at {page}, and set HF_TOKEN to an access "
        "token of that account",
    ),
    Meaning(
        lambda failure: failure.has_cause("RevisionNotFoundError"),
        "hub_revision_not_found",
        "{model} has no revision '{revision}': choose one of {page}, and set {revision_setting} to it",
    ),
    Meaning(
        lambda failure: failure.has_cause("DisabledRepoError"),
        "hub_not_found",
        "{model} has been disabled by the Hub: see {page}, and set {setting} to another model",
    ),
    Meaning(
        lambda failure: failure.has_cause("HFValidationError"),
        "hub_not_found",
        "'{model}' is not a valid name on the Hub: set {setting} to namespace/name; " + FOLDER_HINT,
    ),
    Meaning(
        lambda failure: failure.has_cause("RepositoryNotFoundError") and failure.has_token,
        "hub_not_found",
        "there is no model {model} at {endpoint}, or the access token in HF_TOKEN may not read it: correct {setting}, "
        "or set HF_TOKEN to another token; " + FOLDER_HINT,
    ),
    Meaning(
        lambda failure: (
            failure.has_cause("RepositoryNotFoundError") or (failure.status == 401 and not failure.has_token)
        ),
        "hub_not_found",
        "there is no model {model} at {endpoint}, or it is private: correct {setting}, or set HF_TOKEN to an access "
        "token; " + FOLDER_HINT,
    ),
    Meaning(
        lambda failure: failure.status in (401, 403) and failure.has_token,
        "hub_auth",
        "the Hub at {endpoint} rejects the access token in HF_TOKEN for {model} ({status}): make a new one",
    ),
    Meaning(
        lambda failure: failure.status == 403,
        "hub_auth",
        "the Hub at {endpoint} forbids {model} ({status}): set HF_TOKEN to an access token that may read it",
    ),
    Meaning(
        lambda failure: failure.status == 404,
        "hub_not_found",
        "{endpoint} has no {model} (404): correct {setting}, or HF_ENDPOINT if that is not a Hub",
    ),
    Meaning(
        lambda failure: failure.status == 429,
        "hub_rate_limited",
        "the Hub answers 429 (too many requests) for {model}: wait some minutes, or set HF_TOKEN for a higher limit",
    ),
    Meaning(
        lambda failure: failure.has_cause("OfflineModeIsEnabled"),
        "offline_and_not_cached",
        "{model} is not cached, and HF_HUB_OFFLINE forbids a download: unset it once, or mount a cache that has the "
        "model; " + FOLDER_HINT,
    ),
    Meaning(
        lambda failure: failure.errno in NO_ROOM,
        "disk_full",
        "{cache_dir} has no space left for {model}: make room, or set TRANSFORMERS_CACHE to a folder on a larger disk",
    ),
    Meaning(
        lambda failure: failure.errno in NOT_WRITABLE,
        "cache_not_writable",
        "{model} cannot be written to {cache_dir}: set TRANSFORMERS_CACHE to a writable folder",
    ),
    Meaning(
        lambda failure: any(map(is_incomplete, failure.causes)),
        "hub_incomplete",
        "the download of {model} broke off repeatedly ({cause}): check the network, and start again",
    ),
    Meaning(
        lambda failure: failure.status is not None,
        "hub_unavailable",
        "{model} is not cached, and the Hub at {endpoint} answers {status}: try again later, or copy the model into "
        "the cache",
    ),
    Meaning(
        lambda failure: failure.has_cause("FileMetadataError", "JSONDecodeError"),
        "hub_unavailable",
        "{model} is not cached, and the server at {endpoint} is not the Hub (a sign-in page of the network?): check "
        "the network, HF_ENDPOINT and HTTPS_PROXY, or copy the model into the cache",
    ),
    Meaning(
        lambda _: True,
        "hub_unavailable",
        "{model} is not cached, and the Hub at {endpoint} cannot be reached ({cause}): check the network, HF_ENDPOINT "
        "and HTTPS_PROXY, or copy the model into the cache; " + FOLDER_HINT,
    ),
)
"""The first row that applies gives the error."""


def explain_download(
    error: BaseException, spec: CheckpointSpec, cache_dir: str, environment: Mapping[str, str]
) -> HfTritonError:
    """Translate an exception of the Hub's client, or a cause of it; the environment has token and address."""
    failure = Failure(error, has_token=bool(environment.get("HF_TOKEN")))
    ours = next((cause for cause in failure.causes if isinstance(cause, HfTritonError)), None)
    if ours is not None:
        return ours
    meaning = next(meaning for meaning in MEANINGS if meaning.applies(failure))
    endpoint = (environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    endpoint = re.sub(r"(?<=://)[^/@]*@", "", endpoint)  # without a password
    sentence = meaning.sentence.format(
        model=spec.name,
        revision=spec.revision,
        cache_dir=cache_dir,
        setting=spec.setting,
        revision_setting=spec.revision_setting,
        endpoint=endpoint,
        page=f"{endpoint}/{spec.name}",
        status=failure.status,
        cause=failure.describe(),
    )
    return HubError(meaning.code, sentence)


def incomplete_on_hub(spec: CheckpointSpec, missing: Iterable[str]) -> CheckpointError:
    """The error for a repository that lacks needed files."""
    names = ", ".join(list(missing)[:3])
    return CheckpointError(
        "checkpoint_incomplete",
        f"{spec.name} (revision {spec.revision}) has no {names} on the Hub: set {spec.setting} to a complete model in "
        "the form of transformers",
    )


def is_incomplete(error: BaseException) -> bool:
    """Whether a file broke off, by the messages of the client and its HTTP library."""
    messages = "Consistency check failed", "without sending complete message body"
    return any(message in str(error) for message in messages)


def is_transient(error: BaseException) -> bool:
    """Whether a retry may help: the Hub is busy, or a connection was lost.

    A file that broke off is not transient: the client has already resumed it several times.
    """
    is_busy = status_of(error) in (408, 425, 429, 500, 502, 503, 504)
    return is_busy or (_is_a(error, "TransportError") and not is_incomplete(error))


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an exception of the client, if it is 400 or more."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) and status >= 400 else None


def one_line(text: str) -> str:
    """A message of the client, shortened, without the queries of URLs, which may hold a signature."""
    return " ".join(re.sub(r"(?<=\w)\?\S*", "", text).split())[:200]


def _is_a(error: BaseException, *names: str) -> bool:
    """Compare classes by name: the client's HTTP library is httpx before huggingface_hub 2 and httpx2 since."""
    return any(kind.__name__ in names for kind in type(error).__mro__)
