# SPDX-License-Identifier: Apache-2.0
"""What the gateway's log says of the connection to Triton."""

import asyncio
import logging
from collections.abc import Callable

import grpc
import pytest

from hf_triton.openai.triton import TritonModels
from hf_triton.server import free_ports


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():
            await asyncio.sleep(0.02)


def test_each_change_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"

    async def body() -> None:
        models = TritonModels(address, 5.0)
        watching = asyncio.create_task(models.watch())
        await until(lambda: len(caplog.messages) == 1)
        for count in (2, 4):
            server = grpc.aio.server()
            assert server.add_insecure_port(address)
            await server.start()
            await until(lambda: len(caplog.messages) == count)  # noqa: B023
            await server.stop(None)
            await until(lambda: len(caplog.messages) == count + 1)  # noqa: B023
        watching.cancel()
        await models.close()

    with caplog.at_level(logging.INFO, "hf_triton.openai"):
        asyncio.run(body())
    lost, reached = (
        f"no Triton answers gRPC at {address}: the connection is refused",
        f"connected to Triton at {address}",
    )
    assert caplog.messages == [lost, reached, lost, reached, lost]


def test_an_http_port_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        models = TritonModels(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", 5.0)
        watching = asyncio.create_task(models.watch())
        await until(lambda: bool(caplog.messages))
        watching.cancel()
        await models.close()
        server.close()

    asyncio.run(body())
    assert "is it the HTTP port?" in caplog.messages[0]
