# SPDX-License-Identifier: Apache-2.0
"""What an error of the Hub's client means and what to do about it, as a table. Fetches nothing itself."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from hf_triton.errors import HfTritonError, HubError

if TYPE_CHECKING:
    from hf_triton.hub.download import Job

OF_FOLDERS: Final = "a folder on disk begins with `/`, `./` or `../`"
"""What whoever meant a folder, and named one as a model on the Hub is named, wants to know."""
TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be another one in a moment."""
INCOMPLETE: Final = ("Consistency check failed", "without sending complete message body")
"""What the client and its HTTP library say where a file broke off."""
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


class Failure:
    """A failed download, seen through the chain of its causes.

    Args:
        error: What the client raised.
        has_token: Whether there was an access token.
    """

    def __init__(self, error: BaseException, has_token: bool) -> None:
        self.causes = list(_causes(error))
        self.has_token = has_token
        self.status = next((status for each in self.causes if (status := status_of(each))), None)
        self.errno = next((each.errno for each in self.causes if isinstance(each, OSError) and each.errno), None)

    def has(self, *names: str) -> bool:
        """Whether a cause is of a class of one of these names, or of a subclass."""
        return any(_is_a(each, *names) for each in self.causes)

    def describe(self) -> str:
        """The cause in the client's words, in one line."""
        cause = next((each for each in self.causes if _is_a(each, "TransportError")), self.causes[0])
        return f"{type(cause).__name__}: {one_line(str(cause))}".rstrip(".: ")


class _Meaning(NamedTuple):
    """A row of the table."""

    applies: Callable[[Failure], bool]
    code: str
    sentence: str
    """A format of what `explain` knows: the job's fields, `page`, `endpoint`, `status`, `cause`."""


MEANINGS: Final = (
    _Meaning(
        lambda it: it.has("GatedRepoError") and it.has_token,
        "hub_gated",
        "{model} is gated, and the access token in HF_TOKEN does not open it: accept its terms at {page} with the "
        "account that the token belongs to",
    ),
    _Meaning(
        lambda it: it.has("GatedRepoError"),
        "hub_gated",
        "{model} is gated, and there is no access token: accept its terms at {page}, and set HF_TOKEN to an access "
        "token of that account",
    ),
    _Meaning(
        lambda it: it.has("RevisionNotFoundError"),
        "hub_revision_not_found",
        "{model} has no revision '{revision}': choose one of {page}, and set {revision_setting} to it",
    ),
    _Meaning(
        lambda it: it.has("DisabledRepoError"),
        "hub_not_found",
        "{model} has been disabled by the Hub: see {page}, and set {setting} to another model",
    ),
    _Meaning(
        lambda it: it.has("HFValidationError"),
        "hub_not_found",
        "'{model}' is no name on the Hub: set {setting} to namespace/name; " + OF_FOLDERS,
    ),
    _Meaning(
        lambda it: it.has("RepositoryNotFoundError") and it.has_token,
        "hub_not_found",
        "there is no model {model} at {endpoint}, or the access token in HF_TOKEN may not read it: correct {setting}, "
        "or set HF_TOKEN to another token; " + OF_FOLDERS,
    ),
    _Meaning(
        lambda it: it.has("RepositoryNotFoundError") or (it.status == 401 and not it.has_token),
        "hub_not_found",
        "there is no model {model} at {endpoint}, or it is private: correct {setting}, or set HF_TOKEN to an access "
        "token; " + OF_FOLDERS,
    ),
    _Meaning(
        lambda it: it.status in (401, 403) and it.has_token,
        "hub_auth",
        "the Hub at {endpoint} refuses the access token in HF_TOKEN for {model} ({status}): make a new one",
    ),
    _Meaning(
        lambda it: it.status == 403,
        "hub_auth",
        "the Hub at {endpoint} forbids {model} ({status}): set HF_TOKEN to an access token that may read it",
    ),
    _Meaning(
        lambda it: it.status == 404,
        "hub_not_found",
        "{endpoint} has no {model} (404): correct {setting}, or HF_ENDPOINT if that is no Hub",
    ),
    _Meaning(
        lambda it: it.status == 429,
        "hub_rate_limited",
        "the Hub answers 429 (too many requests) for {model}: wait some minutes, or set HF_TOKEN to be allowed more",
    ),
    _Meaning(
        lambda it: it.has("OfflineModeIsEnabled"),
        "offline_and_not_cached",
        "{model} is in no cache, and HF_HUB_OFFLINE forbids a download: unset it once, or mount a cache that has the "
        "model; " + OF_FOLDERS,
    ),
    _Meaning(
        lambda it: it.errno in NO_ROOM,
        "disk_full",
        "{cache_dir} has no room left for {model}: make room, or set TRANSFORMERS_CACHE to a folder on a larger disk",
    ),
    _Meaning(
        lambda it: it.errno in NOT_WRITABLE,
        "cache_not_writable",
        "{model} cannot be written to {cache_dir}: set TRANSFORMERS_CACHE to a folder that can be written to",
    ),
    _Meaning(
        lambda it: any(is_incomplete(each) for each in it.causes),
        "hub_incomplete",
        "the download of {model} broke off again and again ({cause}): check the network, and start again",
    ),
    _Meaning(
        lambda it: it.status is not None,
        "hub_unavailable",
        "{model} is in no cache, and the Hub at {endpoint} answers {status}: try again later, or copy the model into "
        "the cache",
    ),
    _Meaning(
        lambda it: it.has("FileMetadataError", "JSONDecodeError"),
        "hub_unavailable",
        "{model} is in no cache, and what answers at {endpoint} is not the Hub (a sign-in page of the network?): check "
        "the network, HF_ENDPOINT and HTTPS_PROXY, or copy the model into the cache",
    ),
    _Meaning(
        lambda it: True,
        "hub_unavailable",
        "{model} is in no cache, and the Hub at {endpoint} cannot be reached ({cause}): check the network, HF_ENDPOINT "
        "and HTTPS_PROXY, or copy the model into the cache; " + OF_FOLDERS,
    ),
)
"""The first row that applies is the answer."""


