# SPDX-License-Identifier: Apache-2.0
"""API keys: who is served. Keys are compared in constant time, and never logged."""

from __future__ import annotations

import codecs
import contextlib
import hmac
import logging
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from hf_triton.errors import SettingsError
from hf_triton.openai.errors import ApiError
from hf_triton.openai.health import CHECK_PATHS

LOG: Final = logging.getLogger("hf_triton.openai")
CHECK_EVERY_S: Final = 1.0
"""How often the file is looked at."""
COMMENT: Final = re.compile(rb"(^|\s)#.*", re.DOTALL)
PAGE: Final = "/"
"""The chat page, which asks for a key; POST to its path is TEI's `/embed`, and needs one."""
KEY_HEADERS: Final = (b"authorization", b"x-api-key")
OPEN_PREFIX: Final = "/page/"
"""Files of the chat page."""


class ApiKeys:
    """The keys of a file. A file that is removed, emptied or unreadable has none: no client is served then.

    Args:
        path: One key a line; what follows a # at its beginning or after a space is a comment.

    Raises:
        SettingsError: The file cannot be read, or has no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._keys = self._read()
        self._problem = ""

    def allow(self, key: bytes) -> bool:
        """Whether a key is in the file. It takes the same time for any key of its length."""
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        return any(matches)

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
            self._keys, self._stamp, self._problem = self._read(), stamp, ""
            LOG.info("API keys read again from %s: %d keys", self._path, len(self._keys))
        except SettingsError as error:
            self._keys, self._stamp = (), None
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

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
        except OSError as error:
            raise self._unreadable(error.strerror) from None
        keys = tuple(key for line in lines if (key := COMMENT.sub(b"", line).strip()))
        if not keys:
            raise SettingsError(f"api_key_file {self._path} has no key: write one a line")
        return keys

    def _unreadable(self, reason: str | None) -> SettingsError:
        return SettingsError(f"api_key_file {self._path} cannot be read: {reason}")


class KeyCheck:
    """ASGI middleware that refuses requests without a key of the file."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] == "http" and not self._is_allowed(scope):
            error = ApiError(
                401,
                "a valid API key is required: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
            )
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        is_page = scope["path"] == PAGE and scope["method"] in ("GET", "HEAD")
        if is_page or scope["path"] in CHECK_PATHS or scope["path"].startswith(OPEN_PREFIX):
            return True
        given = _given_key(scope)
        return given is not None and self._keys.allow(given)


def key_of(scope: Scope) -> bytes:
    """The key that a request has; empty for none."""
    return _given_key(scope) or b""


def _given_key(scope: Scope) -> bytes | None:
    """The key; None for none, and for two, of which a proxy in front may have checked the other."""
    sent = [header for header in scope["headers"] if header[0] in KEY_HEADERS]
    headers = dict(sent)
    if len(headers) < len(sent):
        return None
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    given: bytes | None = key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key")
    return given
