# SPDX-License-Identifier: Apache-2.0
"""API keys: who is served. Keys are compared in constant time, and never logged."""

from __future__ import annotations

import codecs
import hmac
import logging
import time
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from hf_triton.errors import SettingsError
from hf_triton.openai.errors import ApiError

LOG: Final = logging.getLogger("hf_triton.openai")
CHECK_EVERY_S: Final = 1.0
"""How often the file is looked at, at most."""
OPEN_PATHS: Final = ("/health", "/")
"""What needs no key: a balancer's check, and the chat page, which asks for one."""
OPEN_PREFIX: Final = "/page/"
"""Files of the chat page."""


class ApiKeys:
    """The keys of a file.

    Args:
        path: One key a line; lines that begin with # are comments.

    Raises:
        SettingsError: The file cannot be read, or has no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._keys = self._read()
        self._checked_s = time.monotonic()

    def allow(self, key: bytes) -> bool:
        """Whether a key is in the file. It takes the same time for any key of its length."""
        self._reread()
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        return any(matches)

    def _reread(self) -> None:
        """Read the file again if it has changed; if it cannot be read, the keys stay."""
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_EVERY_S:
            return
        self._checked_s = now_s
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._keys, self._stamp = self._read(), stamp
                LOG.info("API keys read again from %s: %d keys", self._path, len(self._keys))
        except (OSError, SettingsError) as error:
            LOG.warning("API keys unchanged: %s", error)

    def _read_stamp(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise SettingsError(f"api_key_file {self._path} cannot be read: {error.strerror}") from None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
        except OSError as error:
            raise SettingsError(f"api_key_file {self._path} cannot be read: {error.strerror}") from None
        keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith(b"#"))
        if not keys:
            raise SettingsError(f"api_key_file {self._path} has no key: write one a line")
        return keys


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
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_PREFIX):
            return True
        headers = dict(scope["headers"])
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key")
        return given is not None and self._keys.allow(given)