def explain(error: BaseException, job: Job, environment: Mapping[str, str]) -> HfTritonError:
    """Say in one sentence what an error of the Hub's client means and what to do.

    Args:
        error: What the client raised; its causes are looked at too.
        job: What was being fetched.
        environment: To know whether there is an access token, and which Hub it was.
    """
    failure = Failure(error, has_token=bool(environment.get("HF_TOKEN")))
    ours = next((each for each in failure.causes if isinstance(each, HfTritonError)), None)
    if ours is not None:
        return ours
    meaning = next(each for each in MEANINGS if each.applies(failure))
    endpoint = _shown_endpoint(environment)
    sentence = meaning.sentence.format(
        model=job.model,
        revision=job.revision,
        cache_dir=job.cache_dir,
        setting=job.setting,
        revision_setting="revision" if job.setting == "huggingface_model" else f"{job.setting}_revision",
        endpoint=endpoint,
        page=f"{endpoint}/{job.model}",
        status=failure.status,
        cause=failure.describe(),
    )
    return HubError(meaning.code, sentence)


def is_incomplete(error: BaseException) -> bool:
    """Whether a file came in part."""
    return any(words in str(error) for words in INCOMPLETE)


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: the Hub is busy, or a connection was lost.

    A file that broke off is none: the client has gone on with it several times by itself.
    """
    return status_of(error) in TRANSIENT or (_is_a(error, "TransportError") and not is_incomplete(error))


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error of the client, where it is one of failure."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) and status >= 400 else None


def one_line(text: str) -> str:
    """Text of the client, cut, without the queries of URLs, which may hold a signature."""
    return " ".join(re.sub(r"(?<=\w)\?\S*", "", text).split())[:200]


def _is_a(error: BaseException, *names: str) -> bool:
    """By name, because the client's HTTP library was httpx before huggingface_hub 2 and is httpx2 since."""
    return any(each.__name__ in names for each in type(error).__mro__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _shown_endpoint(environment: Mapping[str, str]) -> str:
    """The Hub's address, without a password that it may hold."""
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    return re.sub(r"(?<=://)[^/@]*@", "", endpoint.rstrip("/"))
