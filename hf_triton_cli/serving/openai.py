# SPDX-License-Identifier: Apache-2.0
"""`hf-triton openai`: a gateway that speaks OpenAI's API, in front of a Triton that runs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import click

from hf_triton.errors import ServerError
from hf_triton_cli.serving.addresses import check_host, check_ports
from hf_triton_cli.serving.gateway_options import ALONE, gateway_options, read_config
from hf_triton_gateway.gateway_config import GatewayConfig


@click.command(epilog="Example: hf-triton openai --triton gpu1:8001 --port 9000 --api-key-file keys")
@gateway_options(ALONE)
def openai(**values: Any) -> None:
    """Speak OpenAI's API in front of a Triton that runs elsewhere.

    The gateway starts at once and answers 503 until Triton does. Any number of them may stand before one Triton.
    """
    config = read_config(ALONE, values)
    check_host(config.host)
    check_ports({ALONE["port"]: config.port})
    from hf_triton_gateway.uvicorn_server import run

    if config.on_demand:
        _require_explicit_mode(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises a signal again after it has stopped
    with contextlib.suppress(KeyboardInterrupt):
        run(config)


def _require_explicit_mode(config: GatewayConfig) -> None:
    """Refuse a Triton that loads no models on request; one that is not there yet is asked later."""
    from hf_triton_gateway.http.api_errors import ApiError
    from hf_triton_gateway.triton.endpoint import Endpoint
    from hf_triton_gateway.triton.repository import TritonRepository

    async def check() -> None:
        repository = TritonRepository(Endpoint.read(config), None)
        try:
            await repository.check()
        finally:
            await repository.close()

    try:
        asyncio.run(check())
    except ApiError as error:
        if error.code == "not_loaded":
            raise ServerError("gateway_failed", error.message) from None
