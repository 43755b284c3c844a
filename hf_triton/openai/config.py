# SPDX-License-Identifier: Apache-2.0
"""Settings of the gateway, declared once; the command line's options are made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import annotated_types
from pydantic import BaseModel, ConfigDict, StringConstraints

Address = Annotated[str, StringConstraints(pattern=r"^[^\s/]+:[0-9]{1,5}$")]
Port = Annotated[int, annotated_types.Ge(0), annotated_types.Le(65535)]
Seconds = Annotated[float, annotated_types.Gt(0), annotated_types.Le(7 * 24 * 3600)]
Count = Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)]


class GatewayConfig(BaseModel):
    """What one gateway does; each of its worker processes has a copy."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    triton: Address = "localhost:8001"
    """Triton's gRPC address, HOST:PORT."""

    triton_headers_file: Path | None = None
    """File of headers to send to Triton with every call, `NAME: VALUE`, one a line; lines that begin with # are
    comments. Triton's `--grpc-restricted-protocol=...:KEY=VALUE` wants `triton-grpc-protocol-KEY: VALUE`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""

    port: Port = 9000
    """Port to listen on; 0 for a free one."""

    api_key_file: Path | None = None
    """File of API keys, one a line; lines that begin with # are comments. It is read again when it changes. Without
    one, every client is served."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the gateway from a browser (CORS), `https://chat.example.com` or `*`; none by
    default."""

    max_body_bytes: Count = 16 << 20
    """Largest body of a request, in bytes."""

    max_header_bytes: Count = 64 << 10
    """Largest head of a request, in bytes."""

    max_concurrent_requests: Count = 1024
    """Requests in flight in one worker process; more are refused with status 429."""

    timeout_s: Seconds = 3600.0
    """Longest time that a request may take, streams included, in seconds."""

    read_timeout_s: Seconds = 60.0
    """Longest time in which a request must have arrived, from its first byte to its last, in seconds."""

    write_timeout_s: Seconds = 60.0
    """A client that takes no byte of its response for this long is disconnected, in seconds."""

    workers: Count = 1
    """Processes that accept requests on the port."""
