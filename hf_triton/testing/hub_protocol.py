# SPDX-License-Identifier: Apache-2.0
"""The Hub's HTTP API: the paths, status codes and error headers that the Python client relies on.

This module knows nothing about sockets or injected faults. Xet is not supported, so large files use LFS: a redirect to
a signed URL on another host name, which needs no access token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hf_triton.testing.http_server import Response
from hf_triton.testing.repositories import Commit, HubFile, Repository, list_tree

_REPO = r"(?P<repo>[^/]+(?:/[^/]+)??)"
_TYPE = "(?:models|kernels)"
_REVISION = r"(?P<revision>[^/]+)"
_ROUTES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"/cdn/{_REPO}/(?P<revision>[0-9a-f]{{40}})/(?P<name>.+)"), "_get_cdn"),
    (re.compile(r"/api/whoami-v2"), "_get_whoami"),
    (re.compile(rf"/api/{_TYPE}/{_REPO}/revision/{_REVISION}"), "_get_info"),
    (re.compile(rf"/api/{_TYPE}/{_REPO}/tree/{_REVISION}(?:/(?P<under>.+))?"), "_get_tree"),
    (re.compile(rf"/api/{_TYPE}/{_REPO}/refs"), "_get_refs"),
    (re.compile(rf"/api/{_TYPE}/{_REPO}/auth-check"), "_get_auth_check"),
    (re.compile(rf"/api/{_TYPE}/{_REPO}"), "_get_info"),
    (re.compile(rf"/(?:kernels/)?{_REPO}/resolve/{_REVISION}/(?P<name>.+)"), "_get_file"),
)
_NO_TOKEN = "Invalid username or password."
_BAD_TOKEN = "Invalid credentials in Authorization header"

_Query = Mapping[str, list[str]]


def refuse(
    status: int, message: str, error_code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error in the Hub's form; the client chooses its exception by `error_code`, then by status."""
    all_headers = dict(headers or {}) | {"X-Error-Message": message, "Content-Type": "application/json; charset=utf-8"}
    if error_code is not None:
        all_headers["X-Error-Code"] = error_code
    return Response(status, all_headers, json.dumps({"error": message}).encode())


class _RefusedError(Exception):
    """Ends the handling of a request; has the arguments of `refuse`."""


