# SPDX-License-Identifier: Apache-2.0
"""Says in the gateway's log when Triton is reached, lost and reached again."""

from __future__ import annotations

import logging
from typing import Final

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.openai.errors import transport_reason

LOG: Final = logging.getLogger("hf_triton.openai")
REASON_TIMEOUT_S: Final = 5.0


async def watch_connection(channel: grpc.aio.Channel, address: str) -> None:
    """Log changes of a channel's connection, and keep it connecting, until the task is cancelled."""
    was_reached: bool | None = None
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY and was_reached is not True:
            was_reached = True
            LOG.info("connected to Triton at %s", address)
        elif state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and was_reached is not False:
            was_reached = False
            LOG.warning("no Triton answers gRPC at %s: %s", address, await _failure(channel))
        await channel.wait_for_state_change(state)


async def _failure(channel: grpc.aio.Channel) -> str:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    try:
        await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=REASON_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return transport_reason(error.details() or "")
    return "the connection broke off"
