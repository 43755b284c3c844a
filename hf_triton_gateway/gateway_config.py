# SPDX-License-Identifier: Apache-2.0
"""Settings of the gateway, declared once; the command line's options are made from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from hf_triton.errors import clip
from hf_triton.protocol.durations import FOR_EVER, Duration

TLS_SCHEME: Final = "grpcs://"
Address = Annotated[str, StringConstraints(pattern=r"^[^\s/]+:[0-9]{1,5}$")]
GrpcAddress = Annotated[str, StringConstraints(pattern=r"^(grpcs://)?[^\s/]+:[0-9]{1,5}$")]
KeyFile = Annotated[Path | None, Field(validate_default=True)]
Port = Annotated[int, annotated_types.Ge(0), annotated_types.Le(65535)]
Seconds = Annotated[float, annotated_types.Gt(0), annotated_types.Le(7 * 24 * 3600)]
Count = Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)]
ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
"""Browsers send it so, without a path; another text would match none."""
DEFAULT_KEEP_ALIVE_S: Final = 600.0


class TritonAddress(BaseModel):
    """How a Triton is reached, by the gateway and by commands."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    triton: GrpcAddress = "localhost:8001"
    """Triton's gRPC address, HOST:PORT; grpcs://HOST:PORT for TLS."""

    triton_headers_file: Path | None = None
    """File of headers to send to Triton with every call, `NAME: VALUE`, one a line; lines that begin with # are
    comments. Triton's `--grpc-restricted-protocol=...:KEY=VALUE` wants `triton-grpc-protocol-KEY: VALUE`."""

    triton_ca_file: Path | None = None
    """Certificates, in PEM, of the authorities that Triton's may be of, for TLS; by default those of gRPC, or of its
    variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH."""

    triton_cert_file: Path | None = None
    """Certificate to show to Triton, in PEM, for its `--grpc-use-ssl-mutual`."""

    triton_key_file: KeyFile = None
    """Its private key, in PEM."""

    triton_server_name: str | None = None
    """The name that Triton's certificate has, if it is not the one in the address."""

    @property
    def has_tls(self) -> bool:
        """Whether Triton is spoken to over TLS: the address says so, or a file is for it."""
        files = (self.triton_ca_file, self.triton_cert_file)
        return self.triton.startswith(TLS_SCHEME) or any(file is not None for file in files)

    @field_validator("triton_key_file")
    @classmethod
    def _needs_a_certificate(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        return both_or_none(key, info, "triton_cert_file")


def both_or_none(key: Path | None, info: ValidationInfo, certificate: str) -> Path | None:
    """A private key; a `ValueError` if it is there without its certificate, or that without it."""
    if (key is None) != (info.data.get(certificate) is None):
        raise ValueError(f"{info.field_name} belongs to {certificate}: give both, or neither")
    return key


class GatewayConfig(TritonAddress):
    """What one gateway does; each of its worker processes has a copy."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""

    port: Port = 9000
    """Port to listen on; 0 for a free one."""

    api_key_file: Path | None = None
    """File of API keys, one a line, with its limits behind it; # begins a comment, on a line of its own or after a key.
    It is read again when it changes, and a key that is not in it any more is refused; without a key in it, all are.
    Without a file, every client is served. Triton's own ports ask for no key."""

    ssl_certfile: Path | None = None
    """Certificate of the gateway, in PEM, with those between it and its authority behind it: it serves HTTPS then, TLS
    1.2 and 1.3. It and its key are read again when they change."""

    ssl_keyfile: KeyFile = None
    """Its private key, in PEM."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the gateway from a browser (CORS), `https://chat.example.com` or `*`; none by
    default."""

    max_body_bytes: Count = 16 << 20
    """Largest body of any request, in bytes. Bodies of JSON that hold no images have one of their own, 4 MiB."""

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

    max_stored_responses: Annotated[int, annotated_types.Ge(0), annotated_types.Le(2**31 - 1)] = 1000
    """Responses of /v1/responses that are kept in memory, for requests that go on behind them; 0: none, which is also
    so with several workers. Half of them may be in the making, in the background."""

    max_stored_bytes: Count = 32 << 20
    """Bytes of JSON that they may be together; the oldest of the key that has most makes room."""

    store_for_s: Seconds = 24 * 3600.0
    """How long one is kept, in seconds."""

    shutdown_timeout_s: Seconds = 30.0
    """Time for requests in flight after SIGTERM, in seconds; those that take longer get 503."""

    default_model: str | None = None
    """The model of requests that name none, where several do what the endpoint is for. By default such requests are
    refused; where one model does, they mean it."""

    on_demand: bool = False
    """Load models when they are asked for, and unload idle ones. A Triton that `hf-triton serve` has not started must
    run with --model-control-mode=explicit."""

    keep_alive: Duration | None = None
    """With --on-demand: unload a model that is idle for this long, 30s, 10m or 1h; 0: at once; -1: never. By default
    10m. A folder's own setting keep_alive comes before it."""

    max_loaded: Count | None = None
    """With --on-demand: most models that are loaded at a time; the least recently used idle one is unloaded for
    another. Without it, any number."""

    sleep: bool = False
    """With --on-demand: put idle models to sleep in place of unloading them; --max-loaded counts those that are awake.
    Models that cannot sleep are unloaded."""

    triton_metrics: Address | None = None
    """With --on-demand: Triton's metrics address, HOST:PORT; a model is then kept while requests that bypass the
    gateway are in flight."""

    @property
    def num_stored_responses(self) -> int:
        """How many responses are kept; none if another worker could be asked for them."""
        return self.max_stored_responses if self.workers == 1 else 0

    @property
    def idle_limit_s(self) -> float | None:
        """Time after which an idle model is unloaded, in seconds; None: never."""
        given = DEFAULT_KEEP_ALIVE_S if self.keep_alive is None else self.keep_alive
        return None if given == FOR_EVER else given

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    @field_validator("ssl_keyfile")
    @classmethod
    def _needs_a_server_certificate(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        return both_or_none(key, info, "ssl_certfile")

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins must be * or an origin such as https://chat.example.com, got {clip(origin)}"
                )
        return origins

    @field_validator("on_demand")
    @classmethod
    def _needs_one_worker(cls, on_demand: bool, info: ValidationInfo) -> bool:
        if on_demand and info.data.get("workers", 1) > 1:
            raise ValueError(
                f"on_demand needs one worker, got {info.data['workers']}: they would unload each other's models"
            )
        return on_demand

    @field_validator("keep_alive", "max_loaded", "sleep", "triton_metrics")
    @classmethod
    def _needs_on_demand(cls, value: object, info: ValidationInfo) -> object:
        if value not in (None, False) and not info.data.get("on_demand", True):
            raise ValueError(f"{info.field_name} needs --on-demand")
        return value
