# SPDX-License-Identifier: Apache-2.0
"""What Triton and gRPC say in words alone, and what it means: no other module decides by their sentences.

The tests make a real Triton say them: a release that words one anew is noticed there. Imports neither of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

Meaning = Literal[
    "restricted", "not_healthy", "shared_memory_full", "unknown_model", "is_decoupled", "not_explicit", "unreadable"
]
MEANINGS: Final[Mapping[Meaning, re.Pattern[str]]] = {
    "restricted": re.compile("This protocol is restricted"),  # a header of `--grpc-restricted-protocol` is missing
    "not_healthy": re.compile(r"Stub process '[^']*' is not healthy"),
    "shared_memory_full": re.compile("Failed to increase the shared memory pool"),
    "unknown_model": re.compile(r"unknown model(?:: '(?P<name>[^']*)')?"),
    "is_decoupled": re.compile("decoupled transaction policy"),
    "not_explicit": re.compile("explicit model load / unload is not allowed"),
    "unreadable": re.compile("failed to poll from model repository"),
}
"""Triton's words by what they mean."""
PROBLEMS: Final[Mapping[str, str]] = {
    "DNS": "there is no such host",
    "name resolution": "there is no such host",
    "errors resolving": "there is no such host",
    "certificate has expired": "its certificate has expired",
    "certificate is not yet valid": "its certificate is not valid yet",
    "Hostname Verification": "its certificate is for another name, which --triton-server-name may give",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of no authority that is trusted: name one's with --triton-ca-file",
    "WRONG_VERSION_NUMBER": "what listens there speaks no TLS",
    "Handshake read failed": "what listens there speaks no TLS",
    "TSI_PROTOCOL_FAILURE": "the TLS handshake failed",
}
"""What gRPC says of a connection that no waiting mends, and what that means; the first that is in it counts."""
NO_GRPC: Final = re.compile("failed to connect.*(Socket closed|Connection reset|Broken pipe|http1.x)", re.DOTALL)
NOT_PLAIN: Final = "what listens there speaks no gRPC: is it the HTTP port? For TLS, write grpcs://HOST:PORT"
NOT_TAKEN: Final = (
    "it ended the TLS handshake, as one does that wants a client certificate: --triton-cert-file and --triton-key-file"
)
_REQUEST_ID: Final = re.compile(r"^\[request id: [^]]*\] ")


def says(details: str | None, meaning: Meaning) -> bool:
    """Whether Triton's words have a meaning."""
    return MEANINGS[meaning].search(details or "") is not None


def unknown_name(details: str) -> str | None:
    """The model that Triton does not know, by its words."""
    found = MEANINGS["unknown_model"].search(details)
    return found and found["name"]


def first_line(details: str) -> str:
    """Triton's sentence, without the request's id and what follows."""
    return _REQUEST_ID.sub("", details).partition("\n")[0]


def misfit(details: str, *, has_tls: bool) -> str | None:
    """Why Triton cannot be reached, if that is for someone to mend: a name, a certificate, another protocol."""
    for sign, means in PROBLEMS.items():
        if sign in details:
            return means
    if NO_GRPC.search(details):
        return NOT_TAKEN if has_tls else NOT_PLAIN
    return None


def problem(details: str, *, has_tls: bool) -> str:
    """Why Triton cannot be reached, from gRPC's own sentence."""
    broken = "the connection is refused" if "refused" in details else "the connection broke off"
    return misfit(details, has_tls=has_tls) or broken
