# SPDX-License-Identifier: Apache-2.0
"""API keys: who is served, on whose account. How long a look-up takes tells nothing of a key, and none is logged."""

from __future__ import annotations

import codecs
import contextlib
import hmac
import logging
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from hf_triton.errors import SettingsError
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.http.health import CHECK_PATHS
from hf_triton_gateway.keys.accounts import CURRENT, Account
from hf_triton_gateway.keys.key_lines import KeyLineError, Quota, read_lines

LOG: Final = logging.getLogger("hf_triton_gateway")
CHECK_EVERY_S: Final = 1.0
"""How often the file is looked at."""
PAGE: Final = "/"
"""The chat page, which asks for a key; POST to its path is TEI's `/embed`, and needs one."""
KEY_HEADERS: Final = (b"authorization", b"x-api-key")
OPEN_PREFIX: Final = "/page/"
"""Files of the chat page."""


class ApiKeys:
    """The keys of a file. If a line is wrong, they stay as they were.

    A file that is removed, emptied or unreadable has none: no client is served then.

    Args:
        path: One key a line, with its limits behind it; what follows a # at its beginning or after a space is a
            comment.
        metrics: Count what keys use.

    Raises:
        SettingsError: The file cannot be read, has no key, or a line is wrong.
    """

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path = path
        self._metrics = metrics
        self._stamp = self._read_stamp()
        self._secret = secrets.token_bytes(32)
        self._accounts: dict[bytes, Account] = {}
        """The accounts by the digest of their keys."""
        self._take(self._read())
        self._problem = ""
        """Why no key is valid."""

    def find(self, key: bytes) -> Account | None:
        """The account of a key; None: it is not in the file."""
        return None if self._problem else self._accounts.get(self._digest(key))

    def _digest(self, key: bytes) -> bytes:
        """Digest a key under a secret of this process: a dictionary compares nothing that a client can choose."""
        return hmac.digest(self._secret, key, "sha256")

    def _take(self, keys: dict[bytes, Quota]) -> None:
        """Serve these keys; those that stay keep their use."""
        old, digests = self._accounts, {self._digest(key): key for key in keys}
        names = {account.quota.name for account in old.values()} - {quota.name for quota in keys.values()}
        for digest in old.keys() & digests.keys():
            old[digest].change(keys[digests[digest]])
        self._accounts = {
            digest: old.get(digest) or Account(keys[key], self._metrics, key) for digest, key in digests.items()
        }
        for name in names:
            self._metrics.forget_key(name)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Read the file again while it changes, in a thread of its own: a file system may hang."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(CHECK_EVERY_S):
                self.reread()

        threading.Thread(target=watch, name="api-keys", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def reread(self) -> None:
        """Read the file if it has changed."""
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._take(self._read())
            self._problem = ""
            LOG.info("API keys read again from %s: %d keys", self._path, len(self._accounts))
        except KeyLineError as error:
            LOG.error("the API keys and limits stay as they were: %s", error.sentence)
        except SettingsError as error:
            self._stamp = None
            if error.sentence != self._problem:
                self._problem = error.sentence
                LOG.error("no API key is valid any more, and every request is refused: %s", error.sentence)

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        if not stat.S_ISREG(status.st_mode):  # a pipe is read once, and may wait for ever
            raise self._unreadable("it is no regular file")
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> dict[bytes, Quota]:
        try:
            lines = self._path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        quotas = read_lines(lines, f"api_key_file {self._path}")
        if not quotas:
            raise SettingsError(f"api_key_file {self._path} has no key: write one a line")
        return quotas

    def _unreadable(self, reason: str | None) -> SettingsError:
        return SettingsError(f"api_key_file {self._path} cannot be read: {reason}")


class KeyCheck:
    """ASGI middleware that refuses requests without a key of the file; the key's account is the current one."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            account = self._keys.find(key_of(scope))
            CURRENT.set(account)
            if account is None:
                error = ApiError(
                    401,
                    "a valid API key is required: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                    code="invalid_api_key",
                )
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    """Whether a request needs no key."""
    is_page = scope["path"] == PAGE and scope["method"] in ("GET", "HEAD")
    return is_page or scope["path"] in CHECK_PATHS or scope["path"].startswith(OPEN_PREFIX)


def key_of(scope: Scope) -> bytes:
    """The key that a request has; empty for none, and for several: a proxy in front may have checked another."""
    sent = [header for header in scope["headers"] if header[0] in KEY_HEADERS]
    headers: dict[bytes, bytes] = dict(sent)
    if len(headers) < len(sent):
        return b""
    kind, _, bearer = headers.pop(b"authorization", b"").partition(b" ")
    keys = {*headers.values(), bearer.strip() if kind.lower() == b"bearer" else b""} - {b""}
    return keys.pop() if len(keys) == 1 else b""