@dataclass
class HubProtocol:
    """Responds to requests for its repositories."""

    access_token: str
    """Has access to all repositories."""
    stranger_token: str
    """Valid, without access to gated repositories."""
    repositories: dict[str, Repository] = field(default_factory=dict)
    """Repositories by id. Entries are replaced and never edited, so other threads may set them at any time."""
    _signing_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def knows(self, token: str | None) -> bool:
        return token in (self.access_token, self.stranger_token)

    def respond(self, target: str, token: str | None, port: int) -> Response:
        """Respond to a GET or HEAD."""
        url = urlsplit(target)
        for pattern, name in _ROUTES:
            if match := pattern.fullmatch(url.path):
                groups = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                request = _Request(groups, parse_qs(url.query), token, port)
                try:
                    response: Response = getattr(self, name)(request)
                except _RefusedError as refused:
                    return refuse(*refused.args)
                return response
        return refuse(404, "Sorry, we can't find the page you are looking for.")

    def _get_whoami(self, request: _Request) -> Response:
        self._check_token(request.token)
        if request.token is None:
            raise _RefusedError(401, _NO_TOKEN)
        name = "member" if request.token == self.access_token else "stranger"
        return _json({"type": "user", "id": name, "name": name, "fullname": name, "orgs": []})

    def _get_info(self, request: _Request) -> Response:
        repository, commit = self._find(request)
        return _json(repository.describe(commit, with_blobs=request.is_set("blobs")))

    def _get_refs(self, request: _Request) -> Response:
        repository, _ = self._find(request)
        return _json(repository.list_refs())

    def _get_tree(self, request: _Request) -> Response:
        _, commit = self._find(request)
        entries = list_tree(commit, request.groups.get("under", ""), request.is_set("recursive"))
        if entries is None:
            raise _RefusedError(404, f"{request.groups['under']!a} does not exist", "EntryNotFound")
        return _json(entries)

    def _get_auth_check(self, request: _Request) -> Response:
        repository, _ = self._find(request)
        self._check_gate(repository, request.token)
        return _json({"status": "ok"})

    def _get_file(self, request: _Request) -> Response:
        repository, commit = self._find(request)
        self._check_gate(repository, request.token)
        of_commit = {"X-Repo-Commit": commit.sha}
        file = commit.files.get(request.groups["name"])
        if file is None:
            raise _RefusedError(404, "Entry not found", "EntryNotFound", of_commit)
        if file.sha256 is None:
            return _file_response(file, of_commit)
        headers = {
            "Location": self._sign(repository, commit, file, request.port),
            "X-Linked-ETag": f'"{file.etag}"',
            "X-Linked-Size": str(file.size_bytes),
        }
        return Response(302, of_commit | headers, b"Found. Redirecting.")

    def _get_cdn(self, request: _Request) -> Response:
        repository = self.repositories.get(request.groups["repo"])
        commit = repository.history.get(request.groups["revision"]) if repository else None
        file = commit.files.get(request.groups["name"]) if commit else None
        if repository is None or commit is None or file is None:
            raise _RefusedError(404, "Not found")
        expected = parse_qs(urlsplit(self._sign(repository, commit, file, request.port)).query)
        if request.query.get("Signature") != expected["Signature"]:
            raise _RefusedError(403, "The signature does not match.")
        return _file_response(file, {})

    def _sign(self, repository: Repository, commit: Commit, file: HubFile, port: int) -> str:
        """The URL of an LFS file, which needs no token; its host name is not the endpoint's, like a CDN's."""
        path = f"/cdn/{repository.repo_id}/{commit.sha}/{quote(file.name)}"
        signature = hmac.new(self._signing_key, path.encode(), hashlib.sha256).hexdigest()
        return f"http://localhost:{port}{path}?Expires=4102444800&Signature={signature}"

    def _find(self, request: _Request) -> tuple[Repository, Commit]:
        self._check_token(request.token)
        repository = self.repositories.get(request.groups["repo"])
        if repository is None:
            if request.token is None:  # without a login, the Hub does not say whether a repository exists
                raise _RefusedError(401, _NO_TOKEN, "RepoNotFound")
            raise _RefusedError(404, "Repository not found", "RepoNotFound")
        commit = repository.find_commit(request.groups.get("revision", "main"))
        if commit is None:
            raise _RefusedError(404, f"Invalid rev id: {request.groups['revision']!a}", "RevisionNotFound")
        return repository, commit

    def _check_token(self, token: str | None) -> None:
        if token is not None and not self.knows(token):
            raise _RefusedError(401, _BAD_TOKEN)

    def _check_gate(self, repository: Repository, token: str | None) -> None:
        if not repository.is_gated or token == self.access_token:
            return
        restricted = f"Access to model {repository.repo_id} is restricted"
        if token is None:
            message = f"{restricted}. You must have access to it and be authenticated to access it. Please log in."
            raise _RefusedError(401, message, "GatedRepo")
        raise _RefusedError(403, f"{restricted} and you are not in the authorized list.", "GatedRepo")


@dataclass(frozen=True)
class _Request:
    groups: Mapping[str, str]
    """The groups of the route's pattern, unquoted."""
    query: _Query
    token: str | None
    port: int

    def is_set(self, name: str) -> bool:
        return self.query.get(name, ["false"])[-1].lower() in ("true", "1")


def _json(content: Any) -> Response:
    return Response(200, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(content).encode())


def _file_response(file: HubFile, headers: Mapping[str, str]) -> Response:
    about = {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    return Response(200, dict(headers) | about, body_path=file.path)
