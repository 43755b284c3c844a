# SPDX-License-Identifier: Apache-2.0
"""Triton's gRPC as a client reaches it: address, headers, TLS. Imports gRPC when it connects."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hf_triton_gateway.gateway_config import TLS_SCHEME, TritonAddress
from hf_triton_gateway.http.tls import read_certificates, read_chain
from hf_triton_gateway.triton import triton_words
from hf_triton_gateway.triton.triton_headers import read_headers

if TYPE_CHECKING:
    import grpc

CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the Hub
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 500),
    # Triton ends a connection, and the calls on it, after pings less than 5 minutes apart while it sends nothing. An
    # answer may take longer. What is sent to a machine that is gone fails after the timeout all the same.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
RECONNECT_LIMIT_S: Final = 1.0
"""How long a call waits for the next attempt to connect; two attempts are at most half a second apart."""


@dataclass(frozen=True)
class Tls:
    """What a client needs for TLS, as PEM."""

    ca: bytes | None
    """Authorities that are trusted; None: gRPC's own, or those of GRPC_DEFAULT_SSL_ROOTS_FILE_PATH."""
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    server_name: str | None


@dataclass(frozen=True)
class Endpoint:
    """A Triton's gRPC."""

    address: str
    """HOST:PORT."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with each call; names are in lower case."""
    tls: Tls | None = None

    @classmethod
    def read(cls, address: TritonAddress, headers: Mapping[str, str] | None = None) -> Endpoint:
        """The endpoint of an address, with its files read; `headers` count before those of its file."""
        file = address.triton_headers_file
        more = {} if file is None else read_headers(file)
        host_port = address.triton.removeprefix(TLS_SCHEME)
        return cls(host_port, more | dict(headers or {}), _read_tls(address) if address.has_tls else None)

    @property
    def options(self) -> list[tuple[str, Any]]:
        name = self.tls and self.tls.server_name
        return [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials of a channel; None: it is not encrypted."""
        import grpc

        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(self.tls.ca, self.tls.key, self.tls.certificate)

    def channel(self) -> grpc.aio.Channel:
        """A channel of the running event loop."""
        import grpc

        credentials = self.credentials
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options=self.options)
        return grpc.aio.secure_channel(self.address, credentials, options=self.options)

    def problem(self, details: str) -> str:
        """Why Triton cannot be reached, from gRPC's own sentence."""
        return triton_words.problem(details, has_tls=self.tls is not None)

    def misfit(self, details: str) -> str | None:
        """Why it cannot be reached, if that is for someone to mend."""
        return triton_words.misfit(details, has_tls=self.tls is not None)


async def wait_for_attempt(channel: grpc.aio.Channel) -> None:
    """Wait for a channel's next attempt to connect: until then calls fail, though Triton may be there."""
    import grpc

    failed = grpc.ChannelConnectivity.TRANSIENT_FAILURE
    if channel.get_state() is failed:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_LIMIT_S):
                await channel.wait_for_state_change(failed)


def _read_tls(address: TritonAddress) -> Tls:
    ca = None
    if address.triton_ca_file is not None:
        ca = read_certificates(address.triton_ca_file, "triton_ca_file")
    certificate = key = None
    if address.triton_cert_file is not None and address.triton_key_file is not None:
        names = ("triton_cert_file", "triton_key_file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        certificate, key = read_chain(context, (address.triton_cert_file, address.triton_key_file), names)
    return Tls(ca, certificate, key, address.triton_server_name)
