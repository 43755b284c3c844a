# SPDX-License-Identifier: Apache-2.0
"""Certificates: their files, checked before use, and the gateway's own, which is read again when its files change."""

from __future__ import annotations

import logging
import ssl
import stat
import time
from pathlib import Path
from typing import Final

from hf_triton.errors import SettingsError
from hf_triton_gateway.gateway_config import GatewayConfig

LOG: Final = logging.getLogger("hf_triton_gateway")
CHECK_EVERY_S: Final = 1.0
"""How often the gateway's files are looked at, while clients connect."""
MISMATCH: Final = "KEY_VALUES_MISMATCH"


def read_certificates(path: Path, name: str) -> bytes:
    """Certificates of authorities, in PEM."""
    data = _read(path, name)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise SettingsError(f"{name} {path} holds no certificate in PEM") from None
    return data


def read_chain(context: ssl.SSLContext, files: tuple[Path, Path], names: tuple[str, str]) -> tuple[bytes, bytes]:
    """Take a certificate and its key, in PEM, into a context.

    Args:
        context: TLS of the side that shows the certificate.
        files: The certificate's, which may have those between it and its authority behind it; the key's.
        names: The files' settings, for errors.
    """
    certificate, key = (_read(path, name) for path, name in zip(files, names, strict=True))
    both = f"{names[0]} {files[0]} and {names[1]} {files[1]}"
    try:
        context.load_cert_chain(*files, password=lambda: "")  # it would ask at the terminal
    except ssl.SSLError as error:
        if error.reason == MISMATCH:
            raise SettingsError(f"{both} do not belong together") from None
        raise SettingsError(f"{both} must be a certificate and its key in PEM, without a passphrase") from None
    return certificate, key


def _read(path: Path, name: str) -> bytes:
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # it is read twice, and may wait for ever
            raise SettingsError(f"{name} {path} is a pipe: it must be a file")
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{name} {path} cannot be read: {error.strerror}") from None


class ServerCertificate:
    """The gateway's certificate. A new one serves the connections that come after it; a wrong one changes nothing."""

    def __init__(self, config: GatewayConfig) -> None:
        if config.ssl_certfile is None or config.ssl_keyfile is None:
            raise SettingsError("ssl_certfile and ssl_keyfile belong together")
        self._files = config.ssl_certfile, config.ssl_keyfile
        self._stamp = self._read_stamp()
        self._fresh = self.context = self._read()
        self._checked_s = time.monotonic()
        self.context.sni_callback = self._on_connection

    def _on_connection(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Runs when a client says hello."""
        if time.monotonic() - self._checked_s > CHECK_EVERY_S:
            self._checked_s = time.monotonic()
            self._reread()
        connection.context = self._fresh

    def _reread(self) -> None:
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._fresh = self._read()
            LOG.info("the certificate was read again from %s", self._files[0])
        except (SettingsError, OSError) as error:
            LOG.error("the former certificate stays: %s", error)

    def _read_stamp(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in self._files if path.exists())

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)  # TLS 1.2 and 1.3
        read_chain(context, self._files, ("ssl_certfile", "ssl_keyfile"))
        return context
