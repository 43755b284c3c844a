# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Hub on 127.0.0.1 that serves local folders to the real client, with injected faults.

`hub_protocol.py` decides the responses, `http_server.py` sends or damages them.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from hf_triton.testing.http_server import Fault, FaultBoard, LoopbackServer, Response
from hf_triton.testing.hub_protocol import HubProtocol, refuse
from hf_triton.testing.repositories import Repository, load_commit

_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PORTAL = b"<!doctype html><title>Sign in</title><p>Please sign in to use this network.</p>"


class HubRequest(NamedTuple):
    """A request that the Hub received."""

    method: str
    path: str
    """It is as sent, with the query."""
    had_valid_token: bool
    """Whether it had the access token or the stranger's; the token itself is not recorded."""


class LoopbackHub:
    """Serves folders as Hub repositories while it is entered, on a free port.

    The client reads `HF_ENDPOINT` when it is imported, so run it in a child process:

        with LoopbackHub() as hub:
            hub.add("tiiuae/falcon-7b", folder)
            subprocess.run(command, env=os.environ | hub.environment() | {"HF_HOME": "/tmp/hub"})

    Give the child its own cache, as above, or the downloads stay in yours under the real names.

    Methods may be called at any time, from any thread. Faults add up; the oldest that matches a request is used first.
    A fault's `path` matches requests whose path contains it (`"model.safetensors"`, `"/api/"`); None matches all
    requests. Its `times` is the number of requests that it applies to; None means all until `heal`. A download is a
    HEAD and a GET: `fail`, `captive_portal`, `drop` and `hang` apply to both, `truncate`, `corrupt` and `slow` to the
    GET alone, since a HEAD has no body.

    Attributes:
        requests: All requests, oldest first; may be cleared.
        access_token: Has access to all repositories.
        stranger_token: Valid, without access to gated repositories.
    """

    def __init__(self) -> None:
        self.requests: list[HubRequest] = []
        self.access_token = f"hf_{secrets.token_hex(17)}"
        self.stranger_token = f"hf_{secrets.token_hex(17)}"
        self._protocol = HubProtocol(self.access_token, self.stranger_token)
        self._lock = threading.Lock()
        self._faults = FaultBoard()
        self._server: LoopbackServer | None = None

    def __enter__(self) -> LoopbackHub:
        self._server = LoopbackServer(self._respond, self._faults)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def endpoint(self) -> str:
        """The value for `HF_ENDPOINT`, for example `http://127.0.0.1:40123`.

        Raises:
            RuntimeError: The Hub is not entered.
        """
        return f"http://127.0.0.1:{self._port}"

    def environment(self) -> dict[str, str]:
        """Variables that make a child process use this Hub: the endpoint, no telemetry, no proxy."""
        direct = "127.0.0.1,localhost"
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"} | {
            name: ",".join(filter(None, (os.environ.get(name), direct))) for name in ("NO_PROXY", "no_proxy")
        }

    def add(
        self,
        repo_id: str,
        folder: str | os.PathLike[str],
        *,
        gated: bool = False,
        revisions: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> str:
        """Serve a folder as a repository's `main`; earlier commits stay available by hash.

        The files are hashed now and read when they are requested: do not edit a served folder.

        Args:
            repo_id: `"namespace/name"` or `"name"`.
            folder: Its files, including subfolders, become the repository's.
            gated: Files need `access_token`; as on the Hub, the listing does not.
            revisions: Further folders by tag name.

        Returns:
            The commit hash of `main`: 40 hexadecimal digits that depend on the files alone.

        Raises:
            ValueError: `repo_id` is not of that form.
            FileNotFoundError: A folder does not exist.
        """
        if not _REPO_ID.fullmatch(repo_id):
            raise ValueError(f"repo_id must look like 'namespace/name', got {repo_id!r}")
        folders = dict(revisions or {}) | {"main": folder}
        commits = {name: load_commit(Path(path)) for name, path in folders.items()}
        with self._lock:
            earlier = self._protocol.repositories.get(repo_id)
            history = dict(earlier.history if earlier else {}) | {commit.sha: commit for commit in commits.values()}
            self._protocol.repositories[repo_id] = Repository(repo_id, commits, history, gated)
        return commits["main"].sha

    def fail(self, status: int, *, times: int | None = None, path: str | None = None, retry_after_s: int = 1) -> None:
        """Respond with an error and the headers that the Hub sends with that status.

        Args:
            status: 401, 403, 404, 429, 500, 503 or another.
            times: Number of requests, at least 1; None is all.
            path: Part of the request path; None matches all.
            retry_after_s: For 429 only, in whole seconds; the client sleeps one more.
        """
        codes = {401: "RepoNotFound", 403: "GatedRepo", 404: "EntryNotFound"}
        response = refuse(status, "Injected by a test.", codes.get(status))
        if status == 429:
            limits = {"Retry-After": str(retry_after_s), "RateLimit": f'"resolvers";r=0;t={retry_after_s}'}
            response = Response(status, dict(response.headers) | limits, response.body)
        self._arm(Fault("fail", path, times, response))

    def captive_portal(self, *, times: int | None = None, path: str | None = None) -> None:
        """Respond with status 200 and a sign-in page, like a captive portal or a misconfigured proxy."""
        self._arm(Fault("page", path, times, Response(200, {"Content-Type": "text/html"}, _PORTAL)))

    def drop(self, *, times: int | None = None, path: str | None = None) -> None:
        """Close the connection without a response."""
        self._arm(Fault("drop", path, times))

    def hang(self, path: str | None = None, *, times: int | None = None) -> None:
        """Accept requests and never respond."""
        self._arm(Fault("hang", path, times))

    def truncate(self, path: str | None = None, *, after_bytes: int, times: int | None = None) -> None:
        """Announce a body's full length, send `after_bytes` of it and close the connection."""
        self._arm(Fault("truncate", path, times, amount=after_bytes))

    def corrupt(self, path: str | None = None, *, times: int | None = None, offset_bytes: int | None = None) -> None:
        """Send a body of the right length with one byte inverted, by default the one in the middle of the file."""
        self._arm(Fault("corrupt", path, times, amount=offset_bytes))

    def slow(self, path: str | None = None, *, bytes_per_s: int, times: int | None = None) -> None:
        """Send bodies at `bytes_per_s`, at least 1."""
        self._arm(Fault("slow", path, times, amount=bytes_per_s))

    def heal(self) -> None:
        """Remove all faults; hanging requests still hang."""
        self._faults.clear()

    @property
    def _port(self) -> int:
        if self._server is None:
            raise RuntimeError("the Hub has no address outside `with LoopbackHub() as hub:`")
        return self._server.server_port

    def _arm(self, fault: Fault) -> None:
        if fault.times is not None and fault.times < 1:
            raise ValueError(f"times must be at least 1, or None for all, got {fault.times}")
        self._faults.arm(fault)

    def _respond(self, method: str, target: str, authorization: str | None) -> Response:
        token = (authorization or "").removeprefix("Bearer ") or None
        self.requests.append(HubRequest(method, target, self._protocol.knows(token)))
        return self._protocol.respond(target, token, self._port)
